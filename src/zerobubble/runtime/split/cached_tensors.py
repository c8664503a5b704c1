"""Which tensors the cache of a function holds: numbers in it are what the function would give again, tensors of a trace are not."""

from __future__ import annotations

import gc
import logging
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

_NO_RESULTS = (FunctionType, BuiltinFunctionType, ModuleType, type, nn.Module, logging.Logger)
"""Objects that are no part of what a function gave, though it may be reached from there."""


def cached_tensors(function: Any) -> frozenset[int]:
    """The `id` of each tensor that a function under `functools.cache` or `lru_cache` remembers, in whatever objects it lies."""
    found: set[int] = set()
    seen: set[int] = set()
    stack: list[Any] = [function]
    while stack:
        part = stack.pop()
        if isinstance(part, Tensor):
            found.add(id(part))
        elif id(part) not in seen and not isinstance(part, _NO_RESULTS):
            seen.add(id(part))
            stack += gc.get_referents(part)
    return frozenset(found)
