"""Random numbers of torch that user code draws for the microbatches of a batch, as parts of the numbers that it would draw for the batch.

What the code draws before it calls the network is drawn once, for the whole batch, as on one device. Its runs for microbatches get the rows
of their samples, and numbers that do not depend on the samples, such as a scalar, unchanged. Of a permutation of the samples, a microbatch
gets the order of its own entries. What the code draws after the call is drawn for each microbatch, and joined for the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from zerobubble.errors import InputError


class Draw(NamedTuple):
    """Random numbers of one call, whether they are a permutation, and whether they come from a generator of the user."""

    values: Tensor
    permutes: bool
    is_own: bool = False


Replacement = Callable[[int, Draw], Tensor | None]
"""Returns the values of a draw with its number in a run, instead of those that were drawn; None to keep these."""


class Drawing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that notes random numbers of torch in `draws`, after their `replacement`, with which no generator of the user moves."""

    def __init__(self, draws: list[Draw], replacement: Replacement | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws, self._replacement = draws, replacement
        self._is_paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context whose draws are not those of this one."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if self._is_paused or torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        own = kwargs.get("generator")
        generator = own if self._replacement is not None else None
        state = None if generator is None else generator.get_state()
        returned = func(*args, **kwargs)
        if generator is not None and state is not None:
            generator.set_state(state)
        for leaf in pytree.tree_leaves(returned):
            if isinstance(leaf, Tensor):
                draw = Draw(leaf, func.overloadpacket is torch.ops.aten.randperm, own not in (None, torch.default_generator))
                values = None if self._replacement is None else self._replacement(len(self._draws), draw)
                if values is not None:
                    leaf.copy_(values)
                self._draws.append(draw._replace(values=leaf.clone()))
        return returned


@dataclass
class BatchDraws:
    """The random numbers of a batch in microbatches.

    Attributes:
        sizes: The numbers of samples of the microbatches.
        name: The user's function that draws.
        whole: What is drawn for the whole batch before the call of the network.
        parts: What is drawn for each microbatch, in order: before the call, and after it.
        fault: What a run for a microbatch draws that is no part of what the whole batch draws; empty if there is no such draw.
    """

    sizes: Sequence[int]
    name: str = "training_step"
    whole: list[Draw] = field(default_factory=list)
    parts: dict[int, list[Draw]] = field(default_factory=dict)
    fault: str = ""

    def of_microbatch(self, index: int, *, in_loss: bool = False) -> Drawing:
        """Returns a context that draws for one microbatch. `in_loss`: whether it goes on after the call of the network."""
        self.parts[index] = []

        def part(number: int, draw: Draw) -> Tensor | None:
            if in_loss and draw.is_own and number >= len(self.whole):
                self._refuse_own_generator()
            return self._part(index, number, draw)

        return Drawing(self.parts[index], part)

    def _refuse_own_generator(self) -> None:
        raise InputError(
            "{name} draws from a torch.Generator after the call of the network, where only the rank of the last stage runs it",
            name=self.name,
            remedy="draw from torch's default generator, or before the call of the network",
        )

    def joined(self) -> Drawing:
        """Returns a context in which the whole batch draws what the microbatches have drawn."""
        return Drawing([], self._joined)

    @property
    def starts(self) -> list[int]:
        """The numbers of samples before each microbatch."""
        return list(accumulate(self.sizes, initial=0))[:-1]

    @property
    def follow_the_call(self) -> bool:
        """Whether a microbatch draws after the call of the network."""
        return any(len(draws) > len(self.whole) for draws in self.parts.values())

    def _part(self, index: int, number: int, draw: Draw) -> Tensor | None:
        shape = draw.values.shape
        if number >= len(self.whole):  # a number that does not depend on the samples is that of the first microbatch
            first = self.parts[min(self.parts)]
            is_shared = not shape or shape[0] % self.sizes[index] != 0
            return first[number].values if is_shared and number < len(first) and first[number].values.shape == shape else None
        whole = self.whole[number].values
        if whole.shape == shape:
            return whole
        dims = _cut_dims(whole, shape, sum(self.sizes), self.sizes[index])
        if len(dims) != 1:
            self._note(whole, draw)
            return None
        rows = whole.narrow(dims[0], self.starts[index] * whole.shape[dims[0]] // sum(self.sizes), shape[dims[0]])
        return rows.argsort().argsort() if draw.permutes else rows

    def _joined(self, number: int, draw: Draw) -> Tensor | None:
        shape = draw.values.shape
        if number < len(self.whole) and not draw.permutes:
            return self.whole[number].values if self.whole[number].values.shape == shape else None
        if any(number >= len(draws) for draws in self.parts.values()):
            return None
        return self._combined([self.parts[index][number].values for index in sorted(self.parts)], draw)

    def _combined(self, parts: list[Tensor], draw: Draw) -> Tensor | None:
        """Returns the numbers for the whole batch of those of all microbatches; None if they are no parts of it."""
        shape = draw.values.shape
        if all(part.shape == shape for part in parts):
            if any(not torch.equal(part, parts[0]) for part in parts):
                self._note(draw.values, Draw(parts[0], draw.permutes))
            return parts[0]
        dims = [dim for dim in range(len(shape)) if _joins([part.shape for part in parts], shape, dim)]
        if not dims:
            self._note(draw.values, Draw(parts[0], draw.permutes))
            return None
        if draw.permutes:
            parts = [part + start for part, start in zip(parts, self.starts, strict=True)]
        return torch.cat(parts, dims[0])

    def _note(self, whole: Tensor, draw: Draw) -> None:
        self.fault = self.fault or f"{list(draw.values.shape)} random numbers for a microbatch and {list(whole.shape)} for the whole batch"


def _cut_dims(whole: Tensor, shape: torch.Size, samples: int, size: int) -> list[int]:
    """Returns the dimensions that differ, if all of them are cut like the samples."""
    if whole.ndim != len(shape):
        return []
    dims = [dim for dim in range(whole.ndim) if whole.shape[dim] != shape[dim]]
    return dims if all(whole.shape[dim] * size == shape[dim] * samples for dim in dims) else []


def _joins(shapes: Sequence[torch.Size], shape: torch.Size, dim: int) -> bool:
    """Returns whether tensors of these shapes, concatenated along `dim`, have `shape`."""
    if any(len(of_part) != len(shape) for of_part in shapes) or sum(of_part[dim] for of_part in shapes) != shape[dim]:
        return False
    return all(of_part[other] == shape[other] for of_part in shapes for other in range(len(shape)) if other != dim)
