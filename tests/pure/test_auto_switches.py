"""`zb.Auto` changes the schedule for what lasts, not for noise, and counts what each change costs. Times are injected."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import accumulate
from typing import Any
from unittest import mock

import pytest

import zerobubble as zb
from zerobubble.planning import Problem, solve
from zerobubble.replanning import auto
from zerobubble.replanning import switches as switches_module
from zerobubble.replanning.evidence import Sample
from zerobubble.replanning.switches import Switch, Switches
from zerobubble.timeline import Span

RANKS, MICROBATCHES, MB = 4, 8, 1_000_000
Times = Callable[[int], zb.Costs]


class Searched:
    """The plan of a short search, at once."""

    def __init__(self, problem: Problem, seconds: float) -> None:
        self._plan = solve(problem, evaluations=300)

    def answer(self) -> zb.Plan:
        return self._plan

    def close(self) -> None:
        pass


class Machine:
    """A pipeline of one process whose step `number` takes what `times(number)` says."""

    rank, num_ranks, ranks_meet = 0, RANKS, True

    def __init__(self, times: Times) -> None:
        self.planner = auto.AutoPlanner(zb.Auto(), RANKS, MICROBATCHES)
        self.schedule, self.changes = self.planner.schedule, list[int]()
        self._times, self._number = times, 0
        self.planner.on_attach(self)  # type: ignore[arg-type]

    def run(self, steps: int) -> Machine:
        with mock.patch.multiple(auto, BackgroundPlanner=Searched, REVIEW=5):
            for _ in range(steps):
                self.planner.on_step_end(mock.Mock())
                self._number += 1
        return self

    def timeline(self) -> zb.Timeline:
        played = zb.simulate(self.schedule, self._times(self._number))
        return replace(played, memory=tuple(map(_held, played.rows)))

    def change_schedule(self, schedule: zb.Schedule, costs: zb.Costs) -> None:
        self.schedule = schedule
        self.changes.append(self._number)

    def gather(self, value: Any, doing: str) -> list[Any]:
        return [value]

    def activity(self, when: str) -> Any:
        return nullcontext()


def _held(row: Sequence[Span]) -> tuple[tuple[int, int], ...]:
    """The bytes after each pass, if F holds 1 MB until W."""
    return tuple(
        (span.end, held)
        for span, held in zip(row, accumulate({"F": MB, "W": -MB, "BW": -MB}.get(str(span.op.kind), 0) for span in row), strict=True)
    )


def noisy(seed: int, most: float, late_ms: float) -> Times:
    """Each step, the times of each stage are up to `most` longer, and all messages of a link up to `late_ms` late."""

    def times(number: int) -> zb.Costs:
        draws = random.Random(1000 * seed + number)
        forward, backward, weight = ([10 * (1 + most * draws.random()) for _ in range(RANKS)] for _ in range(3))
        return zb.Costs.from_ms(forward, backward, weight, [0.2 + late_ms * draws.random() ** 2 for _ in range(RANKS - 1)])

    return times


@pytest.mark.parametrize(("most", "late_ms"), [(0.3, 0.0), (1.0, 0.0), (0.3, 20.0), (1.0, 60.0)])
def test_noise_changes_the_schedule_at_most_once_in_100_steps(most: float, late_ms: float) -> None:
    for seed in range(3):
        changes = Machine(noisy(seed, most, late_ms)).run(110).changes
        assert len([step for step in changes if step >= 10]) <= 1, (seed, changes)


def test_a_lasting_change_switches_to_the_plan_for_it() -> None:
    """From step 30 on, F takes three times as long on two stages, and B on the others."""

    def times(number: int) -> zb.Costs:
        draws = random.Random(number)
        slow = 3 if number >= 30 else 1
        pairs = ((slow, 1), (1, slow))
        forward, backward = ([10 * pairs[way][stage % 2] * (1 + 0.05 * draws.random()) for stage in range(RANKS)] for way in (1, 0))
        return zb.Costs.from_ms(forward, backward, [10] * RANKS, 0.2)

    machine = Machine(times).run(130)
    changed = [step for step in machine.changes if step >= 30]
    assert len(changed) == 1, machine.changes
    plan = machine.planner.plan
    assert plan is not None
    assert plan.schedule.rows == machine.schedule.rows
    assert 2.5 < plan.costs.forward[1] / plan.costs.forward[0] < 3.5
    before = Machine(times).run(25)
    assert zb.simulate(machine.schedule, times(200)).makespan < 0.97 * zb.simulate(before.schedule, times(200)).makespan


def test_a_lasting_delay_of_messages_switches() -> None:
    machine = Machine(lambda number: zb.Costs.from_ms([10] * 4, [10] * 4, [10] * 4, 0.2 if number < 30 else [0.2, 30, 0.2])).run(160)
    assert [step for step in machine.changes if step >= 30]
    before = Machine(lambda number: zb.Costs.from_ms([10] * 4, [10] * 4, [10] * 4, 0.2)).run(40).schedule
    late = zb.Costs.from_ms([10] * 4, [10] * 4, [10] * 4, [0.2, 30, 0.2])
    assert zb.simulate(machine.schedule, late).makespan < zb.simulate(before, late).makespan


def test_a_small_gain_does_not_pay_for_an_expensive_switch() -> None:
    costs = zb.Costs.from_ms([10, 30, 10, 30], [30, 10, 30, 10], [10] * RANKS, 0.2)
    machine = Machine(lambda _: costs)
    problem = Problem(machine.schedule.placement, MICROBATCHES, costs, zb.Limits((8_000 * MB,) * RANKS), zb.planning.Objective.MAKESPAN)
    quick, slow = solve(problem, evaluations=300), solve(problem, evaluations=0)
    shorter = slow.time - quick.time
    assert shorter > 0
    window, switches = [Sample(slow.time, costs)] * auto.WINDOW, machine.planner._switches
    for cost, pays_off in ((0, True), (0.9 * shorter, True), (1.1 * shorter, False)):
        switches.done = [Switch(3, slow.schedule.name, cost * auto.REVIEW / MB)]
        assert machine.planner._pays_off(slow, quick, window) is pays_off
    switches.done = []
    assert not machine.planner._pays_off(slow, quick, [Sample((1 + number % 2) * slow.time, costs) for number in range(auto.WINDOW)])


def test_a_switch_costs_the_change_and_the_excess_of_the_first_step() -> None:
    pipeline = mock.Mock(schedule=zb.make("1f1b", 2, 4))
    pipeline.gather = lambda mine, doing: [mine, 7 * MB]
    pipeline.timeline.side_effect = [mock.Mock(makespan=makespan * MB) for makespan in (90, 60)]
    switches = Switches()
    for step in range(6):
        switches.after_step(pipeline)
        if step == 2:
            with mock.patch.object(switches_module, "perf_counter_ns", side_effect=[0, 5 * MB]):
                switches.change(pipeline, pipeline.schedule, mock.Mock())
    assert switches.done == [Switch(3, "1f1b", 7 + 30)]
    assert switches.cost == 37 * MB
