"""A measured choice runs candidates in blocks. A challenger wins if its median beats the current schedule by more than steps spread."""

from __future__ import annotations

import zerobubble as zb
from tests.refusals import states
from zerobubble.planning import Problem, solve
from zerobubble.replanning.measured_choice import BLOCK, MeasuredChoice

MS = 1_000_000


def entrant(name: str) -> zb.planning.Plan:
    schedule = zb.make(name, 4, 8)
    problem = Problem(schedule.placement, 8, zb.Costs.uniform(4), zb.Limits((8 * MS,) * 4))
    found = solve(problem, evaluations=0)
    return zb.planning.Plan.from_schedule(problem, found.bound, schedule, 0.0, "published")


ENTRANTS = [entrant(name) for name in ("zb-h1", "1f1b", "gpipe")]


def run(times: tuple[float, float, float], *, noise: float = 0.0, cost: float = 0.0) -> tuple[MeasuredChoice, list[int]]:
    """The choice if steps of the entrants take `times` ms, every second one `noise` ms more; and who ran."""
    choice, ran = MeasuredChoice(ENTRANTS, cost * MS), list[int]()
    while not choice.is_over:
        ran.append(ENTRANTS.index(choice.next))
        first = len(ran) == 1 or ran[-2] != ran[-1]
        choice.add(round(MS * (times[ran[-1]] + noise * (len(ran) % 2) + 1000 * (first and len(ran) > 1))))
    return choice, ran


def test_the_least_median_wins_and_the_first_step_after_a_switch_does_not_count() -> None:
    choice, ran = run((30, 20, 25))
    assert ran == [*[0] * BLOCK, *[1] * BLOCK, *[2] * BLOCK, *[2] * BLOCK, *[1] * BLOCK, *[0] * BLOCK]
    assert choice.has_changed
    assert choice.next.schedule == ENTRANTS[1].schedule
    assert choice.next.how == "published, measured to be the fastest of 3"
    states(str(choice), "zb-h1", "30 ms", "1f1b", "20 ms", "25 ms")


def test_slower_challengers_run_once() -> None:
    choice, ran = run((30, 20, 35))
    assert ran == [*[0] * BLOCK, *[1] * BLOCK, *[2] * BLOCK, *[1] * BLOCK, *[0] * BLOCK]
    assert choice.next.schedule == ENTRANTS[1].schedule
    choice, ran = run((30, 40, 35))
    assert ran == [*[0] * BLOCK, *[1] * BLOCK, *[2] * BLOCK]
    assert not choice.has_changed
    assert choice.next.schedule == ENTRANTS[0].schedule


def test_the_current_schedule_stays_unless_a_challenger_beats_noise_and_cost() -> None:
    assert run((30, 25, 35), noise=4)[0].has_changed
    assert not run((30, 25, 35), noise=20)[0].has_changed
    assert run((30, 25, 35), cost=4.9)[0].has_changed
    assert not run((30, 25, 35), cost=5.1)[0].has_changed
