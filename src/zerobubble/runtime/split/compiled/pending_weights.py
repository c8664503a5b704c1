"""Pending work of a traced stage between B and W: the graph of W and the tensors it reads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from zerobubble.errors import InputError
from zerobubble.runtime.measure.memory_meter import Held, Meter
from zerobubble.runtime.measure.storages import addresses_of
from zerobubble.runtime.split.compiled.capture import CapturedPart, Part
from zerobubble.runtime.values.gradients import Gradients


class PendingWeights:
    """Weight gradients of `parameters` that W computes with the graph `w` from the tensors `kept`; `meter` counts their bytes."""

    def __init__(self, w: Part, parameters: Sequence[nn.Parameter], kept: list[Tensor], meter: Meter | None) -> None:
        self.kept = kept
        self._w = w
        self._parameters = parameters
        self._versions = [tensor._version for tensor in kept]
        self._metered: list[Held] = [] if meter is None else [meter.hold(tensor) for tensor in kept]

    def run(self, gradients: Gradients) -> None:
        """Adds the gradients to `gradients`. Raises `InputError` if a tensor that W reads was changed in place after B."""
        self._refuse_changes()
        has_first = any(gradients.of(parameter) is None for parameter in self._parameters)
        in_use = addresses_of(self.kept) if has_first else set()
        found = self._w(self.kept)
        if has_first and isinstance(self._w, CapturedPart):
            in_use |= addresses_of(found)  # its results are in static memory, which the next W overwrites
        for parameter, gradient in zip(self._parameters, found, strict=True):
            is_first = gradients.of(parameter) is None
            gradients.add(parameter, _own_tensor(parameter, gradient, in_use) if is_first else gradient)
        self._metered.clear()

    def _refuse_changes(self) -> None:
        for tensor, version in zip(self.kept, self._versions, strict=True):
            if tensor._version != version:
                raise InputError(
                    "a tensor of shape {shape} that a weight gradient needs was changed in place between B and W; {remedy}",
                    shape=str(tuple(tensor.shape)),
                    remedy="give the layer a copy (x.clone()), or choose a schedule that does not split this stage",
                )


def _own_tensor(parameter: nn.Parameter, gradient: Tensor, in_use: set[int]) -> Tensor:
    """Returns the tensor for a first `.grad`: the gradient itself, or a copy if its memory is shared (`in_use`) or its strides differ."""
    address = gradient.untyped_storage().data_ptr()
    is_own = address not in in_use and gradient.stride() == parameter.stride()
    in_use.add(address)
    return gradient if is_own else torch.empty_like(parameter).copy_(gradient)
