"""Steps whose passes are planned ahead for their microbatches: the numbers of one device, never slower than the order alone."""

from __future__ import annotations

import threading
from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest
from torch import Tensor

import zerobubble as zb
from tests.procs.models import build, loss_fn
from tests.procs.ranks import Ranks
from tests.procs.test_order_by import oracle, packed, tokens_in, worst_gradient
from zerobubble.runtime.step.ordering import MicrobatchOrdering
from zerobubble.schedules import with_recompute
from zerobubble.simulation import peak_memory

LENGTHS = [3, 12, 2, 9, 5, 12, 1, 7]
BATCHES = [LENGTHS, LENGTHS[::-1], [1, 20, 3, 16, 2, 18, 4, 9]]
AHEAD = "zerobubble order of microbatches"


@pytest.fixture(scope="module", autouse=True)
def _compiled_search() -> None:
    """What searches is compiled once, here, and not on a rank for which others wait."""
    MicrobatchOrdering("tokens", zb.make("1f1b", 2, 4), None, None)


def plan_ahead(pipe: zb.Pipeline, inputs: list[Tensor]) -> None:
    """`order_ahead`, until the search on its thread has ended by itself."""
    pipe.order_ahead(inputs)
    for thread in threading.enumerate():
        if thread.name == AHEAD:
            thread.join()


def passes_of(schedule: zb.Schedule) -> list[list[tuple[str, int]]]:
    """The rows without the microbatches, which an order alone leaves as they are."""
    return [[(str(op.kind), op.stage) for op in row] for row in schedule.rows]


def steps(group: Any, name: Any, split: str = "deferred") -> list[tuple[str, str]]:
    """Steps that are planned ahead, one that comes back, and one that is not: the texts of what each played, without and with plans."""
    found = []
    batches = [*enumerate(BATCHES), (0, BATCHES[0])]
    options: dict[str, Any] = {"group": group, "loss_weight": tokens_in, "order_by": "tokens", "split": split}
    with zb.Pipeline(build, name, 8, loss_fn, **options) as ordered, zb.Pipeline(build, name, 8, loss_fn, **options) as pipe:
        stages = [build(s, pipe.schedule.num_stages) for s in range(pipe.schedule.num_stages)]
        for seed, lengths in batches:
            inputs, targets = packed(lengths, seed)
            ordered.step(inputs, targets)
            plan_ahead(pipe, inputs)
            loss = pipe.step(inputs, targets)
            expected, each = oracle(stages, inputs, targets)
            assert pipe.losses is not None
            assert abs(loss - expected).item() <= 1e-12
            assert (pipe.losses - each).abs().max().item() <= 1e-12
            assert worst_gradient(pipe, stages) <= 1e-12
            assert ordered.played is not None
            assert pipe.played is not None
            found.append((ordered.played.to_text(), pipe.played.to_text()))
            assert [[span.op for span in row] for row in pipe.timeline().rows] == [list(row) for row in pipe.played.rows]
        never_seen = packed(LENGTHS[1:] + LENGTHS[:1], 7)
        for each_pipe in (ordered, pipe):
            each_pipe.step(*never_seen)
        assert ordered.played == pipe.played
    return found


@pytest.mark.parametrize(
    ("schedule", "split"),
    [
        (zb.make("1f1b", 2, 8), "whole"),
        (zb.make("zb-h1", 4, 8), "deferred"),
        (zb.make("zb-v", 3, 8), "graph"),
        (zb.make("interleaved-1f1b", 2, 8), "deferred"),
        (with_recompute(zb.make("zb-h1", 3, 8)), "deferred"),
        (with_recompute(zb.make("1f1b", 3, 8), stages=[0]), "deferred"),
    ],
    ids=lambda given: given.name if isinstance(given, zb.Schedule) else given,
)
def test_planned_steps_have_the_numbers_of_one_device(world: Ranks, schedule: zb.Schedule, split: str) -> None:
    told = world.run(steps, schedule, split, ranks=schedule.num_ranks)
    assert all(theirs == told[0] for theirs in told)
    costs = zb.Costs.uniform(schedule.num_stages).with_recompute(zb.costs.FULL)
    planned = 0
    for lengths, texts in zip([*BATCHES, BATCHES[0]], told[0], strict=True):
        ordered, played = map(zb.Schedule.from_text, texts)
        priced = replace(costs, shares=tuple(length / fmean(lengths) for length in lengths))
        alone, found = zb.simulate(ordered, priced), zb.simulate(played, priced)
        assert found.span <= alone.span
        assert found.makespan <= alone.makespan
        assert all(held <= most for held, most in zip(peak_memory(played, priced), peak_memory(ordered, priced), strict=True))
        assert {(op.kind, op.stage) for row in played.rows for op in row} == {(op.kind, op.stage) for row in ordered.rows for op in row}
        if passes_of(played) != passes_of(schedule):
            planned += 1
            assert found.span < alone.span
    assert planned > 0
    assert told[0][0] == told[0][-1]
