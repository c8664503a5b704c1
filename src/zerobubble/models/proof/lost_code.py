"""Refuses a forward with code that a graph of its operations loses: code on gradients, such as hooks, and changes of Python objects."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zerobubble.error_reports.text import describe, text_of
from zerobubble.errors import InputError
from zerobubble.models.observation.copies import copy_of
from zerobubble.models.observation.example import Arguments
from zerobubble.models.observation.gradient_code import GradientCode
from zerobubble.models.observation.shape_only import untouched_zeros
from zerobubble.models.proof.own_functions import functions_behind, is_operator
from zerobubble.models.proof.tiny import MOST_PROVED
from zerobubble.runtime.device import generators_restored
from zerobubble.runtime.values.python_state import PythonState, changed
from zerobubble.runtime.values.random_state import devices_with_generators, states_of

_SEED = 8_191_524_623
"""Seeds torch's generator of the CPU before the first forward: a forward that sets a seed leaves another state, and twice the same."""


def refuse_lost(model: nn.Module, arguments: Arguments) -> None:
    """Runs a copy of `model` twice on these arguments; raises `InputError` for what a graph of its operations would lose.

    The second forward changes what the first one has set up, such as a cache, only if every forward changes it.
    """
    run = _copy(model)
    python, code, devices = PythonState(run), GradientCode(registers=False), devices_with_generators(run, arguments)
    with python.restored(), generators_restored(devices), torch.enable_grad(), code:
        torch.default_generator.manual_seed(_SEED)
        draws = [states_of(devices)]
        try:
            output = _call(run, arguments)
            before, draws = python.snapshot(), [*draws, states_of(devices)]
            _call(run, arguments)
        except Exception as error:
            raise InputError("{model} fails on the example: {reason}", model=type(model).__name__, reason=describe(error)[:300]) from error
        lost = [*code.lines, *_own_backwards(output), *(f"a change of {name}" for name in changed(before))]
        if draws[0] != draws[1] == states_of(devices):
            lost.append("a seed of torch's random numbers")
    if lost:
        raise InputError(
            "a graph of its operations, between which it might be cut, would lose {lost}",
            lost=", ".join(lost),
            remedy="put its layers and that code into modules of a ModuleList, between which it is cut without a graph",
        )


def _call(model: nn.Module, arguments: Arguments) -> Any:
    args, kwargs = pytree.tree_map_only(Tensor, torch.clone, arguments)
    return model(*args, **kwargs)


def _own_backwards(output: Any) -> list[str]:
    """Returns the backward functions that autograd runs in Python: a graph has the derivative of the forward instead."""
    functions = {node._forward_cls for node in functions_behind(output)}
    return sorted(f"the backward of {text_of(function.__qualname__)}" for function in functions if not is_operator(function))


def _copy(model: nn.Module) -> nn.Module:
    """Returns a copy of `model`; a large one has its parameters, and one on the meta device has zeros that take no memory."""
    parameters = list(model.parameters())
    shared: dict[int, Any] = {}
    if sum(parameter.numel() for parameter in parameters) > MOST_PROVED:
        shared = {id(parameter): parameter for parameter in parameters}
    shared |= {id(p): nn.Parameter(untouched_zeros(p), requires_grad=p.requires_grad) for p in parameters if p.is_meta}
    return copy_of(model, shared)
