"""What the units of a model cost, estimated without its numbers: operations, bytes of parameters, and bytes of activations.

A unit runs forward and backward on the meta device, where tensors have shapes and no memory. Every operation that torch knows to count
is counted (`torch.utils.flop_counter`), each matrix product twice: once for the gradient of what flows back, once for that of a weight.
Times are these operations at one rate, so they compare units with each other; `Pipeline.profile` measures.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.flop_counter import FlopCounterMode

from zerobubble.models.dataflow import Called, Dataflow, OutputForm, kind_of
from zerobubble.models.fused_attention import FusedAttention
from zerobubble.partition import Layer
from zerobubble.runtime.values.added_losses import collecting_losses
from zerobubble.units import MOST

ADAM_BYTES = 8
"""Bytes of the two moments that Adam keeps for a parameter, in float32."""
MASTER_BYTES = 4
"""Bytes of the float32 copy that is trained in the place of a parameter of 16 bits."""


@dataclass(frozen=True)
class Machine:
    """How fast operations and messages are taken to be: a GPU of today at half of its peak, and a fast network."""

    flops_per_second: float = 4e14
    bytes_per_second: float = 5e10

    def time(self, flops: int) -> int:
        """The ns that so many operations take."""
        return min(MOST, round(1e9 * flops / self.flops_per_second))

    def message_time(self, count: int) -> int:
        """The ns that a message of so many bytes takes."""
        return min(MOST, round(1e9 * count / self.bytes_per_second))


COUNTING = Machine(1e9, 1e9)
"""The machine on which a ns is an operation."""


class Estimate(NamedTuple):
    """The floating-point operations of F, B and W, and bytes: saved by F, left by B for W, and of the output."""

    forward: int
    backward: int
    weight: int
    saved: int
    pending: int
    message: int


def estimated_layers(units: Mapping[str, nn.Module], flow: Dataflow, machine: Machine) -> tuple[Layer, ...]:
    """Each of the `units` that a forward calls as a layer by its name, all its calls together.

    Below the first unit that trains nothing flows back, so there is no B.
    """
    known: dict[Any, Estimate] = {}
    calls: dict[str, list[Estimate]] = {}
    flows_back = False
    for call, called in flow.calls.items():
        unit = units[call.unit]
        given = called.given
        key = (flows_back, str(unit), *map(_kind, unit.parameters()), repr(given.structure), *map(_kind, given.leaves))
        if key not in known:
            known[key] = _estimate(unit, called, flows_back)
        calls.setdefault(call.unit, []).append(known[key])
        flows_back = flows_back or _trains(unit)
    return tuple(_layer(name, units[name], found, machine) for name, found in calls.items())


def _layer(name: str, unit: nn.Module, calls: Sequence[Estimate], machine: Machine) -> Layer:
    forward, backward, weight, saved, pending, _ = map(sum, zip(*calls, strict=True))
    times = [machine.time(count) for count in (forward, backward, weight)]
    message = machine.message_time(calls[-1].message)
    return Layer(times[0], times[1], times[2], saved, pending, trained_bytes(unit.parameters()), message, name)


def trained_bytes(parameters: Iterable[nn.Parameter]) -> int:
    """The bytes of these parameters, and of gradients and Adam's state for those that train."""
    return sum(parameter.numel() * (parameter.element_size() + _training_bytes(parameter)) for parameter in parameters)


def _training_bytes(parameter: nn.Parameter) -> int:
    if not parameter.requires_grad:
        return 0
    return parameter.element_size() + ADAM_BYTES + (MASTER_BYTES if parameter.element_size() < MASTER_BYTES else 0)


def _trains(unit: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in unit.parameters())


def _estimate(unit: nn.Module, called: Called, flows_back: bool) -> Estimate:
    """What a call of a unit costs; where it cannot run on the meta device, B and W are taken to be as long as F."""
    message = sum(map(_bytes, called.form.tensors))
    try:
        return _run(unit, called.given, flows_back, message)
    except (NotImplementedError, RuntimeError, TypeError):  # its code looks at numbers, of which there are none on the meta device
        trains = _trains(unit)
        return Estimate(called.flops, called.flops * flows_back, called.flops * trains, message, message * trains, message)


