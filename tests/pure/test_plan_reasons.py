"""What a plan says of a placement on which nothing can be searched."""

from __future__ import annotations

import zerobubble as zb

WORK = zb.Workload.uniform(3, (1, 1, 1), held=2.0)
"""B leaves W twice of what F saved."""


def note(memory: float, evaluations: int) -> str:
    return zb.plan(WORK, 6, memory, placements="linear", evaluations=evaluations).choices[0].note


def test_where_w_apart_from_b_does_not_fit_nothing_was_searched() -> None:
    told = note(1.5, evaluations=100)
    assert told.startswith(
        "nothing was searched, since the search runs W apart from B and one microbatch then takes the memory of 2 on rank 0, "
        "which has room for 1.5: raise its limit; it has a span 28.57 % over its bound: "
    )


def test_with_room_for_it_or_without_a_budget_the_note_is_another() -> None:
    assert note(2, evaluations=100).startswith("the search ended ")
    assert note(1.5, evaluations=0).startswith("without a search it has a span 28.57 % over its bound: ")
