"""Sampling of slow test cases: a share of them runs, or all with ZEROBUBBLE_EXHAUSTIVE=1.

A long run draws its share anew each time, from a seed that it prints. ZEROBUBBLE_SEED repeats it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from random import Random
from typing import TypeVar

T = TypeVar("T")

EXHAUSTIVE = "ZEROBUBBLE_EXHAUSTIVE" in os.environ
SEED = "ZEROBUBBLE_SEED"
"""The variable of the environment that has the seed in a long run, in which `tests/conftest.py` sets it before tests are imported."""


def one_in(count: int, cases: Sequence[T]) -> list[T]:
    """Every case of that `count`, the first drawn at random in a long run.

    Of a product, a count that shares no factor with its sides takes each value of each of them.
    """
    first = Random(os.environ[SEED]).randrange(count) if SEED in os.environ else 0
    return list(cases if EXHAUSTIVE else cases[first::count])
