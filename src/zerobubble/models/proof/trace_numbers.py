"""A traced model beside the model itself, on the example: what torch.export took for a constant may be none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zerobubble.errors import InputError
from zerobubble.models.observation.example import Arguments
from zerobubble.runtime.values.random_state import forked

_REMEDY = "put its layers into modules of a ModuleList, between which it can be cut as it is"


def refuse_other_numbers(model: nn.Module, traced: nn.Module, arguments: Arguments) -> None:
    """Run both on the same arguments with the same random numbers, in the mode of `model` and in evaluation.

    Raises `InputError` where outputs or gradients differ, and where the traced model changes a buffer, of which each stage has its own.
    """
    name = type(model).__name__
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for training in sorted({model.training, False}):
        with _kept_as_they_are(model, training) as changed:
            expected = _run(model, arguments, parameters)
        if changed():
            raise InputError(
                f"{name} changes buffer {changed()[0]!r} in its forward, as for running statistics, and the graph that torch.export makes "
                f"of it would do so on every stage: {_REMEDY}"
            )
        with _kept_as_they_are(traced, training):
            found = _run(traced, arguments, parameters)
        if len(found) != len(expected) or not all(map(_agree, found, expected)):
            mode = "training" if training else "evaluation"
            raise InputError(f"the graph that torch.export makes of {name} gives other numbers than it, in {mode}: {_REMEDY}")


def _run(model: nn.Module, arguments: Arguments, parameters: list[nn.Parameter]) -> list[Any]:
    """The leaves of the output, and the gradients of `parameters`."""
    args, kwargs = pytree.tree_map_only(Tensor, torch.clone, arguments)
    with forked(model, args, kwargs), torch.enable_grad():
        leaves = pytree.tree_leaves(model(*args, **kwargs))
        trained = [leaf.square().sum() for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.requires_grad]
        gradients = torch.autograd.grad(trained, parameters, allow_unused=True) if trained and parameters else []
    return [*leaves, *gradients]


@contextmanager
def _kept_as_they_are(model: nn.Module, training: bool) -> Iterator[Any]:
    """Inside, the model is in this mode; afterwards its buffers are as before, and the names of those that were changed are told."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = {name: (buffer, buffer.clone(), buffer._version) for name, buffer in model.named_buffers()}
    changed: list[str] = []
    try:
        for module, mode in modes:
            module.training = training and mode
        yield lambda: changed
    finally:
        for module, mode in modes:
            module.training = mode
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
    apart = (ours.detach() - other.detach()).nan_to_num().norm()
    return ours.shape == other.shape and bool(apart <= 100 * torch.finfo(other.dtype).eps * (1e-9 + other.detach().nan_to_num().norm()))
