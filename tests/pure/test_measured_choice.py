"""Candidates of a measured choice take turns, and the one with the lowest median wins."""

from __future__ import annotations

import zerobubble as zb
from tests.refusals import states
from zerobubble.planning import Problem, solve
from zerobubble.runtime.hooks.auto import STEPS, MeasuredChoice


def entrant(name: str) -> zb.planning.Plan:
    schedule = zb.make(name, 4, 8)
    problem = Problem(schedule.placement, 8, zb.Costs.uniform(4), zb.Limits((8_000_000,) * 4))
    found = solve(problem, evaluations=0)
    return zb.planning.Plan.from_schedule(problem, found.bound, schedule, 0.0, "published")


def test_the_least_median_wins_whatever_single_steps_took() -> None:
    entrants = [entrant(name) for name in ("zb-h1", "1f1b", "gpipe")]
    choice = MeasuredChoice(entrants)
    ran: list[int] = []
    for turn in range(STEPS):
        for place, usual in enumerate((30_000_000, 20_000_000, 25_000_000)):
            assert not choice.is_over
            ran.append(entrants.index(choice.next))
            choice.add(5 if turn == 0 and place == 0 else 1_000_000_000 if turn == 1 and place == 1 else usual)
    assert ran == [0, 1, 2] * STEPS
    assert choice.is_over
    assert choice.next.schedule == entrants[1].schedule
    assert choice.next.how == "published, measured to be the fastest of 3"
    states(str(choice), "zb-h1", "30 ms", "1f1b", "20 ms", "25 ms")
