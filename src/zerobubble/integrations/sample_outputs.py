"""Takes the output of a model for single samples out of its output for all of them, so that both have the same rounding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class Leaf(NamedTuple):
    """A tensor in the output for one sample: its shape, and its number if it is one."""

    shape: torch.Size
    number: float | None


class JoinedOutput:
    """The output of a model for several samples.

    The rows of each sample are scaled differently, since a fresh model gives all samples like losses. Numbers, such as the model's own
    loss, are not cut: see `of`.

    Args:
        output: The output for all samples.
        samples: What `sample` returns of the output for each sample.
        arguments: The arguments of the model for all samples and for each, which show where the rows of a sample with several are.

    Attributes:
        is_cut: Whether every tensor has rows of samples, or is a number, or the same for all.
        has_numbers: Whether there are numbers that differ between samples.
    """

    def __init__(self, output: Any, samples: Sequence[Sequence[Leaf | None]], arguments: tuple[Any, Sequence[Any]]) -> None:
        self._count = len(samples)
        self._is_strided = _are_strided(*arguments)
        leaves, self._form = pytree.tree_flatten(output)
        alike = all(len(sample) == len(leaves) for sample in samples)
        kinds = [self._kind(leaf, [sample[place] for sample in samples] if alike else []) for place, leaf in enumerate(leaves)]
        self._leaves = [(kind, self._scaled(leaf) if kind == "rows" else leaf) for kind, leaf in zip(kinds, leaves, strict=True)]
        self.is_cut = all(kinds)
        self.has_numbers = "number" in kinds

    @staticmethod
    def sample(output: Any) -> list[Leaf | None]:
        """Returns what is needed of the output for one sample."""
        leaves = pytree.tree_leaves(output)
        return [Leaf(leaf.shape, leaf.item() if leaf.numel() == 1 else None) if isinstance(leaf, Tensor) else None for leaf in leaves]

    def whole(self) -> Any:
        """Returns the output for all samples."""
        return pytree.tree_unflatten([leaf for _, leaf in self._leaves], self._form)

    def of(self, row: int, *, sums: bool) -> Any:
        """Returns the output for one sample. Numbers are those of all samples, which `sums` are divided among them."""
        leaves = [
            self._rows(leaf)[row] if kind == "rows" else leaf / self._count if kind == "number" and sums else leaf
            for kind, leaf in self._leaves
        ]
        return pytree.tree_unflatten(leaves, self._form)

    def _kind(self, leaf: Any, samples: Sequence[Leaf | None]) -> str:
        """Returns "rows", "number" or "shared"; nothing if a tensor cannot be cut."""
        if not isinstance(leaf, Tensor):
            return "shared"
        shapes = {sample.shape for sample in samples if sample is not None}
        if len(shapes) != 1:
            return ""
        (shape,) = shapes
        if shape == leaf.shape:
            alike = leaf.numel() != 1 or all(sample is not None and sample.number == leaf.item() for sample in samples)
            return "shared" if alike or not leaf.is_floating_point() else "number"
        return "rows" if shape[:1] and (shape[0] * self._count, *shape[1:]) == tuple(leaf.shape) else ""

    def _rows(self, leaf: Tensor) -> Tensor:
        """Returns the rows of each sample: a view with the samples as first dimension, and the rows of a sample as second."""
        if self._is_strided:
            return leaf.view(-1, self._count, *leaf.shape[1:]).transpose(0, 1)
        return leaf.view(self._count, -1, *leaf.shape[1:])

    def _scaled(self, leaf: Tensor) -> Tensor:
        if not leaf.is_floating_point():
            return leaf
        leaf = leaf.to(torch.promote_types(leaf.dtype, torch.float32), copy=True)
        rows = self._rows(leaf)
        factors = 2.0 * torch.arange(1, self._count + 1, device=leaf.device) / rows.abs().flatten(1).amax(1).clamp(min=1e-6)
        rows *= factors.to(leaf).view(-1, *[1] * (rows.dim() - 1))
        return leaf


def _are_strided(whole: Any, samples: Sequence[Any]) -> bool:
    """Whether the rows of a sample are as far apart as there are samples, as if several views of a batch were concatenated."""
    count = len(samples)
    leaves = zip(*map(pytree.tree_leaves, (whole, *samples)), strict=False)
    several = [corresponding for corresponding in leaves if all(isinstance(leaf, Tensor) and leaf.dim() for leaf in corresponding)]
    return any(
        not torch.equal(part, alone)
        for together, *alone_parts in several
        if alone_parts and together.size(0) == count * alone_parts[0].size(0) > count
        for part, alone in zip(together.tensor_split(count), alone_parts, strict=True)
    )
