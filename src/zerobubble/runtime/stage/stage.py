"""Runs one stage: the passes F, B, W and R of each microbatch.

A stage detaches its inputs, so each microbatch has a separate autograd graph per stage. F keeps the graph's output edges and input leaves;
B runs autograd from these edges, and the gradients of the leaves are the messages to the previous stage. Outputs are handed to the
transport without a graph: an edge, not the tensor, keeps the graph alive.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from zerobubble.errors import InputError
from zerobubble.ir import Kind
from zerobubble.rules import used_stages
from zerobubble.runtime.device import note_of_devices, note_of_dtypes
from zerobubble.runtime.measure.memory_meter import Meter, addresses_of, held_bytes
from zerobubble.runtime.split.autocast import is_autocast_on, outside_of_autocast
from zerobubble.runtime.split.report import SplitReport
from zerobubble.runtime.split.splitter import Splitter, arguments_of
from zerobubble.runtime.split.stage_with_loss import stage_alone
from zerobubble.runtime.split.ways import make_splitter
from zerobubble.runtime.stage.buffer_order import BufferOrder
from zerobubble.runtime.stage.chosen_calls import ChosenCalls, shadowing
from zerobubble.runtime.stage.forward_state import FirstRun
from zerobubble.runtime.stage.forward_watch import ForwardWatch
from zerobubble.runtime.stage.head_part import HeadPart
from zerobubble.runtime.stage.levels import RecomputedParts
from zerobubble.runtime.stage.saved_tensors import KeptForAutograd
from zerobubble.runtime.stage.shards import shards_of
from zerobubble.runtime.values.buffers import changing_parameters
from zerobubble.runtime.values.far_gradients import KnowsOrigins, Origin, refuse_far_gradient
from zerobubble.runtime.values.gradients import IN_GRAD, Gradients
from zerobubble.runtime.values.hold import carry, here
from zerobubble.runtime.values.payload import Cotangents, Payload, Tensors, flatten_pytree, is_plain_dataclass, structure_of
from zerobubble.runtime.values.python_state import PythonState
from zerobubble.runtime.values.shapes import describe_tensors

_AVERAGING = {
    "torch.nn.parallel.distributed.DistributedDataParallel": "DistributedDataParallel",
    "torch.distributed._composable.replicate.DDP": "module under replicate()",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": "FullyShardedDataParallel",
}
"""Classes of modules that reduce gradients during a step. By name, because most programs never import them."""


class GradientFlow(NamedTuple):
    """Whether a stage `trains` any parameter, and whether its outputs in the last backward pass required grad."""

    trains: bool
    goes_back: bool


class Stage:
    """Runs the passes of one stage of the model, `module`, whose backward pass `splitter` splits.

    `forward` takes and returns the detached tensors at the stage's boundaries. `backward` takes a gradient or None for each output that
    requires grad, and returns one or None for each input that requires grad. `weight` computes the deferred weight gradients, which are
    summed in `gradients`. For stages with R passes, `checkpointed_forward` and a later `recompute` replace `forward`; `recomputed` defines
    what R recomputes.

    `forward` runs under the caller's autocast. `backward` and `weight` run outside of it, as torch recommends: the backward of an operation
    then has the precision of its forward.

    `head` is this stage's part of a divided head, if any; `loss_fn` is what `finish` calls on the last stage.

    `shards` are the FSDP2 units of the module, None without FSDP2; the executor gathers them before the passes. `offloaded` holds, by
    microbatch, the collectors of saved tensors for forwards that will be offloaded. `set_by_copy` has the attributes that forwards have
    set, None unless the stage has a copy on another route.

    Raises `InputError` for a module that averages its own gradients during a step.
    """

    def __init__(self, module: nn.Module, index: int, splitter: Splitter, gradients: Gradients = IN_GRAD) -> None:
        averaging = [name for part in module.modules() for name in _kinds(part) if name in _AVERAGING]
        if averaging:
            raise InputError(
                "stage {index} holds a {averaging}, which averages gradients before all microbatches have added to them; {remedy}",
                index=index,
                averaging=_AVERAGING[averaging[0]],
                remedy="give the module without it, a whole model as zb.split(model), and average `.grad` over its group after each step",
            )
        self.module = module
        self.index = index
        self.splitter = splitter
        self.shards = shards_of(module, index)
        self.parameters = tuple(module.parameters())
        self.recomputed: RecomputedParts | None = None
        self._has_gathered = False
        self._collected = self.parameters
        self._gradients = gradients
        self.meter: Meter | None = None
        self.offloaded: dict[int, KeptForAutograd] = {}
        self.head: HeadPart | None = None
        self._after_forward: dict[int, tuple[Tensors, list[Any]]] = {}
        self._before_weight: set[int] = set()
        self._first_runs: dict[int, FirstRun | ChosenCalls] = {}
        self._buffers: BufferOrder | None = None
        self.set_by_copy: set[tuple[str, str]] | None = None
        self._watch = ForwardWatch(module, index)
        self._goes_back = True
        self.loss_fn: object = None
        self._python_states: dict[nn.Module, PythonState] = {}

    def begin(self, meter: Meter | None = None) -> None:
        """Begins a step with the current parameters of the module; `meter` counts its bytes."""
        self.meter = meter
        self.parameters = tuple(self.module.parameters())
        self._collected = self.parameters
        self.splitter.begin(self.parameters, meter)
        self._buffers = BufferOrder(
            self.module,
            self.index,
            changing_parameters(list(self.module.modules())) if self.shards is None else (),
            self.set_by_copy,
        )
        self._watch.begin()
        self._has_gathered = False

    def use_gathered(self) -> None:
        """Waits for the gathered weights. The passes that follow compute with them, and add gradients to them."""
        assert self.shards is not None
        self.shards.wait()
        gathered = tuple(self.module.parameters())
        if self.meter is not None:
            self.meter.exclude(gathered)
        if not self._has_gathered:
            self._has_gathered = True
            before = set(self.parameters)
            self._collected = tuple(parameter for parameter in gathered if parameter in before)
            self.parameters = gathered
            self.splitter.begin(gathered, self.meter)

    def release(self) -> None:
        """Frees the gathered weights."""
        assert self.shards is not None
        if self.meter is not None:
            self.meter.include(self.module.parameters())
        self.shards.release()

    def end_reductions(self) -> None:
        """Moves the gradients that FSDP2 has reduced in a step to where gradients are summed."""
        assert self.shards is not None
        self.shards.end_reductions()
        if self._gradients.dtype is not None:
            self._gradients.collect(self.shards.parameters)

    @property
    def flow(self) -> GradientFlow:
        """Whether this stage trains, and whether gradients have flowed through it."""
        return GradientFlow(any(parameter.requires_grad for parameter in self.parameters), self._goes_back)

    @contextmanager
    def stepping(self, meter: Meter | None = None) -> Iterator[None]:
        """Context of a step: prepares the module for its passes."""
        self.begin(meter)
        with ExitStack() as stack:
            stack.enter_context(self.splitter.stepping())
            stack.enter_context(shadowing(self._recomputed_parts or {}, self._python_state_of))
            if self._watch.compares_attributes:
                assert self._buffers is not None
                stack.enter_context(self._buffers.watching())
            yield

    def _python_state_of(self, module: nn.Module) -> PythonState:
        """Returns the Python state of the module, or of a part of it, whose forwards R runs again. The first call finds its places."""
        if module not in self._python_states:
            self._python_states[module] = PythonState(module, self.loss_fn) if module is self.module else PythonState(module)
        return self._python_states[module]

    @property
    def _recomputed_parts(self) -> Mapping[str, nn.Module] | None:
        return None if self.recomputed is None else self.recomputed.parts

    def forward(self, microbatch: int, inputs: Tensors, finish: Callable[[Any], Tensor] | None = None) -> Tensors:
        """F: runs the module on `inputs`. `finish` (the loss, on the last stage) maps its output to the scalar for backward."""
        outputs = self._forward(microbatch, inputs, finish)
        if self._buffers is not None:
            self._buffers.forward_ended(microbatch)
        return outputs

    def _forward(self, microbatch: int, inputs: Tensors, finish: Callable[[Any], Tensor] | None) -> Tensors:
        with self._watch.forward(inputs, self._nodes_in_flight):
            outputs = carry(partial(self._run, microbatch), inputs, finish, self.index, trains=True)
        edges = [_edge(y) for y in outputs if y.requires_grad]
        leaves = tuple(x for x in inputs if x.requires_grad)
        self._after_forward[microbatch] = (leaves, edges)
        return outputs

    def _nodes_in_flight(self) -> list[Any]:
        """Returns the nodes from which the backward passes of all microbatches in flight begin."""
        return [edge.node for _, edges in self._after_forward.values() for edge in edges]

    def checkpointed_forward(self, microbatch: int, inputs: Tensors, finish: Callable[[Any], Tensor] | None = None) -> Tensors:
        """F that keeps only the inputs of what R recomputes; `recompute` then creates the tensors that the backward pass needs."""
        if self._recomputed_parts is not None:
            calls = self._first_runs[microbatch] = ChosenCalls(self.index, self.meter)
            with calls.recording():
                return self.forward(microbatch, inputs, finish)
        first = self._first_runs[microbatch] = FirstRun(
            self.module, self._python_state_of(self.module), self.index, inputs, finish, self.meter
        )

        def run(arguments: Tensors, finish: Callable[[Any], Tensor] | None) -> Tensors:
            return self._outputs_of(self.splitter.forward(microbatch, arguments), arguments, finish)

        with first.running(), self._watch.forward(inputs, self._nodes_in_flight):
            outputs = carry(run, inputs, finish, self.index, trains=True)
        if self._buffers is not None:
            self._buffers.forward_ended(microbatch)
        first.num_outputs_with_grad = sum(y.requires_grad for y in outputs)
        if not first.num_outputs_with_grad:  # no gradient reaches this stage
            self._first_runs.pop(microbatch)
            self._after_forward[microbatch] = (tuple(x for x in inputs if x.requires_grad), [])
        detached = tuple(y.detach().requires_grad_(y.requires_grad) for y in outputs)
        return outputs.with_tensors(detached) if isinstance(outputs, Payload) else detached

    def recompute(self, microbatch: int) -> None:
        """R: recomputes the module, or the selected part of it, from the inputs that `checkpointed_forward` kept.

        Does nothing if no output requires grad: the forward then kept no inputs. Raises `InputError` if the second run has another number
        of such outputs than the first.
        """
        first = self._first_runs.pop(microbatch, None)
        if first is None:
            assert microbatch in self._after_forward, "R follows the forward"
            return
        if isinstance(first, ChosenCalls):
            with self._watch.recomputing():
                first.recompute()
            return
        with first.restored(), self._watch.recomputing():
            self._forward(microbatch, first.inputs, first.finish)
        now = len(self._after_forward[microbatch][1])
        if now != first.num_outputs_with_grad:
            raise InputError(
                "stage {index} returned {expected} outputs that require grad, and {got} when recomputed",
                index=self.index,
                expected=first.num_outputs_with_grad,
                got=now,
                remedy="leave the stage out of the schedule's R passes",
            )

    def infer(self, inputs: Tensors, finish: Callable[[Any], Tensor] | None = None) -> Tensors:
        """F without a backward pass: keeps nothing. Call it under `torch.no_grad`."""
        return carry(self._run_plainly, inputs, finish, self.index, trains=False)

    def _run_plainly(self, inputs: Tensors, finish: Callable[[Any], Tensor] | None) -> Tensors:
        positional, named = arguments_of(inputs)
        return self._outputs_of(partial(self.module, *positional, **named), inputs, finish)

    def _run(self, microbatch: int, inputs: Tensors, finish: Callable[[Any], Tensor] | None) -> Tensors:
        """Returns the outputs of a forward, or the loss that `finish` computes from them, and meters the tensors that autograd saves."""
        call = self.splitter.forward(microbatch, inputs)
        saved = self.offloaded.pop(microbatch, None)
        if saved is not None:
            with saved.saving(self.meter):
                return self._outputs_of(call, inputs, finish)
        if self.meter is None:
            return self._outputs_of(call, inputs, finish)
        with self.meter.counting():
            return self._outputs_of(call, inputs, finish)

    def _outputs_of(self, call: Callable[[], Any], inputs: Tensors, finish: Callable[[Any], Tensor] | None) -> Tensors:
        here.hold.origins, here.hold.is_traced = partial(self._origins, inputs), self.splitter.is_traced
        try:
            output = call()
        except (RuntimeError, TypeError, IndexError) as error:
            refuse_far_gradient(error, f"stage {self.index}")
            error.add_note(_describe_inputs(self.index, inputs, str(error)) + note_of_dtypes(str(error), self.module))
            raise
        return (finish(output),) if finish else as_tensors(output, self.index)

    def _origins(self, inputs: Tensors) -> list[Origin]:
        """Returns the origins of the tensors that arrived, as far as the module knows them."""
        module = stage_alone(self.module)
        return module.origins(*arguments_of(inputs)) if isinstance(module, KnowsOrigins) else []

    def backward(self, microbatch: int, gradients: Cotangents) -> Cotangents:
        """B: returns the gradients of the inputs, from `gradients` of the outputs that require grad. Adds weight gradients that are not
        deferred.

        As on one device, an output with gradient None is skipped, and an input that no gradient reaches gets None.
        """
        leaves, edges = self._after_forward.pop(microbatch)
        self._goes_back = bool(edges)
        without_gradient = [parameter for parameter in self.parameters if parameter.grad is None]
        if edges:
            edges, gradients = _with_gradient(edges, gradients)
        if is_autocast_on():
            with outside_of_autocast():
                self.splitter.backward(microbatch, edges, gradients)
        else:
            self.splitter.backward(microbatch, edges, gradients)
        if self._buffers is not None:
            self._buffers.backward_ended(microbatch)
        if self.splitter.splits:
            self._before_weight.add(microbatch)
        outputs = tuple(x.grad for x in leaves)
        if self._gradients.dtype is not None:
            self._gradients.collect(self._collected)
        elif without_gradient:
            _copy_shared_gradients(without_gradient, (*gradients, *outputs, *self.splitter.held(microbatch)))
        return outputs

    @property
    def completes_by_parameter(self) -> bool:
        """Whether the last W's of a step complete gradients one after another. Those of shards wait for FSDP2's reduction."""
        return self.splitter.completes_by_parameter and self.shards is None

    def begin_tail(self, microbatches: Sequence[int], complete: Callable[[Collection[nn.Parameter]], object]) -> None:
        """Announces the last W's of the step, see `Splitter.begin_tail`; for shards, `complete` receives the gathered weights."""
        if self.splitter.completes_by_parameter:
            self.splitter.begin_tail(microbatches, complete)

    def weight(self, microbatch: int) -> None:
        """W: adds the weight gradients that B of this microbatch deferred."""
        self._before_weight.discard(microbatch)
        if is_autocast_on():
            with outside_of_autocast():
                self.splitter.weight(microbatch)
        else:
            self.splitter.weight(microbatch)

    def in_flight(self) -> tuple[int, int]:
        """Returns the number of microbatches in flight, and the bytes held for them, excluding parameters and buffers."""
        saved = self._after_forward.values()
        tensors = [tensor for leaves, _ in saved for tensor in leaves]
        tensors += [tensor for first in self._first_runs.values() for tensor in first.inputs]
        nodes = [edge.node for _, edges in saved for edge in edges]
        owned = (*self.parameters, *self.module.buffers())
        waiting = {*self._first_runs, *self._after_forward} | self._before_weight
        return len(waiting), held_bytes([*tensors, *self.splitter.held()], nodes, owned)

    def report(self) -> SplitReport:
        """Reports how the backward pass is split, as far as known, and which passes have work."""
        report = self.splitter.report()
        if self.head is not None:  # the rows of the head are not split
            report = replace(report, in_b=tuple(entry for entry in report.in_b if entry.parameter not in self.head.names))
        if self.recomputed is not None:
            report = replace(report, notes=(*report.notes, str(self.recomputed)))
        if self.flow.trains:
            return report
        return replace(report, share=None, in_b=(), passes="FB" if self._goes_back else "F")

    def clear(self) -> None:
        """Drops all microbatches in flight."""
        self._after_forward.clear()
        self._before_weight.clear()
        self._first_runs.clear()
        self.offloaded.clear()
        self.splitter.clear()


