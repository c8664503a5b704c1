"""Gradients of what the user gave for a step: inputs, targets and named arguments that require them, such as soft prompts.

Each microbatch has its own leaf. The gradients of the leaves are summed, and backpropagated into the given tensors once, after the last
pass of the step. A given leaf then has its sum in `.grad`, and the graph behind any other tensor is traversed once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zerobubble.errors import InputError
from zerobubble.runtime.values.buffers import making_tensors
from zerobubble.runtime.values.memory import has_plain_type


class InputGradients:
    """Collects the gradients of a step's inputs on this rank. Call `begin` before each step, and `hand_back` after one that trains."""

    def __init__(self) -> None:
        self._num_routes = 1
        self._sums: dict[int, tuple[Tensor, Tensor]] = {}

    def begin(self, num_routes: int) -> None:
        """Begins a step of a schedule with `num_routes` routes, and drops earlier gradients."""
        self._num_routes = num_routes
        self._sums.clear()

    def part(self, tensor: Tensor, what: str, rows: slice | None = None, dim: int = 0) -> Tensor:
        """Returns the input of a microbatch: `tensor`, which is part of `what`, or some rows of it along `dim`, detached from its graph.

        Raises `InputError` for a tensor that requires a gradient if the schedule has several routes, or if it is nested or of a tensor
        subclass.
        """
        detached = _detached(tensor)
        part = detached if rows is None else _narrow(detached, rows, dim)
        if tensor.requires_grad and torch.is_grad_enabled():
            if self._num_routes > 1:
                message = (
                    "{argument} require a gradient, but each rank at the ends of a bidirectional schedule would have that of its own "
                    "microbatches only"
                )
                raise InputError(message, argument=what, remedy="detach() them, or choose a schedule with one route")
            if tensor.is_nested or not has_plain_type(tensor):
                kind = "nested tensor" if tensor.is_nested else type(tensor).__name__
                message = "a {got} among {argument} requires a gradient, which only plain tensors can receive"
                raise InputError(message, got=kind, argument=what, remedy="detach() it, or give the tensors it is made of")
            part.requires_grad_()
            part.register_post_accumulate_grad_hook(partial(self._add, tensor, rows, dim))  # type: ignore[no-untyped-call]
        return part

    def parts(self, tensor: Tensor, what: str, rows: Sequence[slice], dim: int | None = 0) -> list[Tensor]:
        """Returns `part` for every microbatch of a batch split into these `rows` along `dim`; all get the whole tensor if `dim` is None."""
        if dim is None:
            return [self.part(tensor, what) for _ in rows]
        if tensor.requires_grad and torch.is_grad_enabled():
            return [self.part(tensor, what, rows_of_one, dim) for rows_of_one in rows]
        detached = _detached(tensor)
        return [_narrow(detached, rows_of_one, dim) for rows_of_one in rows]

    def _add(self, tensor: Tensor, rows: slice | None, dim: int, part: Tensor) -> None:
        """Adds the gradient that a backward pass left in `part`."""
        gradient, part.grad = part.grad, None
        assert gradient is not None
        _, total = self._sums.get(id(tensor), (tensor, None))
        if rows is None:
            total = gradient.clone() if total is None else total + gradient
        else:
            total = torch.zeros_like(tensor, requires_grad=False) if total is None else total
            _narrow(total, rows, dim).add_(gradient)
        self._sums[id(tensor)] = tensor, total

    def hand_back(self, divisor: int) -> None:
        """Divides the collected gradients by `divisor` and backpropagates them into the given tensors, in one call for all."""
        sums = list(self._sums.values())
        self._sums.clear()
        if sums:
            torch.autograd.backward([tensor for tensor, _ in sums], [total / divisor if divisor > 1 else total for _, total in sums])


def _detached(tensor: Tensor) -> Tensor:
    """Returns `tensor` without its graph; a normal copy of an inference tensor, which no backward pass can save."""
    if tensor.is_inference():
        with making_tensors():
            return tensor.clone()
    return tensor.detach()


def _narrow(tensor: Tensor, rows: slice, dim: int) -> Tensor:
    return tensor.narrow(dim, rows.start, rows.stop - rows.start)


def parameters_behind(tensors: Iterable[Tensor]) -> set[Tensor]:
    """Returns the parameters that `tensors` are made of. Their graphs are traversed once per node."""
    parameters: set[Tensor] = set()
    left: list[Any] = []
    for tensor in tensors:
        if tensor.grad_fn is not None:
            left.append(tensor.grad_fn)
        elif isinstance(tensor, nn.Parameter) and tensor.requires_grad:
            parameters.add(tensor)
    seen = {None}
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(variable := getattr(node, "variable", None), nn.Parameter):
            parameters.add(variable)
        left += [following for following, _ in node.next_functions]
    return parameters
