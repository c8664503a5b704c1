"""Tensors of shape-only units: on meta for the code of the unit, and for code around the units on the device of the model's tensor."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_META = torch.device("meta")
_observing = threading.local()


@contextmanager
def observing_a_unit() -> Iterator[None]:
    """A context for the code of a unit, in which its tensors are on meta."""
    before = getattr(_observing, "is_inside", False)
    _observing.is_inside = True
    try:
        yield
    finally:
        _observing.is_inside = before


def _device(tensor: Any) -> torch.device:
    place = _META if getattr(_observing, "is_inside", False) else tensor.__dict__.get("_place", _META)
    device: torch.device = place.device if isinstance(place, Tensor) else place
    return device


class _SeenParameter(nn.Parameter):
    device = property(_device)


class _SeenBuffer(Tensor):
    device = property(_device)
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


_SEEN: dict[type, type] = {nn.Parameter: _SeenParameter, Tensor: _SeenBuffer}


def show_on_device_of(original: Tensor, on_meta: Tensor) -> None:
    """Makes code around the units see `on_meta` on the device of `original`, or on the CPU if `original` is on meta, too."""
    if type(on_meta) in _SEEN:
        on_meta.__class__ = _SEEN[type(on_meta)]
        on_meta.__dict__["_place"] = torch.device("cpu") if original.is_meta else original


def show_on(unit: nn.Module, device: torch.device) -> None:
    """Makes code around the units see the tensors of the shape-only `unit` on this device."""
    for tensor in (*unit.parameters(), *unit.buffers()):
        if "_place" in tensor.__dict__:
            tensor.__dict__["_place"] = device