def _run(original: nn.Module, given: OutputForm, flows_back: bool, message: int) -> Estimate:
    unit = _on_meta(original)
    args, kwargs = given.filled([_flowing(leaf) if flows_back else leaf for leaf in given.leaves])
    counting = FlopCounterMode(display=False)
    undisturbed = (_disable_current_modes(), torch.enable_grad(), collecting_losses(), FusedAttention())
    with ExitStack() as stack, _work_for_weights(unit) as pending, _saved(unit) as saved:
        for context in (*undisturbed, counting):
            stack.enter_context(context)
        output = unit(*args, **kwargs)
    trained = [parameter for parameter in unit.parameters() if parameter.requires_grad]
    inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.requires_grad]
    outputs = [leaf for leaf in pytree.tree_leaves(_plain(output)) if isinstance(leaf, Tensor)]
    backward, everything = _backward_flops(outputs, inputs), _backward_flops(outputs, [*inputs, *trained])
    return Estimate(counting.get_total_flops(), backward, everything - backward, saved.bytes, pending.bytes, message)


def _plain(output: Any) -> Any:
    """The output as a dict where it is one, such as those of Transformers, which pytrees may not know."""
    return dict(output) if isinstance(output, Mapping) else output


def _backward_flops(outputs: list[Tensor], wanted: list[Tensor]) -> int:
    """The operations that it takes to get the gradients of what is `wanted`."""
    flowing = [output for output in outputs if output.requires_grad]
    if not flowing or not wanted:
        return 0
    with _disable_current_modes(), FlopCounterMode(display=False) as counter:
        torch.autograd.grad(flowing, wanted, [torch.zeros_like(output) for output in flowing], retain_graph=True, allow_unused=True)
    return int(counter.get_total_flops())


class _Storages:
    """Bytes of tensors, each storage counted once."""

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        self.bytes = 0
        self._alive = {tensor.untyped_storage()._cdata: tensor for tensor in known}  # an address belongs to another storage after its end

    def add(self, tensor: Tensor) -> None:
        """Count the storage of `tensor`, unless it is known."""
        storage = tensor.untyped_storage()
        if self._alive.setdefault(storage._cdata, tensor) is tensor:
            self.bytes += max(_bytes(tensor), storage.nbytes())


@contextmanager
def _saved(unit: nn.Module) -> Iterator[_Storages]:
    """Counts what autograd saves inside, without parameters and buffers."""
    found = _Storages(itertools.chain(unit.parameters(), unit.buffers()))

    def pack(tensor: Tensor) -> Tensor:
        found.add(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


@contextmanager
def _work_for_weights(unit: nn.Module) -> Iterator[_Storages]:
    """Counts what W needs of the layers that are called inside: of each with a trained weight its input and the gradient of its output."""
    found = _Storages()

    def count(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        for tensor in pytree.tree_leaves((args, output)):
            if isinstance(tensor, Tensor):
                found.add(tensor)

    own = [part for part in unit.modules() if any(p.requires_grad and p.dim() > 1 for p in part.parameters(recurse=False))]
    handles = [part.register_forward_hook(count) for part in own]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _on_meta(unit: nn.Module) -> nn.Module:
    """A copy of `unit` whose parameters and buffers take no memory, and train as its own do."""
    memo: dict[int, Any] = {id(p): nn.Parameter(_meta(p.detach()), requires_grad=p.requires_grad) for p in unit.parameters()}
    memo |= {id(buffer): _meta(buffer) for buffer in unit.buffers()}
    return copy.deepcopy(unit, memo)


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta")


def _flowing(leaf: Any) -> Any:
    """A floating-point argument that has a gradient, as it comes from a unit before; anything else as it is."""
    is_flowing = isinstance(leaf, Tensor) and leaf.is_floating_point()
    return leaf.detach().requires_grad_() if is_flowing else leaf


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _kind(leaf: Any) -> Any:
    return kind_of(leaf, lambda tensor: (tensor.shape, tensor.dtype, tensor.requires_grad))
