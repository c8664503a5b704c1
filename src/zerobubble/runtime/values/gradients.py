"""Reads and sums the gradients of a pipeline's parameters, in `.grad` or, in another precision, in `.main_grad`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor, nn

from zerobubble.errors import InputError
from zerobubble.runtime.values.memory import local_part


class GradientPart(Protocol):
    """A part of a tensor, such as a slice. Equal parts are the same part."""

    def add(self, whole: Tensor, gradient: Tensor) -> None:
        """Adds the `gradient` of the part to its place in `whole`, which is contiguous."""


class Gradients:
    """Reads and sums gradients. With `dtype`, microbatches are summed in `parameter.main_grad` of that type, and `.grad` stays None.

    Raises `InputError` for a type that is not floating-point.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        if dtype is not None and not dtype.is_floating_point:
            raise InputError("main_grad must be a floating-point type, such as torch.float32, got {dtype}", dtype=str(dtype))
        self.dtype = dtype
        self._name = "grad" if dtype is None else "main_grad"

    def refuse_complex(self, stage: int, module: nn.Module) -> None:
        """Raises `InputError` if a stage has a complex parameter, since `main_grad` would cut its gradient to the real part."""
        first = next((name for name, parameter in module.named_parameters() if parameter.is_complex()), None)
        if self.dtype is not None and first is not None:
            message = "main_grad={dtype} cannot hold the gradient of {parameter} of stage {stage}, which is complex"
            raise InputError(message, dtype=str(self.dtype), parameter=first, stage=stage, remedy="leave main_grad out")

    def get(self, parameter: Tensor) -> Tensor | None:
        """Returns the gradient summed so far, None without any."""
        gradient: Tensor | None = getattr(parameter, self._name, None)
        return gradient

    def dense(self, parameter: Tensor) -> Tensor | None:
        """Returns the gradient summed so far if it is a plain dense tensor, else None."""
        gradient = self.get(parameter)
        return gradient if type(gradient) is Tensor and gradient.layout is torch.strided else None

    def put(self, parameter: Tensor, gradient: Tensor | None) -> None:
        """Sets the sum to `gradient`."""
        setattr(parameter, self._name, gradient)

    def add(self, parameter: Tensor, gradient: Tensor) -> None:
        """Adds `gradient` to the sum, which may take over its memory."""
        so_far = self.get(parameter)
        if so_far is None:
            self.put(parameter, gradient if self.dtype is None else gradient.to(self.dtype))
        elif so_far.is_sparse and not gradient.is_sparse:  # torch adds sparse to dense, but not dense to sparse
            self.put(parameter, gradient + so_far)
        else:
            so_far.add_(gradient)

    def add_part(self, parameter: Tensor, part: GradientPart, gradient: Tensor) -> None:
        """Adds the `gradient` of a part of the parameter to the sum, which begins with zeros."""
        so_far = self.get(parameter)
        if so_far is None:
            so_far = torch.zeros_like(parameter, dtype=self.dtype, memory_format=torch.contiguous_format, requires_grad=False)
            self.put(parameter, so_far)
        if so_far.is_sparse or not so_far.is_contiguous():
            whole = torch.zeros_like(parameter, memory_format=torch.contiguous_format, requires_grad=False)
            part.add(whole, gradient)
            self.add(parameter, whole)
        else:
            part.add(so_far, gradient)

    def collect(self, parameters: Iterable[nn.Parameter]) -> None:
        """Moves the gradients that autograd has left in `.grad` to the sums in `main_grad`."""
        assert self.dtype is not None
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is not None:
                self.add(parameter, gradient.to_dense().to(self.dtype, copy=True))
                parameter.grad = None


IN_GRAD = Gradients()
"""Gradients where torch keeps them."""


class EarlierSums:
    """The gradients before a step, to drop what a refused step has added. It has no copies, and takes about 0.5 us for each parameter."""

    def __init__(self, parameters: Iterable[nn.Parameter], gradients: Gradients) -> None:
        self._parameters = list(parameters)
        self._gradients = gradients
        self._sums = list(map(gradients.get, self._parameters))
        self._versions = [_version(earlier) for earlier in self._sums if earlier is not None]

    @property
    def are_lost(self) -> bool:
        """Whether a gradient of earlier steps has changed since."""
        pairs = zip(map(self._gradients.get, self._parameters), self._sums, strict=True)
        are_same = all(now is earlier for now, earlier in pairs if earlier is not None)
        return not are_same or self._versions != [_version(earlier) for earlier in self._sums if earlier is not None]

    def drop(self, *, all_steps: bool) -> None:
        """Drops the gradients of the step, with `all_steps` also the gradients of earlier steps."""
        for parameter, earlier in zip(self._parameters, self._sums, strict=True):
            if all_steps or earlier is None:
                self._gradients.put(parameter, None)


def _version(gradient: Tensor) -> int:
    return 0 if gradient.is_inference() else local_part(gradient)._version
