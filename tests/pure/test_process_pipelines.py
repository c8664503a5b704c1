"""Which call of another pipeline a rank reports when it keeps a pipeline waiting: the running one, or the one that timed out last."""

from __future__ import annotations

import time
from math import inf
from weakref import WeakValueDictionary

import pytest

from zerobubble.runtime.failure import guard
from zerobubble.runtime.failure.context import CallLock
from zerobubble.runtime.failure.guard import CallStatus, register_pipeline, status_in_other_pipeline
from zerobubble.runtime.failure.report import RankStatus


@pytest.fixture(autouse=True)
def no_other_pipelines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pipelines that earlier tests of this process have left alive do not count."""
    monkeypatch.setattr(guard, "_registered", WeakValueDictionary())


class User:
    """A rank's part in a pipeline, in which it does this."""

    def __init__(self, status: CallStatus | None) -> None:
        self.call_lock = CallLock()
        self.status = status
        register_pipeline(self)

    def call_status(self) -> CallStatus | None:
        return self.status


def timed_out(doing: str, ago_s: float) -> CallStatus:
    return CallStatus(time.monotonic() - ago_s, RankStatus(doing))


RUNNING = CallStatus(inf, RankStatus("now"))


@pytest.mark.parametrize(
    ("others", "doing"),
    [
        ([timed_out("long ago", 5.0), timed_out("just now", 1.0)], "just now"),
        ([timed_out("just now", 1.0), None, timed_out("long ago", 5.0)], "just now"),
        ([timed_out("just now", 1.0), RUNNING, timed_out("long ago", 5.0)], "now"),
    ],
)
def test_a_running_call_comes_before_one_that_timed_out_and_the_last_of_those_first(others: list[CallStatus | None], doing: str) -> None:
    living = [User(each) for each in others]
    status = status_in_other_pipeline(User(None))
    assert status is not None
    assert status.doing == doing
    assert len(living) == len(others)


def test_a_rank_in_no_call_reports_none() -> None:
    living = [User(None), User(None)]
    assert status_in_other_pipeline(living[0]) is None
