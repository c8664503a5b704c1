"""Costs fitted to a timeline are those it was made with."""

from __future__ import annotations

from dataclasses import replace

import pytest

import zerobubble as zb
from tests.pure.shapes import TRAINING, grid
from tests.refusals import Stated, raises
from zerobubble.costs import UNIT_BYTES
from zerobubble.fit import fit_costs
from zerobubble.ir import Kind, Op
from zerobubble.timeline import ReplicaSum, Span, Timeline


def spans(*passes: tuple[str, int]) -> tuple[Span, ...]:
    """Passes with their durations, one after the other."""
    row, time = [], 0
    for text, duration in passes:
        row.append(Span(Op.parse(text), time, time + duration))
        time += duration
    return tuple(row)


def held_after(row: tuple[Span, ...], *held: int) -> tuple[tuple[int, int], ...]:
    return tuple((span.end, size) for span, size in zip(row, held, strict=True))


SPLIT = spans(("0F0", 10), ("0F1", 14), ("0F2", 90), ("0B0", 20), ("0W0", 7), ("0B1", 22), ("0W1", 5), ("0B2", 21), ("0W2", 6))


def test_times_are_medians_in_whole_nanoseconds() -> None:
    costs = fit_costs(Timeline("t", (SPLIT,), (), "measured"))
    assert (costs.forward, costs.backward, costs.weight) == ((14,), (21,), (6,))
    assert (costs.held_after_f, costs.held_after_b) == ((UNIT_BYTES,), (UNIT_BYTES,))


def test_bytes_are_medians_of_what_each_pass_changed() -> None:
    memory = held_after(SPLIT, 100, 200, 301, 281, 201, 181, 101, 80, 0)
    costs = fit_costs(Timeline("t", (SPLIT,), (memory,), "measured"))
    assert (costs.held_after_f, costs.held_after_b) == ((100,), (80,))


def test_passes_that_hold_nothing_have_no_bytes() -> None:
    costs = fit_costs(Timeline("t", (SPLIT,), (held_after(SPLIT, *[0] * len(SPLIT)),), "measured"))
    assert (costs.held_after_f, costs.held_after_b) == ((0,), (0,))


def test_two_stages_of_one_rank_are_separate() -> None:
    row = spans(("0F0", 1), ("1F0", 2), ("1B0", 3), ("1W0", 4), ("0B0", 5), ("0W0", 6))
    costs = fit_costs(Timeline("t", (row,), (held_after(row, 10, 40, 35, 10, 8, 0),), "measured"), comm_ms=0.5)
    assert costs == zb.Costs((1, 2), (5, 3), (6, 4), (500_000,), (10, 30), (8, 25))


def test_a_fused_backward_counts_as_backward_alone() -> None:
    row = spans(("0F0", 1), ("0BW0", 5))
    costs = fit_costs(Timeline("t", (row,), (held_after(row, 10, 0),), "measured"))
    assert (costs.backward, costs.weight, costs.held_after_f, costs.held_after_b) == ((5,), (0,), (10,), (10,))


@pytest.mark.parametrize("name", TRAINING)
def test_a_simulated_run_shows_its_costs(name: str) -> None:
    schedule = zb.make(name, *grid(name, zb.schedules.SCHEDULES[name].stages_per_rank, [(3, 4), (4, 8), (3, 6)])[0])
    stages = range(schedule.num_stages)
    overlapped = {first.stage for first, _ in schedule.overlaps}
    hidden = [0.25 if s in overlapped else 0 for s in stages]
    costs = zb.Costs.from_ms([1 + s for s in stages], [2 + s for s in stages], [3 + s for s in stages], hidden=hidden)
    fitted = fit_costs(replace(zb.simulate(schedule, costs), memory=()))
    assert [fitted.time(kind, s) for kind in (Kind.F, Kind.BW) for s in stages] == [
        costs.time(k, s) for k in (Kind.F, Kind.BW) for s in stages
    ]
    if schedule.split_stages:
        assert fitted == costs


@pytest.mark.parametrize(
    ("row", "stated"),
    [
        ((), ("timeline", "without", "passes")),
        (spans(("0B0", 1), ("0W0", 1)), ("stage 0", "timeline")),
        (spans(("0F0", 1), ("0W0", 1)), ("stage 0", "timeline")),
        (spans(("1F0", 1), ("1BW0", 1)), ("stage 0", "timeline")),
    ],
)
def test_a_part_of_a_step_is_refused(row: tuple[Span, ...], stated: Stated) -> None:
    with raises(zb.InputError, *stated):
        fit_costs(Timeline("t", (row,), (), "measured"))


def test_memory_between_passes_is_refused() -> None:
    row = spans(("0F0", 1), ("0BW0", 5))
    with raises(zb.InputError, "rank 0", "2 passes", 1, "memory"):
        fit_costs(Timeline("t", (row,), (((0, 10),),), "measured"))


def test_shares_of_no_microbatch_are_refused() -> None:
    with raises(zb.InputError, "0 microbatches", "2 shares"):
        fit_costs(Timeline("t", ((),), (), "measured"), shares=(1, 2))


ENDS_AT_60 = spans(("0F0", 10), ("0B0", 20), ("0W0", 30))


@pytest.mark.parametrize(
    ("sums", "reduce", "buckets"),
    [
        ([()], 0, 0),
        ([(ReplicaSum(0, 60, 64), ReplicaSum(0, 64, 71))], 11, 0),  # after the last pass, and so no buckets
        ([(ReplicaSum(0, 59, 64), ReplicaSum(0, 64, 71))], 12, 2),
        ([(ReplicaSum(0, 59, 64),), (ReplicaSum(0, 59, 64), ReplicaSum(0, 64, 71)), ()], 5, 1),  # the lower median
        ([(ReplicaSum(0, 59, 64), ReplicaSum(0, 64, 71)), (ReplicaSum(0, 60, 90),)], 12, 2),  # of the ranks with buckets
    ],
)
def test_sums_are_medians_over_ranks_that_share_a_stage(sums: list[tuple[ReplicaSum, ...]], reduce: int, buckets: int) -> None:
    costs = fit_costs(Timeline("t", (ENDS_AT_60,) * len(sums), (), "measured", reductions=tuple(sums)))
    assert (costs.reduce, costs.buckets) == ((reduce,), (buckets,))
