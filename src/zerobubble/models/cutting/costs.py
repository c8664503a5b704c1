"""Estimates the costs of a model's units without its weights: FLOPs, bytes of parameters, and bytes of activations.

A unit runs forward and backward on the meta device, where tensors have shapes but no memory. FLOPs are counted by
`torch.utils.flop_counter`; in the backward, each matrix product counts twice, once for the input gradient and once for the weight gradient.
Times are these FLOPs at a constant rate, so they serve only to compare units; `Pipeline.profile` measures.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from zerobubble.cost_model.machine import Machine
from zerobubble.models.observation.copies import copy_of, other_tensors
from zerobubble.models.observation.dataflow import CallRecord, Dataflow, OutputForm, kind_of
from zerobubble.models.observation.equivalent_units import ResultCache, equivalents_of
from zerobubble.models.observation.operations import Operations, parameters_of
from zerobubble.models.observation.units import Units
from zerobubble.partition import Layer
from zerobubble.runtime.split.weight_flops import FlopCounter
from zerobubble.runtime.step.profiling import trained_bytes, untrained_bytes
from zerobubble.runtime.values.added_losses import collecting_losses
from zerobubble.runtime.values.python_state import PythonState


class CallEstimate(NamedTuple):
    """FLOPs of F, B and W, and bytes: saved by F, kept by B for W, and of the output."""

    forward: int
    backward: int
    weight: int
    saved: int
    pending: int
    message: int


def estimated_layers(units: Units, flow: Dataflow, machine: Machine) -> tuple[Layer, ...]:
    """Returns each unit that a forward calls as a layer, with all its calls summed.

    Before the first trained unit, no gradient flows, so there is no B; in that unit, B stops at the trained parameters. A cut inside a
    block also transfers the input of the block, as its residual.
    """
    modules = units.units
    equivalents = equivalents_of(modules)
    caches = {group: ResultCache[CallEstimate](group) for group in equivalents.values()}
    calls: dict[str, list[CallEstimate]] = {}
    flows_back = False
    for call, called in flow.calls.items():
        estimate = _estimate(modules[call.unit], called, flows_back, caches[equivalents[call.unit]])
        calls.setdefault(call.unit, []).append(estimate)
        flows_back = flows_back or _trains(modules[call.unit])
    messages = _messages({name: estimates[-1].message for name, estimates in calls.items()}, units.block_of)
    return tuple(_layer(name, units, estimates, messages[name], machine) for name, estimates in calls.items())


def _messages(outputs: Mapping[str, int], block_of: Mapping[str, str]) -> dict[str, int]:
    """Returns the bytes that cross a cut after each unit: its output and, inside a block, the output of the unit before the block."""
    names, messages, residual = list(outputs), {}, 0
    for place, name in enumerate(names):
        block = block_of.get(name)
        if place and block_of.get(names[place - 1]) != block:
            residual = outputs[names[place - 1]]
        is_inside = block is not None and place + 1 < len(names) and block_of.get(names[place + 1]) == block
        messages[name] = outputs[name] + (residual if is_inside else 0)
    return messages


def _layer(name: str, units: Units, calls: Sequence[CallEstimate], message: int, machine: Machine) -> Layer:
    forward, backward, weight, saved, pending, _ = map(sum, zip(*calls, strict=True))
    times = [machine.time(count) for count in (forward, backward, weight)]
    unit, block = units.units[name], units.block_of.get(name, "")
    kept = trained_bytes(parameters_of(unit)) + untrained_bytes(unit)
    short = name.removeprefix(f"{block}.")
    return Layer(times[0], times[1], times[2], saved, pending, kept, machine.message_time(message), short, block)


def _trains(unit: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in parameters_of(unit))


def _estimate(unit: nn.Module, called: CallRecord, flows_back: bool, cache: ResultCache[CallEstimate]) -> CallEstimate:
    """Estimates a call of a unit, or returns the estimate of an equivalent one."""
    name, arguments = called.call.unit, called.given
    key = (flows_back, called.flops, *map(_kind, called.form.leaves), repr(arguments.structure), *map(_kind, arguments.leaves))
    cached = cache.find(name, key)
    if cached is not None:
        return cached
    on_meta = _on_meta(unit)
    estimate, read = cache.run(on_meta, lambda: _run_or_guess(on_meta, called, flows_back))
    cache.keep(name, key, estimate, read)
    return estimate


def _run_or_guess(unit: nn.Module, called: CallRecord, flows_back: bool) -> CallEstimate:
    """Estimates a call; if the unit cannot run alone on the meta device, B and W are assumed to take as long as F."""
    message = sum(map(_bytes, called.form.tensors))
    try:
        with _disable_current_modes():
            return _run(unit, called.given, flows_back, message)
    except Exception:  # noqa: BLE001 - its code reads values, does not support the meta device, or needs what an earlier call has kept
        trains = _trains(unit)
        return CallEstimate(called.flops, called.flops * flows_back, called.flops * trains, message, message * trains, message)


def _run(unit: nn.Module, arguments: OutputForm, flows_back: bool, message: int) -> CallEstimate:
    with _work_for_weights(unit) as pending, _saved(unit) as saved, FlopCounter() as counting:
        inputs, outputs = _inputs_and_outputs(unit, arguments, flows_back)
    trained = [parameter for parameter in parameters_of(unit) if parameter.requires_grad]
    everything = _backward_flops(outputs, [*inputs, *trained])
    inputs, outputs = _inputs_and_outputs(unit, arguments, flows_back=flows_back or bool(trained))
    flowing = _backward_flops(outputs, inputs)
    weight = everything - flowing
    if trained and not flows_back:  # B still runs from the output to the trained layers in the unit
        inputs, outputs = _inputs_and_outputs(unit, arguments, flows_back=True)
        weight = min(everything, _backward_flops(outputs, [*inputs, *trained]) - flowing)
    return CallEstimate(counting.get_total_flops(), everything - weight, weight, saved.bytes, pending.bytes, message)


def _inputs_and_outputs(unit: nn.Module, arguments: OutputForm, flows_back: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the inputs that receive gradients, and the outputs, of a forward with such arguments.

    What the unit keeps for its next forward is not kept, so that all forwards have the same FLOPs.
    """
    args, kwargs = arguments.filled([_flowing(leaf) if flows_back else leaf for leaf in arguments.leaves])
    if isinstance(unit, Operations):
        args = (*unit.given_parameters, *args[len(unit.given_parameters) :])
    with torch.enable_grad(), collecting_losses(), FusedAttention(), PythonState(unit).restored():
        output = unit(*args, **kwargs)
    flowing = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.requires_grad]
    parameters = set(map(id, parameters_of(unit)))
    inputs = [leaf for leaf in flowing if id(leaf) not in parameters]
    return inputs, [leaf for leaf in pytree.tree_leaves(_plain(output)) if isinstance(leaf, Tensor)]


