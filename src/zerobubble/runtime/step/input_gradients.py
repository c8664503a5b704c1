"""Gradients of what the user gave for a step: inputs, targets and named arguments that require them, such as soft prompts.

Each microbatch works on a leaf of its own. What comes back to the leaves is added up, and once, after the last pass of the step, handed to
the tensors that were given: a leaf of the user's has it in `.grad`, and the graph behind any other tensor is gone back through once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from zerobubble.errors import InputError
from zerobubble.runtime.values.memory import has_plain_type


class InputGradients:
    """Gathers the gradients of a step's inputs on this rank. Call `begin` before each step, and `hand_back` after one that trains."""

    def __init__(self) -> None:
        self._num_routes = 1
        self._sums: dict[int, tuple[Tensor, Tensor]] = {}

    def begin(self, num_routes: int) -> None:
        """Start a step of a schedule with so many routes, and forget what was gathered."""
        self._num_routes = num_routes
        self._sums.clear()

    def part(self, given: Tensor, what: str, rows: slice | None = None, dim: int = 0) -> Tensor:
        """What a microbatch works on: `given`, which came as `what`, or some rows of it along `dim`, apart from its graph.

        Raises `InputError` for a tensor that requires a gradient under a schedule of several routes, and for a nested tensor or another
        class of tensors that requires one.
        """
        part = given.detach() if rows is None else _narrowed(given.detach(), rows, dim)
        if given.requires_grad and torch.is_grad_enabled():
            if self._num_routes > 1:
                raise InputError(
                    f"{what} require a gradient, and each rank at the ends of a bidirectional schedule would have that of its own "
                    "microbatches only; give them .detach()ed, or choose a schedule with one route"
                )
            if given.is_nested or not has_plain_type(given):
                kind = "nested tensor" if given.is_nested else type(given).__name__
                raise InputError(
                    f"a {kind} among {what} requires a gradient, which can be handed back to plain tensors only; give it "
                    ".detach()ed, or give the tensors it is made of"
                )
            part.requires_grad_()
            part.register_post_accumulate_grad_hook(partial(self._add, given, rows, dim))  # type: ignore[no-untyped-call]
        return part

    def parts(self, given: Tensor, what: str, rows: Sequence[slice], dim: int | None = 0) -> list[Tensor]:
        """`part` for every microbatch of a batch whose samples are cut into these `rows` along `dim`; without one all have the whole."""
        if dim is None:
            return [self.part(given, what) for _ in rows]
        if given.requires_grad and torch.is_grad_enabled():
            return [self.part(given, what, own, dim) for own in rows]
        apart = given.detach()
        return [_narrowed(apart, own, dim) for own in rows]

    def _add(self, given: Tensor, rows: slice | None, dim: int, part: Tensor) -> None:
        """Take the gradient that a backward pass left in `part`."""
        gradient, part.grad = part.grad, None
        assert gradient is not None
        _, total = self._sums.get(id(given), (given, None))
        if rows is None:
            total = gradient.clone() if total is None else total + gradient
        else:
            total = torch.zeros_like(given, requires_grad=False) if total is None else total
            _narrowed(total, rows, dim).add_(gradient)
        self._sums[id(given)] = given, total

    def hand_back(self, divisor: int) -> None:
        """Go back from what was given, all of it at once, with the gradients gathered since the last call, divided by `divisor`."""
        sums = list(self._sums.values())
        self._sums.clear()
        if sums:
            torch.autograd.backward([given for given, _ in sums], [total / divisor if divisor > 1 else total for _, total in sums])


def _narrowed(tensor: Tensor, rows: slice, dim: int) -> Tensor:
    return tensor.narrow(dim, rows.start, rows.stop - rows.start)
