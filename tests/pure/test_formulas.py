"""The closed forms of the schedules' docstrings, wherever the docstrings say they hold."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.pure.shapes import EVERY, SHAPES
from zerobubble import SCHEDULES, Costs, Timeline, make, peak_memory, simulate
from zerobubble.costs import NS_PER_MS, UNIT_BYTES

UNIT = (1.0, 1.0, 1.0)
TIMES = (UNIT, (2, 3, 1), (3, 2, 1), (6, 6, 4), (1, 2, 2), (5, 5, 6), (3, 1, 2), (2, 2, 0))
COMMS = (0.25, 0.5, 1, 1.5, 2, 3)
FULL = [(p, m) for p, m in SHAPES if m >= 2 * p - 1]
"""Enough microbatches for no bubble at unit times."""

Times = tuple[float, float, float]


def played(name: str, p: int, m: int, times: Times, comm: float = 0.0, v: int = 1) -> Timeline:
    """The timeline at times of a rank that v divides exactly."""
    schedule = make(name, p, m, v)
    return simulate(schedule, Costs.uniform(schedule.num_stages, tuple(v * t for t in times), comm, stages_per_rank=v))


def makespan_bubble(timeline: Timeline, m: int, times: Times, v: int = 1) -> float:
    """Makespan beyond the work of a rank, in ms."""
    return timeline.makespan / NS_PER_MS - m * v * sum(times)


def span_bubble(timeline: Timeline, m: int, times: Times) -> float:
    """The largest span beyond the work of a rank, in ms."""
    return timeline.span / NS_PER_MS - m * sum(times)


PEAKS: dict[str, Callable[[int, int, int, int], int]] = {
    "gpipe": lambda p, m, v, r: m,
    "1f1b": lambda p, m, v, r: min(p - r, m),
    "eager-1f1b": lambda p, m, v, r: min(2 * (p - r) - 1, m),
    "interleaved-1f1b": lambda p, m, v, r: min(2 * (p - r - 1) + (v - 1) * -(-m // max(1, m // p)) + 1, m * v),
    "zb-h1": lambda p, m, v, r: min(p, m),
    "zb-h2": lambda p, m, v, r: min(2 * p - 1, m),
    "zb-v": lambda p, m, v, r: min(m + r + 1, 2 * m, 2 * p),
}
"""Stage activations on rank r."""


@pytest.mark.parametrize(("name", "v"), EVERY)
def test_peak_memory(name: str, v: int) -> None:
    for p, m in SHAPES:
        schedule = make(name, p, m, v)
        peaks = peak_memory(schedule, Costs.uniform(schedule.num_stages))
        assert peaks == tuple(PEAKS[name](p, m, v, r) * UNIT_BYTES for r in range(p)), (p, m)


def test_every_schedule_states_its_bubble_and_peak() -> None:
    for recipe in SCHEDULES.values():
        text = recipe.build.__doc__ or ""
        assert "- bubble (" in text, recipe.name
        assert "- peak memory" in text, recipe.name


@pytest.mark.parametrize(("name", "v"), [("gpipe", 1), ("1f1b", 1), ("eager-1f1b", 1), *(("interleaved-1f1b", v) for v in (1, 2, 3, 4))])
@pytest.mark.parametrize("times", TIMES)
def test_bubble_of_fused_schedules(name: str, v: int, times: Times) -> None:
    for p, m in SHAPES:
        timeline = played(name, p, m, times, v=v)
        bubble = (p - 1 + (v - 1) * max(p - m, 0)) * sum(times)
        assert makespan_bubble(timeline, m, times, v) == bubble, (p, m)
        assert timeline.ranks[0].gaps == bubble * NS_PER_MS, (p, m)


@pytest.mark.parametrize(("times", "c"), [(t, c) for t in TIMES for c in COMMS if 2 * c <= sum(t)])
def test_eager_1f1b_pays_each_message_once(times: Times, c: float) -> None:
    for p, m in SHAPES:
        bubble = makespan_bubble(played("eager-1f1b", p, m, times, c), m, times)
        assert bubble == pytest.approx((p - 1) * (sum(times) + 2 * c)), (p, m)


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("c", COMMS)
def test_1f1b_pays_messages_all_along(times: Times, c: float) -> None:
    for p, m in [(p, m) for p, m in SHAPES if p > 1 and m % p == 0]:
        bubble = makespan_bubble(played("1f1b", p, m, times, c), m, times)
        assert bubble == pytest.approx((p - 1) * sum(times) + 2 * ((p - 1) * m / p + p - 2) * c), (p, m)


@pytest.mark.parametrize(("name", "depth"), [("zb-h1", 1), ("zb-h2", 2)])
@pytest.mark.parametrize("times", [(f, b, w) for f, b, w in TIMES if w <= min(f, b)])
def test_bubble_of_handcrafted_schedules(name: str, depth: int, times: Times) -> None:
    f, b, w = times
    for p, m in SHAPES:
        ahead = min(p if depth == 1 else 2 * p - 1, m) - 1
        assert span_bubble(played(name, p, m, times), m, times) == (p - 1) * (f + b) - ahead * w, (p, m)


@pytest.mark.parametrize(("times", "c"), [(t, c) for t in TIMES for c in COMMS if 2 * c <= t[2] <= min(t[:2]) + 2 * c])
def test_bubble_of_zb_h1_with_communication(times: Times, c: float) -> None:
    f, b, w = times
    for p, m in [(p, m) for p, m in SHAPES if m > p]:
        bubble = span_bubble(played("zb-h1", p, m, times, c), m, times)
        assert bubble == pytest.approx((p - 1) * (f + b - w + 4 * c)), (p, m)


@pytest.mark.parametrize(("times", "c"), [(t, c) for t in TIMES for c in COMMS if t[2] <= min(t[:2]) and 2 * c <= t[0] + t[1]])
def test_bubble_of_zb_h2_with_communication(times: Times, c: float) -> None:
    f, b, w = times
    for p, m in FULL:
        bubble = span_bubble(played("zb-h2", p, m, times, c), m, times)
        assert bubble == pytest.approx((p - 1) * (f + b - 2 * w + 2 * c)), (p, m)


@pytest.mark.parametrize(("name", "shapes"), [("zb-h1", [(p, m) for p, m in SHAPES if m >= p]), ("zb-h2", FULL)])
def test_makespan_of_handcrafted_schedules(name: str, shapes: list[tuple[int, int]]) -> None:
    for p, m in shapes:
        assert played(name, p, m, UNIT).makespan == (3 * m + p - 1) * NS_PER_MS, (p, m)


def test_zb_v_has_no_bubble() -> None:
    for p, m in FULL:
        timeline = played("zb-v", p, m, UNIT, v=2)
        assert [rank.gaps for rank in timeline.ranks] == [0] * p, (p, m)
        assert timeline.makespan == (6 * m + p - 1) * NS_PER_MS, (p, m)
