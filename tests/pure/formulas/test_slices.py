"""Bubble and memory of 1f1b (Seq1F1B), zb-h1 and interleaved-1f1b (SlimPipe) over slices of a sequence."""

from __future__ import annotations

import pytest

from tests.refusals import raises
from zerobubble import Costs, InputError, Timeline, make, schedule_faults, simulate
from zerobubble.costs import NS_PER_MS, UNIT_BYTES
from zerobubble.simulation import peak_memory

SHAPES = [(p, m, n) for p in range(1, 7) for m in range(1, 5) for n in range(1, 9)]
TIMES = [(2, 3, 1), (1, 1, 1), (3, 2, 2)]
"""F, B and W of a slice in ms."""


def played(name: str, p: int, m: int, n: int, times: tuple[int, int, int], v: int = 1) -> tuple[Timeline, tuple[int, ...]]:
    """The timeline and the peaks in stage activations of a slice."""
    schedule = make(name, p, m, v, slices=n)
    assert schedule_faults(schedule) == (), (name, p, m, n, v)
    assert (schedule.num_microbatches, schedule.slices) == (m * n, n)
    costs = Costs.uniform(p * v, tuple(v * t for t in times), stages_per_rank=v)
    return simulate(schedule, costs), tuple(peak // UNIT_BYTES for peak in peak_memory(schedule, costs))


def bubble(timeline: Timeline, work: int) -> float:
    return timeline.span / NS_PER_MS - work


def test_seq_1f1b() -> None:
    for p, m, n in SHAPES:
        times = TIMES[(p + m + n) % 3]
        timeline, peaks = played("1f1b", p, m, n, times)
        assert bubble(timeline, m * n * sum(times)) == (p - 1) * sum(times), (p, m, n)
        assert timeline.makespan == timeline.span
        assert peaks == tuple(min(p - r - 1 + n, m * n) for r in range(p)), (p, m, n)


def test_zb_h1_over_slices() -> None:
    for p, m, n in SHAPES:
        f, b, w = times = TIMES[(p + m + n) % 3]
        timeline, peaks = played("zb-h1", p, m, n, times)
        assert peaks == (min(p - 1 + n, m * n),) * p, (p, m, n)
        if (m - 1) * n >= p - 1:
            assert bubble(timeline, m * n * sum(times)) == (p - 1) * (f + b - w), (p, m, n)


@pytest.mark.parametrize("v", [1, 2, 3])
def test_slimpipe(v: int) -> None:
    for p, m, n in SHAPES:
        if n >= p and n > 1:
            times = TIMES[(p + m + n) % 3]
            timeline, peaks = played("interleaved-1f1b", p, m, n, times, v)
            assert bubble(timeline, m * n * v * sum(times)) == (p - 1) * sum(times), (p, m, n)
            assert peaks == tuple(min(2 * (p - r - 1) + v * n, m * v * n) for r in range(p)), (p, m, n)


def test_slimpipe_refuses_fewer_slices_than_ranks_and_groups() -> None:
    with raises(InputError, 4, 3, "ranks", "slices"):
        make("interleaved-1f1b", 4, 8, slices=3)
    with raises(InputError, 2, "group"):
        make("interleaved-1f1b", 2, 8, group=2, slices=4)
