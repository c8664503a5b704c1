"""Stand-ins for units: in stages that do not hold them, and in an observed model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from zerobubble.errors import InputError
from zerobubble.models.observation.dataflow import OutputForm
from zerobubble.models.observation.placeholders import placeholder_of
from zerobubble.models.observation.shape_only import ShapeOnlyUnit, untouched_zeros
from zerobubble.runtime.device import is_host

_META = torch.device("meta")


class ForwardInProgress(Protocol):
    """The current forward, which determines the results of stand-ins."""

    def stand_in(self, stand_in: StandIn, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    def attribute_set(self, stand_in: StandIn, name: str, value: Any) -> None:
        """Called if the model's code sets attribute `name` of a stand-in."""


class Current:
    """Holds the current forward in a model with stand-ins."""

    forward: ForwardInProgress


@contextmanager
def not_of_the_model(current: Current) -> Iterator[None]:
    """Suspends the current forward: code inside is not part of the model."""
    forward = current.forward
    del current.forward
    try:
        yield
    finally:
        current.forward = forward


class StandIn(nn.Module):
    """Replaces a unit, without its parameters. Other attributes, such as a layer's type, have the unit's current values.

    `isinstance` accepts it as the unit's class, which a model's code may check.
    """

    def __init__(self, shape_only: ShapeOnlyUnit, current: Current) -> None:
        super().__init__()
        self.shape_only = shape_only
        self.training = shape_only.original.training
        self._current = current

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.shape_only.original)

    def __setattr__(self, name: str, value: Any) -> None:
        forward = getattr(self.__dict__.get("_current"), "forward", None)
        if forward is not None:
            forward.attribute_set(self, name, value)
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return self.__dict__["shape_only"].attribute(name)

    def __getitem__(self, key: Any) -> Any:
        return self.shape_only.unit[key]  # type: ignore[index]

    def __len__(self) -> int:
        return len(self.shape_only.unit)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return bool(self.shape_only.unit)

    def register_forward_hook(self, *_: Any, **__: Any) -> RemovableHandle:
        """Registers nothing: hooks run on the stage of the unit."""
        return RemovableHandle(OrderedDict())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.__dict__["_is_called"] = True
        return super().__call__(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Called by the module, or directly by the model's code, which is recorded in the shape-only unit."""
        if not self.__dict__.pop("_is_called", False):
            self.shape_only.forward_is_called = True
        forward = getattr(self._current, "forward", None)
        if forward is None:
            raise InputError(
                "the model's code calls part {name!r} again in the backward pass, as torch.utils.checkpoint does for code around a part",
                name=self.shape_only.name,
                remedy="checkpoint the part alone: checkpoint(part, x, use_reentrant=False)",
            )
        return forward.stand_in(self, args, kwargs)


def placeholder(form: OutputForm, device: torch.device, *, writable: bool = False) -> Any:
    """Returns a placeholder of this form: its floating-point values are NaN, so that no use of them goes unnoticed.

    It takes no memory unless it must be `writable`.
    """

    def replaced(leaf: Tensor) -> Tensor:
        placeholder = placeholder_like(leaf, device)
        return placeholder.clone() if writable else placeholder

    return form.filled([replaced(leaf) if isinstance(leaf, Tensor) else leaf for leaf in form.leaves])


def blank(form: OutputForm, device: torch.device) -> Any:
    """Returns zeros of this form, for an observed forward, which reads no values: writable, without memory until code writes to them."""
    if device != _META and not is_host(device):
        return placeholder(form, device, writable=True)
    return form.filled([untouched_zeros(leaf) if isinstance(leaf, Tensor) else leaf for leaf in form.leaves])


def placeholder_like(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a placeholder with the shape and dtype of `tensor`, without memory: NaN if the dtype has it, else 0.

    On the CPU if `device` is the meta device, because code around the units computes real values.
    """
    return placeholder_of(tensor.shape, tensor.dtype, device)


def device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """Returns the device of the first tensor among these arguments, the CPU if there is none."""
    if args and isinstance(args[0], Tensor):  # fast path for nearly every layer, since every stand-in calls this
        return args[0].device
    return next((leaf.device for leaf in pytree.tree_iter((args, kwargs)) if isinstance(leaf, Tensor)), torch.device("cpu"))
