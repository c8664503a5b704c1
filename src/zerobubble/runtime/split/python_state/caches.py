"""Finds the tensors that a function with a cache remembers."""

from __future__ import annotations

import gc
import logging
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdRef

_NO_RESULTS = (FunctionType, BuiltinFunctionType, ModuleType, type, nn.Module, logging.Logger)
"""Types that are not part of a cached result, though it may refer to them."""


def cached_tensors(function: Any) -> frozenset[WeakIdRef]:
    """Returns weak references to all tensors that a function under `functools.cache` or `lru_cache` remembers, in any nesting.

    Cached numbers are harmless, but cached tensors of a trace must not be reused. Two results are equal if the tensors are the same
    objects. The references keep none alive.
    """
    tensors: set[WeakIdRef] = set()
    seen: set[int] = set()
    stack: list[Any] = [function]
    while stack:
        part = stack.pop()
        if isinstance(part, Tensor):
            tensors.add(WeakIdRef(part))
        elif id(part) not in seen and not isinstance(part, _NO_RESULTS):
            seen.add(id(part))
            stack += gc.get_referents(part)
    return frozenset(tensors)
