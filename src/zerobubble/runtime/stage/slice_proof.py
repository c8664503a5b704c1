"""Proves that a stage computes over slices of a sequence what it computes over the whole sequence.

A module that mixes tokens and does not read earlier slices, such as plain attention or a convolution, would train on other numbers without
an error. Once a stage has the inputs of a first microbatch, it runs the beginning of each slice in evaluation mode, one after the other and
as one sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zerobubble.errors import InputError
from zerobubble.runtime.device import generators_restored, interface
from zerobubble.runtime.stage.rank_stages import all_parts
from zerobubble.runtime.stage.stage import Stage
from zerobubble.runtime.values.buffers import in_mode
from zerobubble.runtime.values.payload import Payload, Tensors, flatten_pytree, tensors_in, unflatten_pytree
from zerobubble.runtime.values.python_state import PythonState, put_back

TOKENS = 8
"""The tokens of each slice that are compared."""

SEQUENCE = 1
"""The dimension of the sequence."""

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_LOW_PRECISION = 5e-2
"""Largest relative differences of outputs by dtype, and those of other dtypes. A slice that lacks earlier tokens differs by far more."""


class _Call(NamedTuple):
    """A call of a module: its name, and the tensors that it took and returned."""

    name: str
    took: list[Tensor]
    returned: list[Tensor]


def prove_slices(stage: Stage, is_last: bool, pieces: Sequence[Tensors], in_slice: Callable[[int], Any]) -> None:
    """Compares the stage on the `pieces`, the inputs of all slices of a microbatch, with the stage on the whole sequence.

    The output of the stage that `is_last` may be any object with tensors. `in_slice(k)` is a context in which modules compute slice k.
    Raises `InputError` with the first module that computes other values.
    """
    pieces = _shortened(pieces)
    with _unchanged(stage.module, [pieces[0][0].device]):
        whole, sliced = _calls(stage, is_last, _joined(pieces)), []
        for number, piece in enumerate(pieces):
            with in_slice(number):
                sliced.append(_calls(stage, is_last, piece))
    worst = _first_difference(whole, sliced)
    if worst is not None:
        name, difference = worst
        raise InputError(
            "{module} of stage {stage} computes other values over slices of a sequence than over all of it (relative difference "
            "{difference:.1e})",
            module=name or type(stage.module).__name__,
            stage=stage.index,
            difference=difference,
            remedy="let its attention be causal and join the keys of slices, as zb.nn.CausalAttention and the caches of Transformers do, "
            "or leave slices out",
        )


@contextmanager
def _unchanged(module: nn.Module, devices: Sequence[torch.device]) -> Iterator[None]:
    """A context for forwards in evaluation mode, after which buffers, random and Python state are as before."""
    parts, python = list(all_parts(module)), PythonState(module).snapshot()
    generators = generators_restored([device for device in devices if interface(device).has_generator])
    buffers = [(buffer, buffer._version, buffer.clone()) for part in parts for buffer in part.buffers(recurse=False)]
    with generators, in_mode(parts, training=False), torch.no_grad():
        try:
            yield
        finally:
            put_back(python)
            for buffer, version, before in buffers:  # writing into those that passes in flight have saved would spoil their backward
                if buffer._version != version:
                    buffer.copy_(before)


def _shortened(pieces: Sequence[Tensors]) -> list[Tensors]:
    """Returns the first `TOKENS` of each slice, and of tensors over the sequence so far the same tokens."""
    lengths = [_length(piece) for piece in pieces]
    starts = [0, *accumulate(lengths)]
    kept = [range(start, start + min(TOKENS, length)) for start, length in zip(starts, lengths, strict=False)]
    shortened = []
    for number, (piece, length) in enumerate(zip(pieces, lengths, strict=True)):
        of_slice = torch.tensor([at - starts[number] for at in kept[number]])
        so_far = torch.tensor([at for tokens in kept[: number + 1] for at in tokens])
        chosen = {length: of_slice} if number == 0 else {starts[number + 1]: so_far, length: of_slice}
        shortened.append(_with(piece, [_chosen(tensor.detach(), chosen) for tensor in _tensors(piece)]))
    return shortened


def _chosen(tensor: Tensor, positions: dict[int, Tensor]) -> Tensor:
    if tensor.dim() <= SEQUENCE or tensor.shape[SEQUENCE] not in positions:
        return tensor
    return tensor.index_select(SEQUENCE, positions[tensor.shape[SEQUENCE]].to(tensor.device))


def _length(piece: Tensors) -> int:
    return next((tensor.shape[SEQUENCE] for tensor in piece if tensor.dim() > SEQUENCE), 1)


def _joined(pieces: Sequence[Tensors]) -> Tensors:
    """Returns the inputs for the whole sequence: slices in a row, and of everything else what the last slice has."""
    lengths = [_length(piece) for piece in pieces]
    columns = [list(column) for column in zip(*map(_tensors, pieces), strict=True)]
    are_along = [all(t.dim() > SEQUENCE and t.shape[SEQUENCE] == n for t, n in zip(column, lengths, strict=True)) for column in columns]
    joined = [torch.cat(column, SEQUENCE) if is_along else column[-1] for column, is_along in zip(columns, are_along, strict=True)]
    return _with(pieces[-1], joined)


def _tensors(piece: Tensors) -> list[Tensor]:
    """Returns the tensors of a stage's inputs, with those of named arguments."""
    return [*piece, *tensors_in(piece.keywords)] if isinstance(piece, Payload) else list(piece)