def make_stage(
    way: str,
    module: nn.Module,
    index: int,
    has_weight_passes: bool = True,
    gradients: Gradients = IN_GRAD,
    *,
    cuda_graphs: bool = False,
) -> Stage:
    """Creates stage `index`, split in the given way into B and W or, without `has_weight_passes`, run in BW; see `make_splitter`."""
    return Stage(module, index, make_splitter(way, module, index, has_weight_passes, gradients, cuda_graphs=cuda_graphs), gradients)


def _edge(y: Tensor) -> GradientEdge:
    """Returns the edge that backward starts from.

    A Python autograd node is freed with its tensor, and an edge does not keep it alive. Such a tensor gets a view, whose C++ node does. So
    does a tensor with hooks: those of `register_multi_grad_hook` do not run at the node from which backward starts.
    """
    node = y.grad_fn
    if node is None:
        return get_gradient_edge(y)
    if y._backward_hooks or isinstance(node, torch._C._FunctionBase):
        node = y.view_as(y).grad_fn
        assert node is not None
        return GradientEdge(node, 0)
    return GradientEdge(node, y.output_nr)


def _kinds(module: nn.Module) -> list[str]:
    return [f"{kind.__module__}.{kind.__qualname__}" for kind in type(module).__mro__]


def _copy_shared_gradients(parameters: Iterable[nn.Parameter], needed: Iterable[Tensor | None]) -> None:
    """Copies each `.grad` that shares memory with a tensor still `needed`: the next microbatch would overwrite that tensor in place."""
    storages = addresses_of(tensor for tensor in needed if tensor is not None)
    for parameter in parameters:
        gradient = parameter.grad
        if type(gradient) is Tensor and gradient.layout is torch.strided and gradient.untyped_storage().data_ptr() in storages:
            parameter.grad = gradient.clone()


