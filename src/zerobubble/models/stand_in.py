"""What stands for a unit where it is not: in a stage that does not hold it, and in the model that is only looked at."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zerobubble.models.dataflow import OutputForm
from zerobubble.models.skeleton import Skeleton


class ForwardInProgress(Protocol):
    """The forward that runs now, which knows what a call of a stand-in gives."""

    def stand_in(self, stand_in: StandIn, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


class Current:
    """Holds the forward that runs now in a model with stand-ins."""

    forward: ForwardInProgress


class StandIn(nn.Module):
    """In the place of a unit, without its parameters. Other attributes, such as a layer's type, are those of the unit."""

    def __init__(self, skeleton: Skeleton, current: Current) -> None:
        super().__init__()
        self.skeleton = skeleton
        self._current = current

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["skeleton"].unit, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._current.forward.stand_in(self, args, kwargs)


def blank(form: OutputForm, device: torch.device, *, writable: bool = False) -> Any:
    """An output of this form that nobody may use: its floating-point numbers are NaN, so that using it cannot go unnoticed.

    It takes no memory unless it must be `writable`.
    """
    leaves = [blank_like(leaf, device) if isinstance(leaf, Tensor) else leaf for leaf in form.leaves]
    return form.filled([leaf.clone() if writable and isinstance(leaf, Tensor) else leaf for leaf in leaves])


def blank_like(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of this shape and type that takes no memory, NaN throughout where its type has that, and else 0.

    It is on the CPU where `device` is the meta device: code around the units runs in earnest.
    """
    device = torch.device("cpu") if device.type == "meta" else device
    number = float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0
    return torch.full((), number, dtype=tensor.dtype, device=device).expand(tensor.shape)


def device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """The device of the first tensor among these arguments, the CPU where there is none."""
    return next((leaf.device for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), torch.device("cpu"))
