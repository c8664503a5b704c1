"""Time measurements on a busy machine: other load only adds to a time, so the minimum of several counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic

FEWEST, LONGEST_S = 8, 240.0
"""Measurements before one that never succeeds is given up, and for how many seconds more follow: a machine may be busy for minutes."""


def assert_least_within(measure: Callable[[], Sequence[float]], bounds: Sequence[tuple[float, float]]) -> None:
    """Assert that the minimum of each number, over repeated calls of `measure`, is at least its lower and below its upper bound."""
    least, count, end = measure(), 1, monotonic() + LONGEST_S
    while outside := _outside(least, bounds):
        is_over = any(number < low for number, low, _ in outside.values()) or (count >= FEWEST and monotonic() > end)
        assert not is_over, f"outside of their bounds in {count} measurements, by their place: {outside}"
        least = [min(pair) for pair in zip(least, measure(), strict=True)]
        count += 1


def _outside(numbers: Sequence[float], bounds: Sequence[tuple[float, float]]) -> dict[int, tuple[float, float, float]]:
    """The numbers that do not lie within their bounds, by their place, with the bounds."""
    each = enumerate(zip(numbers, bounds, strict=True))
    return {place: (number, low, high) for place, (number, (low, high)) in each if not low <= number < high}