def _with(piece: Tensors, tensors: Sequence[Tensor]) -> Tensors:
    """Returns these inputs with other tensors, in the order of `_tensors`."""
    if not isinstance(piece, Payload):
        return tuple(tensors)
    _, structure = flatten_pytree(piece.keywords, opaque=True)
    keywords = unflatten_pytree(structure, iter(tensors[len(piece) :]))
    return Payload.from_tensors(tensors[: len(piece)], piece.structure, keywords)


def _calls(stage: Stage, is_last: bool, inputs: Tensors) -> list[_Call]:
    """Returns the calls of the modules of a stage in the order in which they end; the last is that of the stage itself."""
    calls: list[_Call] = []
    returned: list[Tensor] = []

    def keep(output: Any) -> Tensor:
        returned.extend(tensors_in(output))
        return torch.zeros(())

    with _recorded(stage.module, calls):
        outputs = stage.infer(inputs, keep if is_last else None)
    return [*calls, _Call("", list(inputs), returned if is_last else list(outputs))]


@contextmanager
def _recorded(module: nn.Module, calls: list[_Call]) -> Iterator[None]:
    def hook(name: str) -> Callable[..., None]:
        return lambda _, args, kwargs, output: calls.append(_Call(name, tensors_in((args, kwargs)), tensors_in(output)))

    handles = [part.register_forward_hook(hook(name), with_kwargs=True) for name, part in module.named_modules() if name]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _first_difference(whole: list[_Call], sliced: list[list[_Call]]) -> tuple[str, float] | None:
    """Returns the name of the first module that took the same values and returned others, with the relative difference."""
    *inner, last = whole
    if any(len(calls) != len(whole) for calls in sliced):
        inner = []
    worst = _difference(last.returned, [calls[-1].returned for calls in sliced])
    if worst is None:
        return None
    for number, call in enumerate(inner):
        difference = _difference(call.returned, [calls[number].returned for calls in sliced])
        if difference is not None and _difference(call.took, [calls[number].took for calls in sliced]) is None:
            return call.name, difference
    return "", worst


def _difference(whole: list[Tensor], sliced: list[list[Tensor]]) -> float | None:
    """Returns the relative difference of tensors over the sequence, None if they are equal within the tolerance.

    Tensors that slices do not divide along one dimension, such as masks, are not compared.
    """
    for number, tensor in enumerate(whole):
        pieces = [tensors[number] for tensors in sliced if number < len(tensors)]
        dim = _cut_dim(tensor, pieces) if len(pieces) == len(sliced) and tensor.is_floating_point() else None
        if dim is None:
            continue
        joined = torch.cat(pieces, dim)
        difference = float((joined.double() - tensor.double()).norm() / tensor.double().norm().clamp_min(1e-300))
        if not difference <= _TOLERANCE.get(tensor.dtype, _LOW_PRECISION):
            return difference
    return None


def _cut_dim(whole: Tensor, pieces: list[Tensor]) -> int | None:
    """Returns the one dimension along which the pieces make up a tensor, None if there is none."""
    if any(piece.dim() != whole.dim() for piece in pieces):
        return None
    differs = [dim for dim in range(whole.dim()) if any(piece.shape[dim] != whole.shape[dim] for piece in pieces)]
    return differs[0] if len(differs) == 1 and sum(piece.shape[differs[0]] for piece in pieces) == whole.shape[differs[0]] else None