def _with_gradient(edges: list[Any], gradients: Cotangents) -> tuple[list[Any], Cotangents]:
    """Returns the edges with a gradient, and these gradients."""
    for gradient in gradients:
        if gradient is None:
            pairs = [(edge, g) for edge, g in zip(edges, gradients, strict=True) if g is not None]
            return [edge for edge, _ in pairs], tuple(g for _, g in pairs)
    return edges, gradients


def as_tensors(output: Any, index: int) -> Tensors:
    """Converts a stage's output to the arguments of the next stage: a tensor, tuple or dataclass unchanged, a dict by its names.

    Raises `TypeError`, naming the stage and the place, for values other than tensors, constants and pytrees of these.
    """
    if isinstance(output, Tensor):
        return (output,)
    if isinstance(output, (tuple, list)) and all(isinstance(part, Tensor) for part in output):
        return tuple(output)
    if is_plain_dataclass(output):
        output = (output,)
    if not isinstance(output, (tuple, list, dict)):
        got = type(output).__name__
        raise TypeError(f"stage {index} must return a tensor, or a tuple, list, dict or dataclass of tensors for the next stage, got {got}")
    tensors, structure = flatten_pytree(dict(output) if isinstance(output, dict) else output, f"the output of stage {index}")
    return Payload.from_tensors(tensors, structure)


def _describe_inputs(index: int, inputs: Tensors, message: str) -> str:
    """Describes the inputs of a failed stage and their origin, and the remedy if known."""
    shapes = describe_tensors(inputs, structure_of(inputs))
    givers = [f"stage {stage}" for _, stage in used_stages(Kind.F, index, index + 1)]
    note = f"stage {index} was given {shapes} by {', '.join(givers) or 'the batch'}"
    if "a leaf Variable that requires grad" in message:
        note += "; a stage must not change its input in place: let it work on x.clone(), or use the operation that makes a new tensor"
    return note + note_of_devices(message, inputs)
