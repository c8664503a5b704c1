"""In which call of another pipeline a rank is that keeps one waiting: the one that goes on, or the one that it gave up last."""

from __future__ import annotations

import time
from math import inf

import pytest

from zerobubble.runtime.failure.pipelines import Inside, enlist, status_beside
from zerobubble.runtime.failure.report import RankStatus
from zerobubble.runtime.failure.turn import Turn


class User:
    """A rank's part in a pipeline, in which it does this."""

    def __init__(self, inside: Inside | None) -> None:
        self.turn = Turn()
        self.told = inside
        enlist(self)

    def inside(self) -> Inside | None:
        return self.told


def given_up(doing: str, ago_s: float) -> Inside:
    return Inside(time.monotonic() - ago_s, RankStatus(doing))


GOES_ON = Inside(inf, RankStatus("now"))


@pytest.mark.parametrize(
    ("others", "doing"),
    [
        ([given_up("long ago", 5.0), given_up("just now", 1.0)], "just now"),
        ([given_up("just now", 1.0), None, given_up("long ago", 5.0)], "just now"),
        ([given_up("just now", 1.0), GOES_ON, given_up("long ago", 5.0)], "now"),
    ],
)
def test_what_goes_on_counts_more_than_what_was_given_up_and_the_last_of_that_most(others: list[Inside | None], doing: str) -> None:
    living = [User(each) for each in others]
    status = status_beside(User(None))
    assert status is not None
    assert status.doing == doing
    assert len(living) == len(others)


def test_a_rank_between_two_calls_of_all_its_pipelines_is_in_none() -> None:
    living = [User(None), User(None)]
    assert status_beside(living[0]) is None
