"""Compares a traced model with the model itself on the example: torch.export may have baked in a value that is not constant."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zerobubble.error_reports.text import describe
from zerobubble.errors import InputError
from zerobubble.models.observation.example import Arguments
from zerobubble.runtime.values.buffers import in_mode
from zerobubble.runtime.values.random_state import forked

_REMEDY = "put its layers into modules of a ModuleList, between which it can be cut without tracing"


def refuse_other_numbers(model: nn.Module, traced: nn.Module, arguments: Arguments) -> None:
    """Compares both on the same arguments with the same random numbers, in the mode of `model` and in evaluation mode.

    Raises `InputError` if outputs or gradients differ, and if the traced model changes a buffer, since each stage has a copy of it.
    """
    name = type(model).__name__
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for training in sorted({model.training, False}):
        with _restoring_buffers(model, training) as changed:
            expected = _run(model, arguments, parameters)
        if changed():
            raise InputError(
                "{name} changes buffer {buffer!r} in its forward, as for running statistics, and the graph of torch.export would "
                "do so on every stage",
                name=name,
                buffer=changed()[0],
                remedy=_REMEDY,
            )
        with _restoring_buffers(traced, training):
            actual = _run(traced, arguments, parameters)
        if len(actual) != len(expected) or not all(map(_agree, actual, expected)):
            mode = "training" if training else "evaluation"
            raise InputError(
                "the graph that torch.export created for {name} gives different numbers, in {mode}", name=name, mode=mode, remedy=_REMEDY
            )


def _run(model: nn.Module, arguments: Arguments, parameters: list[nn.Parameter]) -> list[Any]:
    """Returns the leaves of the output, and the gradients of `parameters`; raises `InputError` if it fails."""
    args, kwargs = pytree.tree_map_only(Tensor, torch.clone, arguments)
    try:
        with forked(model, args, kwargs), torch.enable_grad():
            leaves = pytree.tree_leaves(model(*args, **kwargs))
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.requires_grad]
            trained = [tensor.square().sum() for tensor in tensors]
            gradients = torch.autograd.grad(trained, parameters, allow_unused=True) if trained and parameters else []
    except Exception as error:
        raise InputError(
            "a graph of its operations fails on the example: {reason}", reason=describe(error)[:300], remedy=_REMEDY
        ) from error
    return [*leaves, *gradients]


@contextmanager
def _restoring_buffers(model: nn.Module, training: bool) -> Iterator[Any]:
    """Sets the mode of the model, and restores its buffers afterwards; yields a function that returns the names of changed buffers."""
    buffers = {name: (buffer, buffer.clone(), buffer._version) for name, buffer in model.named_buffers()}
    changed: list[str] = []
    try:
        with in_mode(model.modules(), training):
            yield lambda: changed
    finally:
        changed += [name for name, (buffer, _, version) in buffers.items() if buffer._version != version]
        for name in changed:
            buffer, before, _ = buffers[name]
            with torch.no_grad():
                buffer.copy_(before)


def _agree(ours: Any, other: Any) -> bool:
    if not isinstance(ours, Tensor) or not isinstance(other, Tensor):
        return type(ours) is type(other) and (ours is None or bool(ours == other))
    if not other.is_floating_point():
        return torch.equal(ours, other)
    difference = (ours.detach() - other.detach()).nan_to_num().norm()
    return ours.shape == other.shape and bool(
        difference <= 100 * torch.finfo(other.dtype).eps * (1e-9 + other.detach().nan_to_num().norm())
    )
