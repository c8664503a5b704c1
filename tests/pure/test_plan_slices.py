"""Plans over slices of a sequence: legal, within the limits, no better than their bound, and as good as trying every order."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import zerobubble as zb
from tests.pure.test_cli import refused, run
from tests.refusals import raises
from zerobubble import Costs, InputError, Kind, Limits, Op, Placement, Schedule, simulate
from zerobubble.errors import ScheduleError
from zerobubble.planning import Objective, Problem, Workload, plan
from zerobubble.planning.attempt import Budget
from zerobubble.planning.axes.slices import SliceSavings
from zerobubble.planning.competition import compete
from zerobubble.simulation import memory_faults, peak_memory
from zerobubble.slicing import attention_in, equal_lengths, slices_of
from zerobubble.verify import schedule_faults

PAPER = Workload.uniform(8, times=(29.718, 29.444, 19.927), comm=0.527, held=0.941)
"""The times of the Zero Bubble paper's model of 6.2B parameters on 8 ranks."""


def rows_of(placement: Placement, rank: int, microbatches: int, slices: int) -> Iterator[tuple[Op, ...]]:
    """Every order of the passes of a rank that its own stages allow: F of slices in order, B in reverse order, W after its B."""
    stages = [stage for _, stage in placement.stages(rank)]
    every = [Op(kind, stage, j) for kind in (Kind.F, Kind.B, Kind.W) for stage in stages for j in range(microbatches * slices)]

    def needs(op: Op) -> Iterator[Op]:
        kind, stage, j = op
        number = j % slices
        if kind is Kind.W:
            yield Op(Kind.B, stage, j)
        elif kind is Kind.F:
            yield from (Op(kind, other, j) for other in stages if other < stage)
            yield from [Op(kind, stage, j - 1)] if number else []
        else:
            yield from (Op(kind, other, j) for other in stages if other > stage)
            yield from [Op(kind, stage, j + 1)] if number + 1 < slices else []
            yield from (Op(Kind.F, stage, j - number + k) for k in range(slices))

    before = {op: set(needs(op)) for op in every}

    def extended(row: tuple[Op, ...], done: frozenset[Op]) -> Iterator[tuple[Op, ...]]:
        if len(row) == len(every):
            yield row
        for op in every:
            if op not in done and before[op] <= done:
                yield from extended((*row, op), done | {op})

    return extended((), frozenset())


