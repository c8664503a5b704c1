"""Cuts microbatches into slices along their sequence, dimension 1 of tensors, and joins outputs of slices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from zerobubble.errors import InputError
from zerobubble.runtime.stage.rank_stages import FollowsModel
from zerobubble.runtime.step.batch import SplitBatch, join_outputs, sample_slices
from zerobubble.runtime.step.named_arguments import NamedArguments
from zerobubble.runtime.values.payload import flatten_pytree, tensors_in, unflatten_pytree

SEQUENCE = 1
"""The dimension of the sequence in inputs, targets and outputs."""


def cut_sequences(batch: SplitBatch, slices: int, what: str) -> SplitBatch:
    """Returns the slices of all microbatches, one microbatch after the other, with the number of their tokens as sizes.

    The length of a sequence is that of dimension 1 of the first tensor with two dimensions or more. Tensors of another length go to every
    slice. Longer slices come first. Raises `InputError` for microbatches without such a tensor, for fewer tokens than slices, and for
    inputs that require a gradient.
    """
    if slices == 1 or not batch.microbatches:
        return batch
    pieces, sizes = [], []
    for microbatch, samples in zip(batch.microbatches, batch.sizes, strict=True):
        length = _length(microbatch, slices, what)
        for part in sample_slices(length, slices):
            pieces.append(_part_of(microbatch, part, length))
            sizes.append(samples * (part.stop - part.start))
    return SplitBatch(pieces, sizes, batch.batch_size)


def cut_arguments(named: NamedArguments, slices: int, inputs: SplitBatch, modules: Mapping[int, nn.Module]) -> NamedArguments:
    """Returns the named arguments of all slices: tensors as long as the `inputs` are cut, everything else goes to every slice.

    Raises `InputError` for tensors with a sequence on a rank that has no inputs and therefore cannot know their length. Stages of a cut
    model get the arguments of the first stage.
    """
    if slices == 1:
        return named
    if not inputs.microbatches:
        _refuse_sequences(named, modules)
        return {stage: [named_of_one for named_of_one in of_stage for _ in range(slices)] for stage, of_stage in named.items()}
    lengths = [_length(microbatch, slices, "inputs") for microbatch in inputs.microbatches]
    return {
        stage: [
            _part_of(named_of_one, part, length)
            for named_of_one, length in zip(of_stage, lengths, strict=True)
            for part in sample_slices(length, slices)
        ]
        for stage, of_stage in named.items()
    }


def _refuse_sequences(named: NamedArguments, modules: Mapping[int, nn.Module]) -> None:
    for stage, of_microbatches in named.items():
        tensors = [name for name, value in of_microbatches[0].items() if any(tensor.dim() > SEQUENCE for tensor in tensors_in(value))]
        if tensors and not isinstance(modules[stage], FollowsModel):
            raise InputError(
                "kwargs has {names} for stage {stage}, and only the rank of the first stage knows which of them are cut into slices",
                names=" and ".join(map(repr, tensors)),
                stage=stage,
                remedy="pass them from stage to stage",
            )


def _length(microbatch: Any, slices: int, what: str) -> int:
    tensors, _ = flatten_pytree(microbatch, opaque=True)
    if any(tensor.requires_grad for tensor in tensors):
        raise InputError("{argument} that require a gradient cannot be cut into slices", argument=what, remedy="detach them")
    lengths = [tensor.shape[SEQUENCE] for tensor in tensors if tensor.dim() > SEQUENCE]
    if not lengths:
        raise InputError(
            "{argument} have no sequence in dimension 1, so they cannot be cut into {slices} slices",
            argument=what,
            slices=slices,
            remedy="give a loss for each token, or leave slices out",
        )
    if lengths[0] < slices:
        raise InputError(
            "{argument} of {got} tokens cannot be cut into {slices} slices",
            argument=what,
            got=lengths[0],
            slices=slices,
            remedy="give fewer",
        )
    return int(lengths[0])


def _part_of(microbatch: Any, part: slice, length: int) -> Any:
    tensors, structure = flatten_pytree(microbatch, opaque=True)
    return unflatten_pytree(structure, iter([_narrowed(tensor, part, length) for tensor in tensors]))


def _narrowed(tensor: Tensor, part: slice, length: int) -> Tensor:
    if tensor.dim() <= SEQUENCE or tensor.shape[SEQUENCE] != length:
        return tensor
    return tensor.narrow(SEQUENCE, part.start, part.stop - part.start)


def join_sequences(outputs: Sequence[Any], slices: int) -> list[Any]:
    """Returns the outputs of microbatches, from those of their slices."""
    return [join_outputs(outputs[first : first + slices], dim=SEQUENCE) for first in range(0, len(outputs), slices)]
