"""The outputs of evaluated microbatches: what is kept of each, on the rank of the last stage, and their copies on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zerobubble.errors import InputError
from zerobubble.runtime.step.loss_faults import note_given
from zerobubble.runtime.transport.peers import Peers
from zerobubble.runtime.values.payload import Structure, flatten_pytree, unflatten_pytree

OutputFunction = Callable[..., Any]


class Outputs:
    """What an evaluation keeps of its microbatches: their outputs, or what `output_fn` returns for each.

    Args:
        count: The number of microbatches, of all slices.
        output_fn: `output_fn(output)`, or `output_fn(output, target)` if there are targets.
        keeps_all: Whether outputs are needed until `finish`, because ranks compute their losses together.

    Attributes:
        targets: The target of each microbatch; empty without targets.
        kept: What is kept of each microbatch. On other ranks than that of the last stage, all are None.
    """

    def __init__(self, count: int, output_fn: OutputFunction | None, *, keeps_all: bool) -> None:
        self.kept: list[Any] = [None] * count
        self.targets: Sequence[Any] = ()
        self._output_fn = output_fn
        self._keeps_all = keeps_all

    def put(self, microbatch: int, output: Any) -> None:
        """Takes the output of a microbatch."""
        self.kept[microbatch] = output if self._keeps_all else self._result(microbatch, output)

    def finish(self) -> None:
        """Replaces outputs that were needed until now."""
        if self._keeps_all:
            self.kept = [self._result(microbatch, output) for microbatch, output in enumerate(self.kept)]

    def _result(self, microbatch: int, output: Any) -> Any:
        if self._output_fn is None:
            return output
        arguments = {"output": output} | ({"target": self.targets[microbatch]} if self.targets else {})
        try:
            return self._output_fn(*arguments.values())
        except Exception as error:
            note_given(error, "output_fn", **arguments)
            raise


def on_all_ranks(peers: Peers, value: Any, source: int) -> Any:
    """Returns the `value` of rank `source` on every rank: tensors, constants, and tuples, lists, dicts and dataclasses of these.

    All ranks call it; others pass None. Raises the same `InputError` on all of them for another object, and they stay connected.
    """
    doing, fault = "copying outputs to all ranks", ""
    tensors: list[Tensor] = []
    structure: Structure = None
    try:
        tensors, structure = flatten_pytree(value, "the outputs")
    except TypeError as error:
        fault = str(error)
    form = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
    with peers.collective(doing):
        structure, form, fault = peers.gather_objects((structure, form, fault))[source]
    if fault:
        raise InputError('{fault}: to="all" copies tensors, numbers and text to all ranks', fault=fault, remedy='leave to="all" out')
    if peers.rank != source:
        tensors = [torch.empty(shape, dtype=dtype, device=peers.device) for shape, dtype in form]
    copies = [tensor.detach().to(peers.device).contiguous() for tensor in tensors]
    for tensor in copies:
        peers.replicate(tensor, source, doing)
    return value if peers.rank == source else unflatten_pytree(structure, iter(copies))
