"""One stage at work: forward, backward for the input, backward for the weights, microbatch by microbatch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from zerobubble.errors import InputError
from zerobubble.ir import Kind
from zerobubble.rules import used_stages
from zerobubble.runtime.measure.held_bytes import held_bytes
from zerobubble.runtime.measure.memory_meter import Meter
from zerobubble.runtime.measure.storages import addresses_of
from zerobubble.runtime.split.autocast import is_autocast_on, outside_of_autocast
from zerobubble.runtime.split.report import SplitReport
from zerobubble.runtime.split.splitter import Splitter, arguments_of
from zerobubble.runtime.split.ways import make_splitter
from zerobubble.runtime.stage.buffer_order import BufferOrder
from zerobubble.runtime.stage.chosen_calls import ChosenCalls, shadowing
from zerobubble.runtime.stage.first_run import FirstRun
from zerobubble.runtime.stage.head_part import HeadPart
from zerobubble.runtime.stage.levels import ComputedAgain
from zerobubble.runtime.stage.saved_tensors import KeptForAutograd
from zerobubble.runtime.stage.shards import shards_of
from zerobubble.runtime.values.gradients import IN_GRAD, Gradients
from zerobubble.runtime.values.hold import carry
from zerobubble.runtime.values.payload import Cotangents, Payload, Tensors, flatten_pytree
from zerobubble.runtime.values.shapes import shapes_of

_AVERAGING = {
    "torch.nn.parallel.distributed.DistributedDataParallel": "DistributedDataParallel",
    "torch.distributed._composable.replicate.DDP": "module under replicate()",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": "FullyShardedDataParallel",
}
"""Classes of modules that reduce gradients in the middle of a step, by name: most programs never import them."""


class GradientFlow(NamedTuple):
    """Whether a stage `trains` any parameter, and whether its outputs of the last backward pass required a gradient."""

    trains: bool
    goes_back: bool


class Stage:
    """Runs the passes of one stage of the model: that of `module`, whose backward pass `splitter` takes apart.

    `forward` takes and gives the tensors at the stage's boundaries, detached. `backward` takes a gradient, or None, for each output that
    requires one and gives one, or None, for each input that requires one. `weight` does what the splitter left to it. `gradients` says
    where weight gradients are summed. `lean_forward` and, later, `forward_again` are together what `forward` is: `computed_again`
    tells of what, where a schedule has R's of this stage.

    `forward` runs under the caller's autocast; `backward` and `weight` run outside of it, as torch asks, so that what was computed in full
    precision goes back in full precision.

    `head` is the part of a divided head that goes by this stage, if there is one.

    `shards` are what FSDP2 divides of the module, None where it divides nothing: whoever plays the passes gathers them before.
    `offloaded` has what keeps, for autograd, what the next forwards save that may go to the host, by microbatch.

    Raises `InputError` for a module that averages its gradients itself, in the middle of a step.
    """

    def __init__(self, module: nn.Module, index: int, splitter: Splitter, gradients: Gradients = IN_GRAD) -> None:
        averaging = [name for part in module.modules() for name in _kinds(part) if name in _AVERAGING]
        if averaging:
            raise InputError(
                f"stage {index} holds a {_AVERAGING[averaging[0]]}, which averages gradients before every microbatch has added to them; "
                "give the module without it, and average `.grad` over its group after each step"
            )
        self.module = module
        self.index = index
        self.splitter = splitter
        self.shards = shards_of(module, index)
        self.parameters = tuple(module.parameters())
        self.computed_again: ComputedAgain | None = None
        self._knows_gathered = False
        self._collected = self.parameters
        self._gradients = gradients
        self.meter: Meter | None = None
        self.offloaded: dict[int, KeptForAutograd] = {}
        self.head: HeadPart | None = None
        self._after_forward: dict[int, tuple[Tensors, list[Any]]] = {}
        self._before_weight: set[int] = set()
        self._first_runs: dict[int, FirstRun | ChosenCalls] = {}
        self._buffers: BufferOrder | None = None
        self._goes_back = True

    def begin(self, meter: Meter | None = None) -> None:
        """A step begins, whose bytes `meter` counts; its parameters are those that the module has now."""
        self.meter = meter
        self.parameters = tuple(self.module.parameters())
        self._collected = self.parameters
        self.splitter.begin(self.parameters, meter)
        self._buffers = BufferOrder(self.module, self.index)
        self._knows_gathered = False

    def use_gathered(self) -> None:
        """Wait for the gathered weights; the passes from here on compute with them, and their gradients belong to them."""
        assert self.shards is not None
        self.shards.wait()
        gathered = tuple(self.module.parameters())
        if self.meter is not None:
            self.meter.exclude(gathered)
        if not self._knows_gathered:
            self._knows_gathered = True
            before = set(self.parameters)
            self._collected = tuple(parameter for parameter in gathered if parameter in before)
            self.parameters = gathered
            self.splitter.begin(gathered, self.meter)

    def let_go(self) -> None:
        """Free the gathered weights."""
        assert self.shards is not None
        if self.meter is not None:
            self.meter.include(self.module.parameters())
        self.shards.let_go()

    def end_reductions(self) -> None:
        """FSDP2 has summed the gradients of a step over the ranks that hold the shards: have them where gradients are summed."""
        assert self.shards is not None
        self.shards.end_reductions()
        if self._gradients.dtype is not None:
            self._gradients.collect(self.shards.parameters)

    @property
    def flow(self) -> GradientFlow:
        """Whether gradients have flowed through it."""
        return GradientFlow(any(parameter.requires_grad for parameter in self.parameters), self._goes_back)

    @contextmanager
    def stepping(self, meter: Meter | None = None) -> Iterator[None]:
        """Around a step: inside, the module is as its passes need it."""
        self.begin(meter)
        with self.splitter.stepping(), shadowing(self._parts_again or {}):
            yield

    @property
    def _parts_again(self) -> Mapping[str, nn.Module] | None:
        return None if self.computed_again is None else self.computed_again.parts

    def forward(self, microbatch: int, inputs: Tensors, finish: Callable[[Any], Tensor] | None = None) -> Tensors:
        """F: run the module on `inputs`. `finish` (the loss, on the last stage) turns its output into the scalar to go back from."""
        outputs = self._forward(microbatch, inputs, finish)
        if self._buffers is not None:
            self._buffers.forward_ended(microbatch)
        return outputs

    def _forward(self, microbatch: int, inputs: Tensors, finish: Callable[[Any], Tensor] | None) -> Tensors:
        outputs = carry(partial(self._run, microbatch), inputs, finish, self.index, trains=True)
        edges = [_edge(y) for y in outputs if y.requires_grad]
        leaves = tuple(x for x in inputs if x.requires_grad)
        self._after_forward[microbatch] = (leaves, edges)
        return outputs

    def lean_forward(self, microbatch: int, inputs: Tensors, finish: Callable[[Any], Tensor] | None = None) -> Tensors:
        """F that keeps no more than its inputs, or those of what is computed again: `forward_again` makes what the backward pass needs."""
        if self._parts_again is not None:
            calls = self._first_runs[microbatch] = ChosenCalls(self.index, self.meter)
            with calls.recording():
                return self.forward(microbatch, inputs, finish)
        first = self._first_runs[microbatch] = FirstRun(self.module, self.index, inputs, finish, self.meter)

        def run(arguments: Tensors, finish: Callable[[Any], Tensor] | None) -> Tensors:
            return self._outputs_of(self.splitter.forward(microbatch, arguments), arguments, finish)

        with first.running():
            outputs = carry(run, inputs, finish, self.index, trains=True)
        if self._buffers is not None:
            self._buffers.forward_ended(microbatch)
        first.num_to_go_back_from = sum(y.requires_grad for y in outputs)
        apart = tuple(y.detach().requires_grad_(y.requires_grad) for y in outputs)
        return outputs.with_tensors(apart) if isinstance(outputs, Payload) else apart

    def forward_again(self, microbatch: int) -> None:
        """R: run the module, or what of it is computed again, once more on the inputs that `lean_forward` kept.

        Where nothing goes back, nothing is computed. Raises `InputError` where a second run gives something else to go back by than the
        first one.
        """
        first = self._first_runs.pop(microbatch)
        if isinstance(first, ChosenCalls):
            first.run_again()
            return
        if not first.num_to_go_back_from:
            self._after_forward[microbatch] = (tuple(x for x in first.inputs if x.requires_grad), [])
            return
        with first.again():
            self._forward(microbatch, first.inputs, first.finish)
        now = len(self._after_forward[microbatch][1])
        if now != first.num_to_go_back_from:
            raise InputError(
                f"stage {self.index} gave {first.num_to_go_back_from} outputs that wait for a gradient, and {now} when computed again: "
                "leave the stage out of the schedule's R passes"
            )

    def infer(self, inputs: Tensors, finish: Callable[[Any], Tensor] | None = None) -> Tensors:
        """F without a way back: nothing is kept. Call it under `torch.no_grad`."""
        return carry(self._run_plainly, inputs, finish, self.index, trains=False)

    def _run_plainly(self, inputs: Tensors, finish: Callable[[Any], Tensor] | None) -> Tensors:
        positional, named = arguments_of(inputs)
        return self._outputs_of(partial(self.module, *positional, **named), inputs, finish)

    def _run(self, microbatch: int, inputs: Tensors, finish: Callable[[Any], Tensor] | None) -> Tensors:
        """The outputs of a forward, or the loss that `finish` makes of them; what autograd saves is metered."""
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
        try:
            output = call()
        except (RuntimeError, TypeError) as error:
            error.add_note(_what_it_got(self.index, inputs, str(error)))
            raise
        return (finish(output),) if finish else as_tensors(output, self.index)

    def backward(self, microbatch: int, gradients: Cotangents) -> Cotangents:
        """B: `gradients` of the outputs that require one give those of the inputs. Weight gradients that do not wait for W are added.

        As on one device, an output whose gradient is None is not gone back from, and an input that nothing came back to has None.
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
            _set_apart(without_gradient, (*gradients, *outputs, *self.splitter.held(microbatch)))
        return outputs

    @property
    def ends_by_parameter(self) -> bool:
        """Whether gradients are complete one after another in the last W's of a step: those of shards are once FSDP2 has reduced them."""
        return self.splitter.ends_by_parameter and self.shards is None

    def begin_tail(self, microbatches: Sequence[int], complete: Callable[[Collection[nn.Parameter]], object]) -> None:
        """The W's of `microbatches` come next, the last of the step: as `Splitter.begin_tail` says, with gathered weights for shards."""
        if self.splitter.ends_by_parameter:
            self.splitter.begin_tail(microbatches, complete)

    def weight(self, microbatch: int) -> None:
        """W: add the weight gradients that B of this microbatch left."""
        self._before_weight.discard(microbatch)
        if is_autocast_on():
            with outside_of_autocast():
                self.splitter.weight(microbatch)
        else:
            self.splitter.weight(microbatch)

    def in_flight(self) -> tuple[int, int]:
        """The microbatches that wait for a backward pass, and the bytes held for them without parameters and buffers."""
        saved = self._after_forward.values()
        tensors = [tensor for leaves, _ in saved for tensor in leaves]
        tensors += [tensor for first in self._first_runs.values() for tensor in first.inputs]
        nodes = [edge.node for _, edges in saved for edge in edges]
        owned = (*self.parameters, *self.module.buffers())
        waiting = {*self._first_runs, *self._after_forward} | self._before_weight
        return len(waiting), held_bytes([*tensors, *self.splitter.held()], nodes, owned)

    def report(self) -> SplitReport:
        """How the backward pass comes apart, as far as it is known by now, and which passes compute anything."""
        report = self.splitter.report()
        if self.head is not None:  # its rows are no part of what is split
            own = tuple(line for line in report.at_once if line.partition(":")[0] not in self.head.names)
            report = replace(report, at_once=own)
        if self.computed_again is not None:
            report = replace(report, notes=(*report.notes, str(self.computed_again)))
        if self.flow.trains:
            return report
        return replace(report, share=None, at_once=(), passes="FB" if self._goes_back else "F")

    def clear(self) -> None:
        """Forget every microbatch in flight."""
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
    """Stage `index` split in the way named, in passes B and W or, without `has_weight_passes`, in BW; see `make_splitter`."""
    return Stage(module, index, make_splitter(way, module, index, has_weight_passes, gradients, cuda_graphs=cuda_graphs), gradients)


