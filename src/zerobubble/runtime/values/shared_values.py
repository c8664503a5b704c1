"""Sends attributes that a forward sets to other ranks: numbers, texts, small tensors, and containers and objects of these."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_MOST_SHARED = 4096
"""The largest number of elements of a shared tensor, and of entries of a shared container."""
_DEPTH = 4
_CONTAINERS = {kind.__name__: kind for kind in (list, tuple, set, dict)}


def sent(value: Any, depth: int = _DEPTH) -> Any:
    """Returns `value` as a kind and its contents, None if it is not shared."""
    if value is None or type(value) in (bool, int, float, complex, str):
        return "", value
    if isinstance(value, Tensor):
        is_small = value.numel() <= _MOST_SHARED
        return ("tensor", (value.dtype, tuple(value.shape), value.detach().flatten().tolist())) if is_small else None
    if type(value) in _CONTAINERS.values():
        entries = list(value.items() if isinstance(value, dict) else value)
        kind = type(value).__name__
    elif depth < _DEPTH or isinstance(value, nn.Module) or callable(value) or not hasattr(value, "__dict__"):
        return None
    else:
        kind, entries = "object", list(vars(value).items())
    inside = [sent(entry, depth - 1) for entry in entries] if depth and len(entries) <= _MOST_SHARED else [None]
    return None if None in inside else (kind, inside)


def received(contents: Any, held: Any = None) -> Any:
    """Returns the value that was sent. What is `held` keeps its identity if it can, since the stage may share it."""
    kind, contents = contents
    if kind == "":
        return contents
    if kind == "tensor":
        dtype, shape, numbers = contents
        device = held.device if isinstance(held, Tensor) else None
        return with_contents(held, torch.tensor(numbers, dtype=dtype, device=device).reshape(shape))
    values = map(received, contents)
    if kind == "object":
        vars(held).update(values)
        return held
    return with_contents(held, _CONTAINERS[kind](values))


def with_contents(held: Any, value: Any) -> Any:
    """Returns `held` with the contents of `value` if both are of one kind that can change in place, else `value`."""
    if type(held) is not type(value):
        return value
    if isinstance(held, list):
        held[:] = value
    elif isinstance(held, (dict, set)):
        held.clear()
        held.update(value)
    elif isinstance(held, Tensor) and held.shape == value.shape and held.dtype == value.dtype and not held.requires_grad:
        held.copy_(value)
    elif not isinstance(held, Tensor) and hasattr(held, "__dict__"):
        vars(held).clear()
        vars(held).update(vars(value))
    else:
        return value
    return held
