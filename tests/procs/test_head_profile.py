"""Profiles of a divided head, and plans made from them.

Parts are profiled under the algorithm that ran them.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
from torch import Tensor

import zerobubble as zb
from tests.procs.ranks import Ranks
from tests.procs.test_divided_head import WIDTH, OneDevice, body, ignoring, linear
from tests.thinned import every
from zerobubble.runtime.measure.profile import MeasuredHead, costs_of, one_by_one, with_measured_head
from zerobubble.schedules import with_vocabulary


def metered(timeline: zb.Timeline, costs: zb.Costs) -> zb.Timeline:
    """`timeline` with its memory noted after each pass, as ranks meter it."""
    memory = []
    for row in timeline.rows:
        held = accumulate(costs.memory_change(*span.op[:2]) for span in row)
        memory.append(tuple(zip((span.end for span in row), held, strict=True)))
    return replace(timeline, memory=tuple(memory))


@pytest.mark.parametrize("algorithm", [1, 2])
@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_steps_one_by_one_show_the_costs_under_which_they_ran(name: str, algorithm: int) -> None:
    plain = zb.make(name, 3, 4)
    schedule = with_vocabulary(plain, algorithm)
    stages = schedule.num_stages
    first, *others = (1000 * (3 + stage) for stage in range(stages))
    costs = zb.Costs([first, *others], [5000] * stages, [2000] * stages, [700] * (stages - 1), [90] * stages, [70] * stages)
    costs = costs.with_divided_head((0.004, 0.003, 0.0025), held=40, collective=0.0006)
    played = {one: metered(zb.simulate(one_by_one(schedule, algorithm=one), costs), costs) for one in (1, 2)}
    measured = {one: MeasuredHead(timeline, [timeline]) for one, timeline in played.items()}
    found = with_measured_head(costs_of(schedule.placement, played[algorithm], [played[algorithm]]), algorithm, measured)
    hops = zip(schedule.placement.routes[0], schedule.placement.routes[0][1:], strict=False)
    assert found.comm == tuple(700 * (here != there) for here, there in hops)
    for column in ("forward", "backward", "weight", "held_after_f", "held_after_b", "collective"):
        assert found.column(column) == costs.column(column), column
    for column in ("head_forward", "head_backward", "head_weight", "held_head"):
        parts = [value if stage in schedule.head_parts else 0 for stage, value in enumerate(costs.column(column))]
        assert found.column(column) == tuple(parts), column
    assert zb.planning.Head.from_parts(found).times == pytest.approx((0.012, 0.009, 0.0075))


def profiled(group: Any, name: str, algorithm: int) -> tuple[zb.Costs, list[tuple[int, int]], float, float, list[Tensor | None]]:
    """A profile, its progress reports, errors of a step with a plan made from it, and the gradients that it left."""
    plain = zb.make(name, group.size(), 4)
    whole, reported = OneDevice(plain.num_stages), []
    inputs, targets = ignoring(4, 0)
    head = zb.nn.DividedHead(linear())
    with zb.Pipeline(body, with_vocabulary(plain, algorithm), 4, head, group=group) as pipe:
        costs = pipe.profile(inputs, targets, steps=2, progress=lambda done, total: reported.append((done, total)))
        left = [parameter.grad for parameter in pipe.parameters()]
    found = zb.plan(costs, 4, evaluations=0)
    best = next(choice.plan for choice in found.choices if choice.plan.schedule.has_divided_head)
    with zb.Pipeline(body, zb.planning.Plan.from_dict(best.to_dict()), 4, head, group=group) as pipe:
        loss = pipe.step(inputs, targets)
        _, mean = whole.step(inputs, targets, 4)
        return costs, reported, (loss - mean).abs().item(), whole.worst(pipe, lambda parameter: parameter.grad), left


@pytest.mark.long
@pytest.mark.parametrize(("name", "algorithm"), every(1, [("zb-v", 1), ("1f1b", 2)]))
def test_a_profile_measures_its_parts_and_the_next_schedule_is_planned_with_them(world: Ranks, name: str, algorithm: int) -> None:
    (costs, *_), *_ = results = world.run(profiled, name, algorithm, ranks=2)
    for found, result, *errors, left in results:
        assert found == costs, "every rank has the same costs"
        assert result == [(done, 6) for done in range(1, 7)], "a step for memory and two that are timed, by either algorithm"
        assert max(errors) <= 1e-12
        assert left == [None] * len(left)
    tokens, rows = 2 * 5, (6, 5)
    received, own = costs.column("held_head")[:2] if name == "1f1b" else costs.column("held_head")[1::-1]
    least = [8 * tokens * (count + WIDTH) for count in (rows if name == "1f1b" else rows[::-1])]  # the softmax, and the output of a stage
    assert own == least[1]
    assert received >= least[0], "the whole message in which the output came"
    for column in ("head_forward", "head_weight"):
        assert min(costs.column(column)[:2]) > 0
    if name == "zb-v":
        assert costs.column("head_forward")[2:] == (0, 0)
