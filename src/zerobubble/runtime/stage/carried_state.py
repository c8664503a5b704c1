"""Finds values of samples that the forward of one microbatch leaves in an attribute and the next forward reads and replaces.

The hidden state of a recurrent network that continues from batch to batch is an example. On one device, it belongs to the samples of the
whole batch. In a pipeline, the samples of a microbatch would continue from those of the microbatch before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zerobubble.errors import InputError
from zerobubble.runtime.split.stage_with_loss import stage_alone
from zerobubble.runtime.values.payload import Tensors

Place = tuple[str, nn.Module, str]
"""The path of a module, the module, and the name of its attribute."""
_OF_TORCH = frozenset(vars(nn.Module()))
_MOST_TENSORS = 16
"""Of longer lists and tuples, the first tensors are looked at."""
_OF_SHAPES: frozenset[Any] = frozenset(
    {Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__}
    | {vars(torch._C.TensorBase)[name].__get__ for name in ("shape", "ndim", "dtype", "device", "requires_grad")}
)
"""Functions that read no values: a cache that looks whether it is long enough continues from nothing."""


class CarriedState:
    """Compares the attributes of stage `index` before and after the forwards of a step."""

    def __init__(self, module: nn.Module, index: int) -> None:
        self._module = module
        self._index = index
        self._set_in_step: dict[tuple[int, str], Place] = {}

    def begin(self) -> None:
        """Begins a step."""
        self._set_in_step.clear()

    @contextmanager
    def forward(self, inputs: Tensors) -> Iterator[None]:
        """Context of the forward of a microbatch. Raises `InputError` if it continues from the microbatch before."""
        before = self._values(_num_samples(inputs))
        watched = {key: _Watched(place, before[key][1]) for key, place in self._set_in_step.items() if key in before}
        for attribute in watched.values():
            attribute.replace()
        try:
            yield
        finally:
            for attribute in watched.values():
                attribute.restore()
        for key, (place, value) in self._values(_num_samples(inputs)).items():
            if key not in before or value is not before[key][1]:
                self._set_in_step[key] = place
                if key in watched and watched[key].was_read:
                    raise self._refusal(place)

    def _values(self, num_samples: int) -> dict[tuple[int, str], tuple[Place, Any]]:
        """Returns the attributes that may have a value for each of the samples."""
        return {
            (id(module), name): ((path, module, name), value)
            for path, module in stage_alone(self._module).named_modules()  # a loss may keep a running value
            for name, value in vars(module).items()
            if name not in _OF_TORCH and isinstance(value, (Tensor, tuple, list)) and _has_samples(value, num_samples)
        }

    def _refusal(self, place: Place) -> InputError:
        path, module, name = place
        return InputError(
            "stage {index}: {module} continues from its attribute {name!r}, which holds values of the samples of the microbatch before",
            index=self._index,
            module=repr(path) if path else type(module).__name__,
            name=name,
            remedy="give num_microbatches=1, or begin each forward without it",
        )


class _Watched:
    """The attribute at `place` with its `value`, whose reads are noticed between `replace` and `restore`."""

    def __init__(self, place: Place, value: Any) -> None:
        self._place = place
        self._value = value
        self.was_read = False

    def replace(self) -> None:
        """Puts tensors in its place that notice when they are used."""
        self._watching = self._noticing()
        vars(self._place[1])[self._place[2]] = self._watching

    def _noticing(self) -> Any:
        if isinstance(self._value, Tensor):
            return _Noticing.made(self._value, self._notice)
        noticing = [_Noticing.made(element, self._notice) if isinstance(element, Tensor) else element for element in self._value]
        return type(self._value)(noticing) if type(self._value) in (list, tuple) else self._value

    def restore(self) -> None:
        """Puts the value back, unless the forward has set another."""
        table, name = vars(self._place[1]), self._place[2]
        if table.get(name) is self._watching:
            table[name] = self._value

    def _notice(self) -> None:
        self.was_read = True


class _Noticing(Tensor):
    """A tensor that notices when an operation uses it."""

    notice: Any

    @classmethod
    def made(cls, tensor: Tensor, notice: Any) -> _Noticing:
        noticing = tensor.as_subclass(cls)
        noticing.__dict__["notice"] = notice
        return noticing

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        for leaf in () if func in _OF_SHAPES else tree_leaves((args, kwargs)):
            if isinstance(leaf, cls):
                leaf.__dict__["notice"]()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _num_samples(inputs: Tensors) -> int:
    return next((len(tensor) for tensor in inputs if tensor.layout is torch.strided and not tensor.is_nested and tensor.dim()), 0)


def _has_samples(value: Any, num_samples: int) -> bool:
    values = (value,) if isinstance(value, Tensor) else value[:_MOST_TENSORS]
    tensors = [tensor for tensor in values if isinstance(tensor, Tensor) and not tensor.is_nested]
    return any(tensor.numel() > 1 and num_samples in tensor.shape for tensor in tensors)
