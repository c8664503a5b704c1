"""Bubbles of interleaved-1f1b, in groups of any size, and of depth-first."""

from __future__ import annotations

import pytest

from tests.pure.formulas.played import GRID, TIMES, drawn, makespan_bubble, played
from tests.refusals import raises
from zerobubble import Costs, InputError, make, schedule_faults
from zerobubble.costs import NS_PER_MS, UNIT_BYTES
from zerobubble.simulation import peak_memory

LOOPS = (1, 2, 3, 4)
CHOICES = [(t, v) for t in TIMES for v in LOOPS]


def test_bubble_of_interleaved() -> None:
    for p, m, (times, v) in drawn(GRID, CHOICES):
        timeline = played("interleaved-1f1b", p, m, times, v=v)
        bubble = (p - 1 + (v - 1) * max(p - m, 0)) * sum(times)
        assert makespan_bubble(timeline, m, times, v) == bubble, (p, m, times, v)
        assert timeline.ranks[0].gaps == bubble * NS_PER_MS, (p, m, times, v)


@pytest.mark.long
def test_bubble_of_depth_first() -> None:
    for p, m, (times, v) in drawn([(p, p * k) for p in range(2, 17) for k in (1, 2, 3, 8)], CHOICES):
        timeline = played("depth-first", p, m, times, v=v)
        assert makespan_bubble(timeline, m, times, v) == (p - 1) * sum(times), (p, m, times, v)
        assert timeline.ranks[0].gaps == (p - 1) * sum(times) * NS_PER_MS, (p, m, times, v)


def test_makespan_of_depth_first_with_a_short_last_group() -> None:
    shapes = [(p, m) for p, m in GRID if m > p and m % p]
    for p, m, times in drawn(shapes, [t for t in TIMES if t[0] <= t[1] + t[2]]):
        longer = (p - m % p) * (times[1] + times[2])
        bubble = makespan_bubble(played("depth-first", p, m, times, v=2), m, times, 2)
        assert bubble == (p - 1) * sum(times) + longer, (p, m, times)


GROUPED = [(p, m, g, v) for p in range(1, 7) for g in range(1, 2 * p + 2) for m in range(1, 3 * p + 2) for v in (1, 2, 3)]


@pytest.mark.long
def test_groups_of_any_size_are_legal_or_refused() -> None:
    """Refused is what could deadlock: several stages in groups below p-1. From p on groups cost no bubble, and each one more memory."""
    legal = 0
    for p, m, g, v in GROUPED:
        if v > 1 and g < min(p - 1, m):
            with raises(InputError, p, min(p - 1, m), g, "ranks", "groups"):
                make("interleaved-1f1b", p, m, v, group=g)
            continue
        schedule = make("interleaved-1f1b", p, m, v, group=g)
        assert schedule_faults(schedule) == (), (p, m, g, v)
        if min(g, m) >= min(p, m) and (m % g == 0 or m % g >= min(p, m)):
            assert makespan_bubble(played("interleaved-1f1b", p, m, (1, 1, 1), v=v, group=g), m, (1, 1, 1), v) == 3 * (
                p - 1 + (v - 1) * max(p - m, 0)
            )
            peaks = [(v - 1) * min(g, m) + min(2 * (p - r) - 1, m) for r in range(p)]
            assert peak_memory(schedule, Costs.uniform(p * v)) == tuple(peak * UNIT_BYTES for peak in peaks), (p, m, g, v)
            legal += 1
    assert legal > 500


@pytest.mark.parametrize("group", [0, -1])
def test_a_group_holds_something(group: int) -> None:
    with raises(InputError, 1, group, "microbatches"):
        make("interleaved-1f1b", 2, 4, 1, group=group)


def test_depth_first_is_interleaved_in_groups_of_p() -> None:
    for p, m in [(p, m) for p, m in GRID if p <= 8]:
        assert make("depth-first", p, m).rows == make("interleaved-1f1b", p, m, group=p).rows
        assert (make("depth-first", p, m).rows == make("interleaved-1f1b", p, m).rows) == (m % p == 0 or m < p), (p, m)
