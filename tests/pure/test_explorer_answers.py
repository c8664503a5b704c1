"""The explorer's figures: what they say holds for the numbers next to them."""

from __future__ import annotations

import json

import zerobubble as zb
from zerobubble.explorer.answer import answer, answer_to_dict
from zerobubble.explorer.question import Question


def peak(question: Question) -> tuple[str, str]:
    """The figure of the peak memory and its detail."""
    [found] = [figure for figure in answer_to_dict(answer(question))["figures"] if figure["label"] == "peak memory"]
    return found["value"], found["detail"]


def test_the_rank_that_holds_most_is_the_one_with_most_bytes() -> None:
    """Rank 0 holds two microbatches of 5 GB and rank 1 a single one of 23 GB."""
    costs = zb.Costs.from_ms([1, 1], [1, 1], [1, 1], held_after_f=[5 * 10**9, 23 * 10**9])
    question = Question("1f1b", ranks=2, microbatches=4, costs=json.dumps(costs.to_dict()))
    assert peak(question) == ("23 GB", "rank 1 holds most, rank 0 least: 10 GB")


def test_ranks_that_hold_the_same_are_not_reported_apart() -> None:
    assert peak(Question("gpipe", ranks=2, microbatches=4)) == ("4 microbatches", "the same on every rank")
    assert peak(Question("gpipe", ranks=1, microbatches=4)) == ("4 microbatches", "on the only rank")


def test_idle_time_of_ranks_with_less_work_is_imbalance() -> None:
    """Of four ranks with 255, 340, 340 and 340 ms of work one has 85 ms less, which is the imbalance of the mean rank times 4."""
    costs = zb.Costs.from_ms(*[[works / 24 for works in (255, 340, 340, 340)]] * 3)
    found = answer(Question("1f1b", ranks=4, microbatches=8, costs=json.dumps(costs.to_dict())))
    text = answer_to_dict(found)["notes"][-1]
    share = 85e6 / (4 * found.timeline.makespan)
    assert f"imbalance {100 * share:.1f} %" in text
    assert text.endswith(" Ranks have 255 ms to 340 ms of work.")
    assert "of work" not in answer_to_dict(answer(Question("1f1b", ranks=4, microbatches=8)))["notes"][-1]
