"""Autocast support for stages and for layers with deferred weight gradients.

Autocast casts a parameter once per region (the outermost `with torch.autocast`) and caches the copy. Autograd sums the gradients of all
uses of that copy in the lower precision, and casts the sum. A deferred weight gradient bypasses autograd, so it must reproduce this order
of sums and casts to give the same bits. For this it must know which uses share a region.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from zerobubble.runtime.device import Autocast


class AutocastCopies:
    """Lower-precision copies of parameters, one per autocast region, as in autocast's own cache.

    Layers that use one parameter in one region share its copy, so the gradients of its uses are summed in the lower precision, as on one
    device. Keep one object for the lifetime of the stage, and `clear` it after each step to free the copies.
    """

    def __init__(self) -> None:
        self._probes: dict[torch.device, nn.Parameter] = {}
        self._region: object = None
        self._copies: dict[Tensor, Tensor] = {}

    def enter_region(self, device: torch.device) -> object:
        """Returns a token that identifies the current autocast region.

        The token is the autograd node of autocast's cast of a probe parameter. PyTorch has no API that identifies a region, but it casts a
        parameter once in each: a new node means a new region.
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
        """Returns `tensor` in autocast's dtype: the region's shared copy for a leaf that requires grad, else a new tensor."""
        dtype = torch.get_autocast_dtype(tensor.device.type)
        if not (tensor.is_leaf and tensor.requires_grad and tensor.dtype == torch.float32):
            return tensor.to(dtype)
        if tensor not in self._copies:
            self._copies[tensor] = tensor.to(dtype)
        return self._copies[tensor]

    def clear(self) -> None:
        """Drops all copies."""
        self._region = None
        self._copies.clear()


is_autocast_on = torch._C._is_any_autocast_enabled
"""Whether autocast is enabled for any device type. Every pass checks it: the check takes a fifth of the time of disabling it."""


def outside_of_autocast() -> AbstractContextManager[object]:
    """Disables autocast for every device type. Unlike `torch.autocast(enabled=False)`, a checkpoint that recomputes inside can still enable
    it.
    """
    return torch._C._DisableAutocast()


def within(autocast: Autocast | None) -> AbstractContextManager[object]:
    """Enables this autocast; does nothing for None."""
    return nullcontext() if autocast is None else torch.autocast(autocast.device_type, dtype=autocast.dtype)
