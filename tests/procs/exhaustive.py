"""How much is played of what takes long: a share of the cases, or with ZEROBUBBLE_EXHAUSTIVE=1 all of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

EXHAUSTIVE = "ZEROBUBBLE_EXHAUSTIVE" in os.environ


def one_in(count: int, cases: Sequence[T]) -> list[T]:
    """Every case of that `count`: of a product, one that shares no factor with its sides takes each value of each of them."""
    return list(cases if EXHAUSTIVE else cases[::count])