def _plain(output: Any) -> Any:
    """Converts mappings, such as the outputs of Transformers, to dicts, since pytree may not know their class."""
    return dict(output) if isinstance(output, Mapping) else output


def _backward_flops(outputs: list[Tensor], wanted: list[Tensor]) -> int:
    """Returns the FLOPs to compute the gradients of `wanted`. The graph is gone: a Function may free its state in its backward."""
    flowing = [output for output in outputs if output.requires_grad]
    if not flowing or not wanted:
        return 0
    with FlopCounter() as counter:
        torch.autograd.grad(flowing, wanted, [torch.zeros_like(output) for output in flowing], allow_unused=True)
    return int(counter.get_total_flops())


class _Storages:
    """Counts the bytes of tensors, each storage once."""

    def __init__(self, uncounted: Iterable[Tensor] = ()) -> None:
        self.bytes = 0
        self._alive = {tensor.untyped_storage()._cdata: tensor for tensor in uncounted}  # kept alive: an address may be reused

    def add(self, tensor: Tensor) -> None:
        """Counts the storage of `tensor`, unless already counted."""
        storage = tensor.untyped_storage()
        if self._alive.setdefault(storage._cdata, tensor) is tensor:
            self.bytes += max(_bytes(tensor), storage.nbytes())


@contextmanager
def _saved(unit: nn.Module) -> Iterator[_Storages]:
    """Counts the tensors that autograd saves inside, without parameters and buffers."""
    storages = _Storages(itertools.chain(parameters_of(unit), unit.buffers()))

    def pack(tensor: Tensor) -> Tensor:
        storages.add(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield storages


@contextmanager
def _work_for_weights(unit: nn.Module) -> Iterator[_Storages]:
    """Counts the tensors that W needs of the layers called inside: for each trained weight, its layer's input and output gradient."""
    storages = _Storages()

    def count(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        for tensor in pytree.tree_leaves((args, output)):
            if isinstance(tensor, Tensor):
                storages.add(tensor)

    layers = [part for part in unit.modules() if any(p.requires_grad and p.dim() > 1 for p in part.parameters(recurse=False))]
    handles = [part.register_forward_hook(count) for part in layers]
    try:
        yield storages
    finally:
        for handle in handles:
            handle.remove()


def _on_meta(unit: nn.Module) -> nn.Module:
    """Returns a copy of `unit` on the meta device, with the same `requires_grad`."""
    memo = other_tensors(unit, lambda tensor: torch.empty_like(tensor, device="meta"))
    for parameter in unit.parameters():
        memo[id(parameter)].requires_grad_(parameter.requires_grad)
    return copy_of(unit, memo)


def _flowing(leaf: Any) -> Any:
    """Makes a floating-point argument require grad, as if it came from another unit; returns other values unchanged."""
    is_flowing = isinstance(leaf, Tensor) and leaf.is_floating_point()
    return leaf.detach().requires_grad_() if is_flowing else leaf


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _kind(leaf: Any) -> Any:
    return kind_of(leaf, lambda tensor: (tensor.shape, tensor.dtype, tensor.requires_grad))


class FusedAttention(TorchFunctionMode):
    """Treats `scaled_dot_product_attention` of meta tensors as one operation, for shapes and FLOPs; masked-out scores are counted too.

    By default, torch decomposes it on the meta device and counts the scores as gigabytes that no GPU saves.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        is_attention = func is torch.nn.functional.scaled_dot_product_attention
        if is_attention and args and isinstance(args[0], Tensor) and args[0].is_meta and args[0].dim() == 4:
            return _attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, enable_gqa: bool = False, **__: Any) -> Tensor:
    if enable_gqa:
        key, value = (heads.repeat_interleave(query.shape[1] // heads.shape[1], dim=1) for heads in (key, value))
    output: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, None, True)[0]
    return output
