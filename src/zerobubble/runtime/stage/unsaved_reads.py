"""Finds tensors that a backward pass reads and that forwards of later microbatches overwrite, unseen by autograd.

Autograd compares the versions of tensors given to `save_for_backward`. It misses a tensor that an autograd Function keeps as an attribute
of `ctx`, such as a workspace that each microbatch overwrites, and a parameter that a forward changes through `.data`. On one device, the
backward of a microbatch runs before the forward of the next, so both give right gradients there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils._pytree import tree_leaves

from zerobubble.errors import InputError
from zerobubble.runtime.values.memory import sampled_bytes, version_of

_READ_NOTHING = ("AddBackward0", "SubBackward0")
"""Autograd nodes whose backward pass reads none of their operands."""


class UnsavedReads:
    """Compares what the backward passes of microbatches in flight read before and after stage `index` runs another forward.

    It walks the autograd graphs, and copies up to 4096 elements of each parameter in them and of each tensor in a `ctx`.
    """

    def __init__(self, module: nn.Module, index: int) -> None:
        self._module = module
        self._index = index
        self._names: dict[int, str] = {}

    def begin(self) -> None:
        """Begins a step with the current parameters of the module."""
        self._names = {id(parameter): name for name, parameter in self._module.named_parameters()}

    @contextmanager
    def forward(self, nodes: Sequence[Any]) -> Iterator[None]:
        """Context of a forward; the backward passes of other microbatches begin at `nodes`.

        Raises `InputError` if the forward overwrites what such a backward reads.
        """
        distinct = {id(tensor): (what, tensor) for what, tensor in self._reached(nodes)}
        before = [_Read(what, tensor) for what, tensor in distinct.values()]
        yield
        for read in before:
            if read.is_overwritten:
                raise InputError(
                    "stage {index}: a forward overwrites {what}, of shape {shape}, which the backward passes of earlier microbatches have "
                    "yet to read; {remedy}",
                    index=self._index,
                    what=read.what,
                    shape=tuple(read.tensor.shape),
                    remedy="change it after the step, or compute with a changed copy (weight * factor)"
                    if isinstance(read.tensor, nn.Parameter)
                    else "give each microbatch a tensor of its own, and keep it by ctx.save_for_backward",
                )

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Context of an R. Raises `InputError` if it changes a parameter, as the forward has before: one device changes it once."""
        before = [_Read(f"parameter {name}", parameter) for name, parameter in self._module.named_parameters()]
        yield
        for read in before:
            if read.holds_another_sample:
                raise InputError(
                    "stage {index}: its forward changes {what}, of shape {shape}, and R would change it a second time; {remedy}",
                    index=self._index,
                    what=read.what,
                    shape=tuple(read.tensor.shape),
                    remedy="make it a buffer, change it after the step, or leave the stage out of the schedule's R passes",
                )

    def _reached(self, nodes: Iterable[Any]) -> Iterator[tuple[str, Tensor]]:
        """Yields the parameters of the stage and the tensors in a `ctx` that lie behind `nodes`, each with a name for messages."""
        seen: set[Any] = {None}
        read: set[Any] = set()
        left = list(nodes)
        while left:
            node = left.pop()
            if node in seen:
                continue
            seen.add(node)
            following = [following for following, _ in node.next_functions]
            left += following
            if node.name() not in _READ_NOTHING:
                read.update(following)
            if isinstance(node, BackwardCFunction):
                kind = type(node).__name__.removesuffix("Backward")
                for name, value in vars(node).items():
                    yield from ((f"ctx.{name} of {kind}", leaf) for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
        for node in read & seen:
            parameter: Any = getattr(node, "variable", None)
            if id(parameter) in self._names:
                yield f"parameter {self._names[id(parameter)]}", parameter


class _Read:
    """The contents of a `tensor` now: its version, and a sample of its bytes."""

    def __init__(self, what: str, tensor: Tensor) -> None:
        self.what = what
        self.tensor = tensor
        self._version = version_of(tensor)
        self._sample = _sample_of(tensor)

    @property
    def is_overwritten(self) -> bool:
        """Whether it was overwritten. Autograd itself compares the versions of parameters where backward reads them."""
        if version_of(self.tensor) != self._version:
            return not isinstance(self.tensor, nn.Parameter)
        return self.holds_another_sample

    @property
    def holds_another_sample(self) -> bool:
        """Whether the sampled bytes differ."""
        now = _sample_of(self.tensor)
        return now is not None and self._sample is not None and not torch.equal(now, self._sample)


def _sample_of(tensor: Tensor) -> Tensor | None:
    """Returns the bytes of evenly spaced elements of a plain tensor, None of any other kind."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
        return None
    return sampled_bytes(tensor)
