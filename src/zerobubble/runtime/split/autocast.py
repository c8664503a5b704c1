"""Tensors as autocast gives them to a layer: one copy of a leaf in the lower type for each region that autocast spans."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_probes: dict[torch.device, nn.Parameter] = {}
_region: object = None
_casts: dict[Tensor, Tensor] = {}
"""The copies of leaves made in `_region`."""


def enter_region(device: torch.device) -> object:
    """A token of the region that autocast spans here: the node by which autocast cast a parameter of ours, kept until the region ends."""
    global _region
    if device not in _probes:
        _probes[device] = nn.Parameter(torch.zeros(1, 1, dtype=torch.float32, device=device))
    node: Any = torch.mm(torch.empty(0, 1, dtype=torch.float32, device=device), _probes[device]).grad_fn
    region = node.next_functions[1][0]
    if region is not _region:
        leave_region()
        _region = region
    return region


def leave_region() -> None:
    """Drop all copies."""
    global _region
    _region = None
    _casts.clear()


def cast(tensor: Tensor) -> Tensor:
    """`tensor` in autocast's type; copies of leaves that have a gradient are kept, so that the gradients of their uses are summed in it."""
    dtype = torch.get_autocast_dtype(tensor.device.type)
    if not (tensor.is_leaf and tensor.requires_grad and tensor.dtype == torch.float32):
        return tensor.to(dtype)
    if tensor not in _casts:
        _casts[tensor] = tensor.to(dtype)
    return _casts[tensor]


def outside_of_autocast() -> AbstractContextManager[object]:
    """Inside, autocast is off for every kind of device, and a checkpoint that runs again can still turn on what its first run had."""
    return torch._C._DisableAutocast()


class Autocast(NamedTuple):
    """An autocast that is on: for which kind of device, and to which type."""

    device_type: str
    dtype: torch.dtype


def autocast_of(device_type: str) -> Autocast | None:
    """The autocast that is on here for a kind of device, None where it is off."""
    return Autocast(device_type, torch.get_autocast_dtype(device_type)) if torch.is_autocast_enabled(device_type) else None


def within(autocast: Autocast | None) -> AbstractContextManager[object]:
    """Inside, this autocast is on."""
    return nullcontext() if autocast is None else torch.autocast(autocast.device_type, dtype=autocast.dtype)
