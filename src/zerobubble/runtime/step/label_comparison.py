"""Finds out whether a loss is a mean over labels that are not ignored, from labels of which some more are ignored.

A model that returns its own loss, as those of Transformers do, cannot be called for two microbatches together: only the model knows how to
join what arrives at its last stage. But labels can be ignored. Let L be the loss of a microbatch with n counted labels, and L1 and L2 its
losses with n1 and n2 = n - n1 of them. If the loss is a mean over counted labels, plus terms without labels,

    n L = n1 L1 + n2 L2

A sum, a mean over all places and a mean over samples do not satisfy this. If the loss does, and microbatches with equal weights have
different numbers of counted labels, the mean over microbatches is not the loss of the whole batch.

The last stage runs for this without gradients, with the same random numbers each time, on one microbatch that is kept in host memory.
Labels are integers of which all negative ones are the same number. A model may not count the first label of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerobubble.runtime.values.memory import in_host_memory
from zerobubble.runtime.values.payload import Payload, Tensors, flatten_pytree, unflatten_pytree

_ROUNDING = {torch.float64: 1e-8, torch.float32: 1e-5}
"""Relative differences that rounding of a sum explains, by dtype of the loss; logits are the same in all calls."""
_MOST_ROUNDING = 4e-3
_LEAST_APART = 20
"""Losses with different labels must differ by this many times the rounding."""
_KINDS = (torch.int64, torch.int32)
Run = Callable[[Tensors, Any], Tensor]
"""Returns the loss of the last stage for these inputs and this target."""


class IgnoredLabels(NamedTuple):
    """Labels that two `microbatches` ignore in different shares: the number that stands for them, the labels counted, and the weights.

    `are_shifted` says whether the first label of each sequence does not count.
    """

    ignored: int
    are_shifted: bool
    microbatches: tuple[int, int]
    counts: tuple[int, int]
    weights: tuple[float, float]


class _Labels(NamedTuple):
    """The integers that arrive at the last stage for a microbatch, also in its target, and the weight of the microbatch."""

    microbatch: int
    tensors: list[Tensor]
    weight: float


class LabelComparison:
    """Compares the numbers of counted labels of a step's microbatches with their weights.

    Args:
        run: Returns the loss of the last stage.
        alone: Returns a context of all calls of `run`.
    """

    def __init__(self, run: Run, alone: Callable[[], AbstractContextManager[object]]) -> None:
        self._run = run
        self._alone = alone
        self._labels: list[_Labels] = []
        self._first: tuple[Tensors, Any] | None = None
        self._devices: list[torch.device] = []

    def note(self, microbatch: int, inputs: Tensors, target: Any, *, weight: float, size: int) -> None:
        """Notes what arrives at the last stage for a microbatch of `size` samples. A mean over one sample may be one over its labels."""
        tensors = [tensor.clone() for tensor in _leaves(inputs, target) if tensor.dtype in _KINDS and tensor.dim()]
        if not tensors or size < 2:
            return
        self._labels.append(_Labels(microbatch, tensors, weight))
        if self._first is None:
            self._devices = [tensor.device for tensor in _leaves(inputs, target)]
            kept = [in_host_memory(tensor.detach().clone()) for tensor in _leaves(inputs, target)]
            self._first = _with_tensors(inputs, target, kept)

    def clear(self) -> None:
        """Drops what is noted."""
        self._labels, self._first = [], None

    def found(self) -> IgnoredLabels | None:
        """Returns labels over which the loss is a mean, if the weights of two microbatches do not say how many count."""
        if len({len(labels.tensors) for labels in self._labels}) != 1:
            return None
        suspects = [suspect for place in range(len(self._labels[0].tensors)) for suspect in self._unequal(place)]
        if not suspects:
            return None
        with self._alone():
            return next((suspect for place, suspect in suspects if self._is_mean_over(self._labels[0].tensors[place], suspect)), None)

    def _unequal(self, place: int) -> Iterator[tuple[int, IgnoredLabels]]:
        """Yields how labels at this place may count such that weights do not fit."""
        ignored = min(int(labels.tensors[place].min()) if labels.tensors[place].numel() else 0 for labels in self._labels)
        if ignored >= 0 or any(bool((labels.tensors[place] < 0).ne(labels.tensors[place] == ignored).any()) for labels in self._labels):
            return
        counted = [self._unequal_counts(place, ignored, are_shifted=are_shifted) for are_shifted in (False, True)]
        first = self._labels[0].tensors[place]
        if None in counted and bool((first[..., 0] == ignored).all()):  # it does not show whether the first label counts
            return
        yield from ((place, counts) for counts in counted if counts is not None)

    def _unequal_counts(self, place: int, ignored: int, *, are_shifted: bool) -> IgnoredLabels | None:
        """Returns the counts of labels in two microbatches whose weights do not fit them; None if all weights fit."""
        (first, ours), *others = [(part, len(_counted(part.tensors[place], ignored, are_shifted=are_shifted))) for part in self._labels]
        for two, theirs in others:
            if abs(ours * two.weight - theirs * first.weight) > 1e-6 * (ours * two.weight + theirs * first.weight):
                microbatches, weights = (first.microbatch, two.microbatch), (first.weight, two.weight)
                return IgnoredLabels(ignored, are_shifted, microbatches, (ours, theirs), weights)
        return None

    def _is_mean_over(self, labels: Tensor, ignored_labels: IgnoredLabels) -> bool:
        """Returns whether the loss of the first microbatch is the mean over its counted `labels`."""
        counted = _counted(labels, ignored_labels.ignored, are_shifted=ignored_labels.are_shifted)
        count = len(counted)
        if count < 2:
            return False
        whole = self._loss_of(labels, labels)
        rounding = _ROUNDING.get(whole.dtype, _MOST_ROUNDING)
        is_chosen = torch.arange(count, device=counted.device)
        for ours in (is_chosen < max(1, 3 * count // 8), is_chosen % 3 == 0):
            parts = [counted[ours], counted[~ours]]
            first, other = (float(self._loss_of(labels, _with_only(labels, part, ignored_labels.ignored))) for part in parts)
            mean, scale = (len(parts[0]) * first + len(parts[1]) * other) / count, max(abs(first), abs(other), abs(float(whole)))
            if not isfinite(scale) or abs(first - other) < _LEAST_APART * rounding * scale or abs(float(whole) - mean) > rounding * scale:
                return False
        return True

    def _loss_of(self, labels: Tensor, others: Tensor) -> Tensor:
        """Returns the loss of the first microbatch with other labels wherever it is given these `labels`."""
        assert self._first is not None
        copies = [leaf.to(device, copy=True) for leaf, device in zip(_leaves(*self._first), self._devices, strict=True)]
        leaves = [others.clone() if leaf.dtype == labels.dtype and torch.equal(leaf, labels) else leaf for leaf in copies]
        return self._run(*_with_tensors(*self._first, leaves))


def _counted(labels: Tensor, ignored: int, *, are_shifted: bool) -> Tensor:
    """Returns the places of the labels that count, in the flattened tensor."""
    counts = labels != ignored
    if are_shifted:
        counts[..., 0] = False
    return counts.flatten().nonzero().flatten()


def _with_only(labels: Tensor, places: Tensor, ignored: int) -> Tensor:
    """Returns the labels at these places, all others being ignored."""
    kept = torch.full_like(labels, ignored).flatten()
    kept[places] = labels.flatten()[places]
    return kept.view(labels.shape)


def _named(inputs: Tensors) -> dict[str, Any]:
    return inputs.keywords if isinstance(inputs, Payload) else {}


def _leaves(inputs: Tensors, target: Any) -> Sequence[Tensor]:
    """Returns the tensors of a microbatch's inputs, named arguments and target."""
    return [*inputs, *flatten_pytree((_named(inputs), target), opaque=True)[0]]


def _with_tensors(inputs: Tensors, target: Any, tensors: Sequence[Tensor]) -> tuple[Tensors, Any]:
    """Returns the same inputs and target with other tensors."""
    count = len(inputs)
    named, target = unflatten_pytree(flatten_pytree((_named(inputs), target), opaque=True)[1], iter(tensors[count:]))
    first = tuple(tensors[:count])
    return (Payload.from_tensors(first, inputs.structure, named) if isinstance(inputs, Payload) else first), target
