"""Which tensors the cache of a function holds: numbers in it are what the function would give again, tensors of a trace are not."""

from __future__ import annotations

import gc
import logging
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdRef

_NO_RESULTS = (FunctionType, BuiltinFunctionType, ModuleType, type, nn.Module, logging.Logger)
"""Objects that are no part of what a function gave, though it may be reached from there."""


def cached_tensors(function: Any) -> frozenset[WeakIdRef]:
    """References to all tensors that a function under `functools.cache` or `lru_cache` remembers, in whatever objects they lie.

    They are equal to an earlier answer where the tensors are the same ones, and keep none alive.
    """
    found: set[WeakIdRef] = set()
    seen: set[int] = set()
    stack: list[Any] = [function]
    while stack:
        part = stack.pop()
        if isinstance(part, Tensor):
            found.add(WeakIdRef(part))
        elif id(part) not in seen and not isinstance(part, _NO_RESULTS):
            seen.add(id(part))
            stack += gc.get_referents(part)
    return frozenset(found)