def _edge(y: Tensor) -> GradientEdge:
    """Where to go back from: for a node in Python, which lives no longer than its tensor, from a node of our own that keeps it."""
    node = y.grad_fn
    if node is None:
        return get_gradient_edge(y)
    if isinstance(node, torch._C._FunctionBase):
        node = y.view_as(y).grad_fn
        assert node is not None
        return GradientEdge(node, 0)
    return GradientEdge(node, y.output_nr)


def _kinds(module: nn.Module) -> list[str]:
    return [f"{kind.__module__}.{kind.__qualname__}" for kind in type(module).__mro__]


def _set_apart(parameters: Iterable[nn.Parameter], needed: Iterable[Tensor | None]) -> None:
    """Copy each `.grad` that autograd made a view of a tensor still `needed`: the next microbatch adds to it in place."""
    storages = addresses_of(tensor for tensor in needed if tensor is not None)
    for parameter in parameters:
        gradient = parameter.grad
        if type(gradient) is Tensor and gradient.layout is torch.strided and gradient.untyped_storage().data_ptr() in storages:
            parameter.grad = gradient.clone()


def _with_gradient(edges: list[Any], gradients: Cotangents) -> tuple[list[Any], Cotangents]:
    """The edges that a gradient came back to, and these gradients."""
    for gradient in gradients:
        if gradient is None:
            pairs = [(edge, g) for edge, g in zip(edges, gradients, strict=True) if g is not None]
            return [edge for edge, _ in pairs], tuple(g for _, g in pairs)
    return edges, gradients


