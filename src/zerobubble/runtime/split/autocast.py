"""Autocast seen from a layer whose weight gradient waits, and from a stage: where it is on, and in which copies it gives tensors."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class AutocastCopies:
    """Lower-precision copies of parameters, one for each region that autocast spans, as autocast itself keeps them.

    Layers that use one parameter in one region share its copy, so that the gradients of its uses are summed in the lower type, as they
    are on one device. Keep one object for as long as the stage lives, and `clear` it after each step: the copies would hold memory.
    """

    def __init__(self) -> None:
        self._probes: dict[torch.device, nn.Parameter] = {}
        self._region: object = None
        self._copies: dict[Tensor, Tensor] = {}

    def enter_region(self, device: torch.device) -> object:
        """A token of the region that autocast spans here: the node by which autocast cast a parameter of ours, kept until the region ends.

        Torch does not tell regions apart, but it casts a parameter once in each: the probe's cast is another one in another region.
        """
        if device not in self._probes:
            self._probes[device] = nn.Parameter(torch.zeros(1, 1, dtype=torch.float32, device=device))
        node: Any = torch.mm(torch.empty(0, 1, dtype=torch.float32, device=device), self._probes[device]).grad_fn
        region = node.next_functions[1][0]
        if region is not self._region:
            self.clear()
            self._region = region
        return region

    def cast(self, tensor: Tensor) -> Tensor:
        """`tensor` in autocast's type: for a leaf that has a gradient the region's copy, for any other a new one."""
        dtype = torch.get_autocast_dtype(tensor.device.type)
        if not (tensor.is_leaf and tensor.requires_grad and tensor.dtype == torch.float32):
            return tensor.to(dtype)
        if tensor not in self._copies:
            self._copies[tensor] = tensor.to(dtype)
        return self._copies[tensor]

    def clear(self) -> None:
        """Drop all copies."""
        self._region = None
        self._copies.clear()


is_autocast_on = torch._C._is_any_autocast_enabled
"""Whether autocast is on for any kind of device: asked in every pass, it takes a fifth of turning it off."""


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