def random_problem(dice: random.Random, placement: Placement, microbatches: int, slices: int, objective: Objective) -> Problem:
    """Unequal stages and messages, slices of unequal length with attention, and memory for one microbatch or more."""
    stages = placement.num_stages

    def column(least: int, most: int) -> tuple[int, ...]:
        return tuple(dice.randint(least, most) * 1_000_000 for _ in range(stages))

    held = column(2, 9)
    after_b = tuple(dice.randint(0, size // 1_000_000) * 1_000_000 for size in held)
    comm = tuple(dice.randint(0, 4) * 1_000_000 for _ in range(stages - 1))
    lengths = [dice.uniform(0.2, 1.2) for _ in range(slices)]
    costs = Costs(column(1, 20), column(1, 20), column(0, 20), comm, held, after_b).sliced(
        [length / sum(lengths) for length in lengths], attention=(dice.uniform(0, 0.8), dice.uniform(0, 0.8))
    )
    room = dice.choice((1.0, 1.3, 5.0))
    limits = Limits(tuple(round(room * size) + slices for size in placement.rank_sums(held)))
    return Problem(placement, microbatches * slices, costs, limits, objective)


def least_by_trying(problem: Problem, rows: Sequence[Sequence[tuple[Op, ...]]]) -> int | None:
    """The least objective of the schedules made of one of the `rows` of each rank, in ns; None if none runs."""
    times = []
    for chosen in product(*rows):
        schedule = Schedule("tried", problem.placement, problem.num_microbatches, chosen, slices=problem.slices)
        if not memory_faults(schedule, problem.costs, problem.limits):
            try:
                times.append(problem.objective.measure(simulate(schedule, problem.costs)))
            except ScheduleError:
                continue
    return min(times, default=None)


@pytest.mark.parametrize("objective", list(Objective))
@pytest.mark.parametrize("shape", [(2, 1, 2), (2, 1, 3), (3, 1, 3)], ids=str)
def test_no_order_beats_the_bound_and_the_plan_is_one_of_the_best(shape: tuple[int, int, int], objective: Objective) -> None:
    ranks, microbatches, slices = shape
    placement, dice, over = Placement.linear(ranks), random.Random(f"{shape}"), []
    rows = [list(rows_of(placement, rank, microbatches, slices)) for rank in range(ranks)]
    for _ in range(4 if ranks == 2 else 2):
        problem = random_problem(dice, placement, microbatches, slices, objective)
        least, found = least_by_trying(problem, rows), compete({"linear": problem}, Budget(0.0, 400))
        assert least is not None
        assert found.time is not None
        assert problem.bound().time <= least
        over.append(objective.measure(found.timeline) / least - 1 if found.timeline is not None else 1.0)
    assert max(over) <= 0.03
    assert sum(over) / len(over) <= 0.01


@pytest.mark.parametrize("placement", [Placement.linear(2), Placement.vee(2)], ids=["linear", "vee"])
def test_plans_of_more_microbatches_are_legal_and_above_their_bounds(placement: Placement) -> None:
    dice = random.Random(3)
    for slices in (2, 3, 5):
        for objective in Objective:
            problem = random_problem(dice, placement, 3, slices, objective)
            found = compete({placement.name: problem}, Budget(0.0, 300))
            assert not schedule_faults(found.schedule)
            assert not memory_faults(found.schedule, problem.costs, problem.limits)
            assert (found.schedule.slices, found.schedule.whole_microbatches) == (slices, 3)
            assert found.bound.time <= (found.time or 0)


@pytest.mark.parametrize(("microbatches", "slices", "placement", "most"), [(4, 4, "vee", 345), (4, 8, "linear", 318), (16, 4, "vee", 1308)])
def test_few_sequences_fill_the_pipeline(microbatches: int, slices: int, placement: str, most: float) -> None:
    """The best plan of 4 whole microbatches takes 588 ms on these placements, and 16 take 1,694 ms."""
    found = plan(PAPER, microbatches, memory=4, placements=placement, slices=slices, evaluations=600)
    assert found.time is not None
    assert found.bound.time <= found.time <= most * 1e6
    assert max(peak_memory(found.schedule, found.problem.costs)) <= max(found.problem.limits.memory)
    assert found.peak_microbatches is not None
    assert found.peak_microbatches <= 4


def test_the_number_of_slices_is_chosen_and_reported(tmp_path: Path) -> None:
    found = plan(PAPER, 4, memory=4, placements=["linear", "vee"], slices="auto", attention=(0.2, 0.3), evaluations=2_000)
    savings = found.saving(SliceSavings)
    assert savings is not None
    assert [tried.number for tried in savings.tried] == [1, 2, 4, 8, 16]
    assert savings.chosen == found.problem.slices > 1
    whole = savings.tried[0]
    assert whole.plan is not None
    assert whole.plan.time == plan(PAPER, 4, memory=4, placements=whole.placement, evaluations=0).bound.time
    assert all(tried.plan is None or tried.bound.time <= (tried.plan.time or 0) for tried in savings.tried)
    assert json.loads(json.dumps(savings.to_dict()))["chosen"] == savings.chosen
    zb.io.save_plan(found, tmp_path / "plan.json")
    read = zb.io.load_plan(tmp_path / "plan.json")
    assert (read.schedule, read.problem, read.time, read.bound.time) == (found.schedule, found.problem, found.time, found.bound.time)


def test_costs_with_slices_are_planned_as_they_are() -> None:
    costs = Costs.uniform(4, times=(10, 10, 8)).sliced(equal_lengths(3, 0.4), attention=(0.4, 0.4))
    found = plan(costs, 2, placements=Placement.linear(4), evaluations=300)
    assert (found.schedule.slices, found.problem.costs, found.problem.num_microbatches) == (3, costs, 6)
    assert simulate(found.schedule, costs).span >= found.bound.time


def test_one_slice_is_a_whole_microbatch() -> None:
    whole, one = (plan(PAPER, 8, memory=4, placements="vee", evaluations=200, **given) for given in ({}, {"slices": 1}))
    assert (whole.schedule, whole.time, whole.bound) == (one.schedule, one.time, one.bound)


@pytest.mark.parametrize(
    "given",
    [
        {"slices": 0},
        {"slices": 2.5},
        {"slices": "many"},
        {"slices": [2, -1]},
        {"slices": 10**6},
        {"attention": (0.2, 0.3)},
        {"slices": 2, "attention": (0.2,)},
        {"slices": 2, "attention": (0.2, 1.3)},
        {"slices": 2, "recompute": "auto"},
        {"slices": 2, "shares": (1, 2)},
        {"slices": 2, "baseline": "zb-heuristic"},
        {"slices": 2, "host": zb.offload.HostLink(to_host=15e9, from_host=15e9)},
        {"slices": 2, "head": zb.planning.Head.from_parts(Costs.uniform(2).with_divided_head((5, 5, 5)), Placement.linear(2))},
    ],
    ids=str,
)
def test_slices_that_cannot_be_planned_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        plan(Workload.uniform(2, (1, 1, 1)), 2, memory=2, **given, evaluations=1)


def test_problems_need_whole_microbatches() -> None:
    costs = Costs.uniform(2).sliced(3)
    with raises(InputError, slices=3, got=4):
        Problem(Placement.linear(2), 4, costs, Limits((10**9,) * 2))
    with raises(InputError, 4, 3):
        zb.bounds.lower_bounds(Placement.linear(2), 4, costs, None)
    with raises(InputError, got=2):
        zb.bounds.lower_bounds(Placement.linear(2), 6, replace(costs, shares=(1.0, 2.0)), None)


def test_the_command_line_plans_slices_and_reads_its_plan_again(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    asked = ("plan", "-p", "4", "-m", "2", "--times", "10,10,8", "--memory", "2", "--placement", "linear")
    data = json.loads(run(*asked, "--slices", "2,4", "--attention", "0.2,0.3", "--evaluations", "200", "-o", str(file), "--json").output)
    assert data["csv"] is None
    assert {tried["slices"] for tried in data["slices"]["tried"]} == {2, 4}
    shown = json.loads(run("show", str(file), "--json").output)
    assert (shown["num_microbatches"], shown["slices"]) == (2, data["slices"]["chosen"])
    assert shown["period_ms"] == pytest.approx(data["period_ms"])
    again = json.loads(run("plan", "--costs", str(file), "--evaluations", "200", "--json").output)
    assert again["slices"]["chosen"] == data["slices"]["chosen"]
    assert again["period_ms"] <= data["period_ms"] * 1.05
    for wrong in (("--slices", "x"), ("--slices", "0"), ("--slices", "2", "--recompute", "auto"), ("--attention", "0.2,0.3")):
        refused(*asked, *wrong)


def test_the_attention_of_slices_is_found_again() -> None:
    for lengths in ((0.5, 0.5), (0.6, 0.3, 0.1), equal_lengths(7, 0.5)):
        assert attention_in(slices_of(lengths, 0.3, 0.45)) == pytest.approx((0.3, 0.45))
        assert attention_in(slices_of(lengths)) == (0.0, 0.0)