def as_tensors(output: Any, index: int) -> Tensors:
    """A stage's output for the next stage, whose arguments it becomes: a tensor or a tuple as they are, a dict by its names.

    Raises `TypeError` naming the stage and the place for what is neither a tensor, a constant nor a pytree of these.
    """
    if isinstance(output, Tensor):
        return (output,)
    if isinstance(output, (tuple, list)) and all(isinstance(part, Tensor) for part in output):
        return tuple(output)
    if not isinstance(output, (tuple, list, dict)):
        got = type(output).__name__
        raise TypeError(f"stage {index} must return a tensor, or a tuple, list or dict of tensors for the next stage, got {got}")
    tensors: list[Tensor] = []
    structure = flatten_pytree(dict(output) if isinstance(output, dict) else output, tensors, f"the output of stage {index}")
    return Payload.of(tensors, structure)


def _what_it_got(index: int, inputs: Tensors, message: str) -> str:
    """What a stage that failed was given and by whom, and the remedy where it is known."""
    shapes = ", ".join(map(str, shapes_of(inputs))) or "no tensor"
    if isinstance(inputs, Payload):
        shapes = f"a {inputs.structure}: {shapes}"
    givers = [f"stage {stage}" for _, stage in used_stages(Kind.F, index, index + 1)]
    note = f"stage {index} was given {shapes} by {', '.join(givers) or 'the batch'}"
    if "a leaf Variable that requires grad" in message:
        note += "; a stage must not change its input in place: let it work on x.clone(), or use the operation that makes a new tensor"
    return note
