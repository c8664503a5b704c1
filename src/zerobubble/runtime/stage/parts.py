"""Measures each part of a stage that was cut from a model: times of F, B and W of one microbatch, and bytes held.

Each part runs alone, as a stage with the splitter "deferred", on the arguments of its calls in a real step. So its times exclude other
parts, the code around them, and communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import median_low
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zerobubble.runtime.measure.clock import clock_for
from zerobubble.runtime.measure.memory_meter import Meter
from zerobubble.runtime.stage.stage import Stage, make_stage
from zerobubble.runtime.values.payload import Tensors


class Part(NamedTuple):
    """A part of a model: its name, its enclosing block if any, the module that a stage calls, and the module in the whole model."""

    name: str
    block: str
    called: nn.Module
    module: nn.Module


@runtime_checkable
class HasModelParts(Protocol):
    """A stage module that was cut from a model by `zb.split`."""

    def model_parts(self) -> list[Part]:
        """Returns the parts of this stage."""
        ...


class PartCost(NamedTuple):
    """Times of F, B and W for a microbatch, in ns, and bytes held from F until B and from B until W."""

    forward: int
    backward: int
    weight: int
    held_after_f: int
    held_after_b: int


Calls = dict[str, list[tuple[Any, Any]]]
"""By name of a part, (args, kwargs) of each of its calls; parts are in the order of their first calls."""


@contextmanager
def recording_calls(stage: nn.Module, parts: list[Part], calls: Calls) -> Iterator[None]:
    """Records the arguments of each call of a part in `calls`, during the first forward of the stage."""
    forwards = 0

    def begin(*_: Any) -> None:
        nonlocal forwards
        forwards += 1

    def recording(name: str) -> Callable[..., None]:
        def note(_: nn.Module, args: Any, kwargs: Any) -> None:
            if forwards == 1:
                calls.setdefault(name, []).append((args, kwargs))

        return note

    handles = [stage.register_forward_pre_hook(begin)]
    handles += [part.called.register_forward_pre_hook(recording(part.name), with_kwargs=True) for part in parts]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def measure(part: Part, calls: list[tuple[Any, Any]], device: torch.device, steps: int) -> PartCost:
    """Returns the total cost of a part's calls in one microbatch: median times of `steps` runs, after a first run that counts bytes."""
    leaves, structures = zip(*(pytree.tree_flatten(call) for call in calls), strict=True)
    stages = [
        make_stage("deferred", _BoundCall(part.module, inputs, structure), 0) for inputs, structure in zip(leaves, structures, strict=True)
    ]
    state = [*part.module.parameters(), *part.module.buffers()]
    # Arguments that do not require grad, such as masks, belong to the batch. All parts of a stage share them, so they do not count.
    shared = [tensor for inputs in leaves for tensor in _tensors(inputs) if not tensor.requires_grad]
    held = [_run(stage, inputs, Meter([*state, *shared]), device) for stage, inputs in zip(stages, leaves, strict=True)]
    runs = [[_run(stage, inputs, None, device) for stage, inputs in zip(stages, leaves, strict=True)] for _ in range(steps)]
    totals = [PartCost(*map(sum, zip(*run, strict=True))) for run in runs]
    return PartCost(
        median_low(total.forward for total in totals),
        median_low(total.backward for total in totals),
        median_low(total.weight for total in totals),
        sum(run.held_after_f for run in held),
        sum(run.held_after_b for run in held),
    )


class _BoundCall(nn.Module):
    """A call of a module as a function of its floating-point arguments, returning the tensors of its output."""

    def __init__(self, module: nn.Module, leaves: list[Any], structure: pytree.TreeSpec) -> None:
        super().__init__()
        self.module = module
        self._leaves, self._structure = leaves, structure

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        remaining = iter(tensors)
        leaves = [next(remaining) if _is_float_tensor(leaf) else leaf for leaf in self._leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self._structure)
        output = self.module(*args, **kwargs)
        return tuple(_tensors(pytree.tree_leaves(dict(output) if isinstance(output, Mapping) else output)))


def _run(stage: Stage, leaves: list[Any], meter: Meter | None, device: torch.device) -> PartCost:
    """Runs F, B and W of one call, and returns their times and, if there is a `meter`, the bytes held after F and after B."""
    inputs: Tensors = tuple(leaf.detach().requires_grad_(leaf.requires_grad) for leaf in leaves if _is_float_tensor(leaf))
    clock = clock_for(device)
    clock.start()
    bytes_ = []
    with stage.stepping(meter), torch.enable_grad():
        instants = [clock.mark()]
        outputs = stage.forward(0, inputs)
        instants.append(clock.mark())
        bytes_.append(0 if meter is None else meter.bytes)
        gradients = tuple(torch.ones_like(output) for output in outputs if output.requires_grad)
        del outputs
        instants.append(clock.mark())
        stage.backward(0, gradients)
        instants.append(clock.mark())
        del gradients
        bytes_.append(0 if meter is None else meter.bytes)
        stage.weight(0)
        instants.append(clock.mark())
    clock.settle()
    start, forward, before, backward, weight = map(clock.read, instants)
    trains = any(parameter.requires_grad for parameter in stage.parameters)
    gives_gradients = any(tensor.requires_grad for tensor in inputs)
    return PartCost(
        forward - start,
        backward - before if gives_gradients or trains else 0,
        weight - backward if trains else 0,
        bytes_[0],
        bytes_[1] if trains else 0,
    )


def _is_float_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _tensors(leaves: list[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]
