"""What stands for a unit where it is not: in a stage that does not hold it, and in the model that is only looked at."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from zerobubble.models.observation.dataflow import OutputForm
from zerobubble.models.observation.skeleton import Skeleton


class ForwardInProgress(Protocol):
    """The forward that runs now, which knows what a call of a stand-in gives."""

    def stand_in(self, stand_in: StandIn, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    def was_given(self, stand_in: StandIn, name: str, value: Any) -> None:
        """The model's code sets attribute `name` of a stand-in."""


class Current:
    """Holds the forward that runs now in a model with stand-ins."""

    forward: ForwardInProgress


@contextmanager
def not_of_the_model(current: Current) -> Iterator[None]:
    """Inside, nothing that is asked of modules is asked by the forward that runs."""
    forward = current.forward
    del current.forward
    try:
        yield
    finally:
        current.forward = forward


class StandIn(nn.Module):
    """In the place of a unit, without its parameters. Other attributes, such as a layer's type, are those of the unit.

    `isinstance` takes it for one of the unit's class, by which a model's code may tell its layers apart.
    """

    def __init__(self, skeleton: Skeleton, current: Current) -> None:
        super().__init__()
        self.skeleton = skeleton
        self.training = skeleton.was_training
        self._current = current

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.skeleton.unit)

    def __setattr__(self, name: str, value: Any) -> None:
        forward = getattr(self.__dict__.get("_current"), "forward", None)
        if forward is not None:
            forward.was_given(self, name, value)
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["skeleton"].unit, name)

    def register_forward_hook(self, *_: Any, **__: Any) -> RemovableHandle:
        """No hook: what a unit gives and records is seen where the unit is."""
        return RemovableHandle(OrderedDict())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.__dict__["_is_called"] = True
        return super().__call__(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run in a call of the module; by itself where the model's code calls the forward of its part, which the skeleton is told."""
        if not self.__dict__.pop("_is_called", False):
            self.skeleton.forward_is_called = True
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
    return blank_of(tensor.shape, tensor.dtype, device)


def blank_of(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor as of `blank_like`, of this shape and type."""
    device = torch.device("cpu") if device.type == "meta" else device
    number = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), number, dtype=dtype, device=device).expand(shape)


def device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """The device of the first tensor among these arguments, the CPU where there is none."""
    if args and isinstance(args[0], Tensor):  # as of nearly every layer; every stand-in asks, and going through all takes long
        return args[0].device
    return next((leaf.device for leaf in pytree.tree_iter((args, kwargs)) if isinstance(leaf, Tensor)), torch.device("cpu"))
