"""A stage by its graph: the module is traced once per kind of input, and B and W are parts of its backward graph.

AOTAutograd traces module and backward pass into one graph and keeps what surrounds it in order: buffers that change, outputs
that are views, random numbers. Its backward is ours: it runs B, and leaves W.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import aot_function
from torch.autograd.function import BackwardCFunction
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.graph import CodeGen
from torch.nn.modules import module as torch_module
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from zerobubble.errors import InputError
from zerobubble.runtime.measure.memory_meter import Held, Meter
from zerobubble.runtime.split.autocast import Autocast, autocast_of, outside_of_autocast, within
from zerobubble.runtime.split.backward_graph import BackwardSplit, split_backward
from zerobubble.runtime.split.capture import Captured, Part, Slots
from zerobubble.runtime.split.eligibility import accumulator_is_kept, is_watched
from zerobubble.runtime.split.fx_nodes import inputs_of, is_cotangent, names_made_of, num_results
from zerobubble.runtime.split.guard import Guard, global_state
from zerobubble.runtime.split.joint_graph import ForwardNodes, forward_and_backward
from zerobubble.runtime.split.missing_cotangents import without_cotangents
from zerobubble.runtime.split.python_state import State, random_state, read_state
from zerobubble.runtime.split.recompute import recording_checkpoints
from zerobubble.runtime.split.report import SplitReport
from zerobubble.runtime.split.splitter import arguments_of, go_back
from zerobubble.runtime.split.traceable import described, is_traceable, kind_of, shared_memory
from zerobubble.runtime.values.gradients import Gradients
from zerobubble.runtime.values.payload import Cotangents, Structure, Tensors, flatten_pytree, opaque_types_in, unflatten_pytree
from zerobubble.runtime.values.skips import refusing


class _TracedError(Exception):
    """The graphs are there; nothing was computed."""


class _Work(NamedTuple):
    """What B left for one W: the graph to run and the tensors it reads, with their versions and their shares in the meter."""

    weight: Part
    parameters: list[nn.Parameter]
    kept: list[Tensor]
    versions: list[int]
    counted: list[Held]

    def run(self, gradients: Gradients) -> None:
        """Add to `gradients`. Raises `InputError` when a tensor that W reads was changed in place after B."""
        for tensor, version in zip(self.kept, self.versions, strict=True):
            if tensor._version != version:
                raise InputError(
                    f"a tensor of shape {tuple(tensor.shape)} that a weight gradient needs was changed in place between B and W; "
                    "give the layer a copy (x.clone()), or choose a schedule that does not split this stage"
                )
        is_fresh = any(gradients.of(parameter) is None for parameter in self.parameters)
        shared = {tensor.untyped_storage().data_ptr() for tensor in self.kept} if is_fresh else set()
        found = self.weight(self.kept)
        if is_fresh and isinstance(self.weight, Captured):
            shared |= {gradient.untyped_storage().data_ptr() for gradient in found}
        for parameter, gradient in zip(self.parameters, found, strict=True):
            is_first = gradients.of(parameter) is None
            gradients.add(parameter, _taken(parameter, gradient, shared) if is_first else gradient)
        self.counted.clear()


def _taken(parameter: nn.Parameter, gradient: Tensor, shared: set[int]) -> Tensor:
    """A first `.grad`: the gradient itself, or a copy where its storage is among those `shared` or its strides are others."""
    storage = gradient.untyped_storage().data_ptr()
    is_own = storage not in shared and gradient.stride() == parameter.stride()
    shared.add(storage)
    return gradient if is_own else torch.empty_like(parameter).copy_(gradient)


class GraphSplitter:
    """Runs the passes of stage `index` by its traced graph; with `compiled`, each part is compiled by inductor.

    The first forward of inputs of new shapes, strides or types traces the module, and so does one in another mode, under another
    autocast, or with other parameters frozen. On a stage whose inputs have no gradient B still does the chain back to the first
    parameters, so that B and W weigh as on the other stages. `trace` is that of the last forward, `traces` are all that are kept.

    Raises `InputError` for what a graph cannot honour: hooks, compiled parts, modules that cannot be traced or that change
    themselves in a forward, and no compiler where one is needed. The message names the stage and the remedy.
    """

    splits = True

    def __init__(self, module: nn.Module, index: int, gradients: Gradients, *, compiled: bool = False, cuda_graphs: bool = False) -> None:
        self.module = module
        self.index = index
        self.parameters = tuple(module.parameters())
        self.meter: Meter | None = None
        self.slots = Slots() if cuda_graphs else None
        self.way = "compiled" if compiled else "graph"
        self.owned: tuple[Tensor, ...] = ()
        self.trace: _Trace | None = None
        self.traces: dict[Any, _Trace] = {}
        self._gradients = gradients
        self._state: Any = None
        self._left: _Work | None = None
        self._works: dict[int, _Work] = {}
        self._guard = Guard(module, self._forget_traces, name=f"stage {index}")
        self._hooked: list[str] = []
        self._find_hooks()
        self.refuse_hooks()
        if compiled:
            self._require_compiler()

    def begin(self, meter: Meter | None) -> None:
        self.parameters = tuple(self.module.parameters())
        self.meter = meter
        self._state = None
        self._guard.begin()
        self._find_hooks()  # now, for the forwards of other stages may hold the accumulators of parameters that stages share

    def stepping(self) -> AbstractContextManager[object]:
        return nullcontext()

    def forward(self, microbatch: int, inputs: Tensors) -> Callable[[], Any]:
        if self._state is None:
            self._look()
        self._enter(microbatch)
        trace, tensors = self._find_trace(inputs)
        return partial(trace.run, tensors)

    def backward(self, microbatch: int, edges: list[Any], gradients: Cotangents) -> None:
        self._enter(microbatch)
        go_back(edges, gradients)
        work, self._left = self._left, None
        if work is not None:
            self._works[microbatch] = work

    def weight(self, microbatch: int) -> None:
        self._enter(microbatch)
        work = self._works.pop(microbatch, None)
        if work is not None:
            with torch.no_grad():
                work.run(self._gradients)
        if self.slots is not None:
            self.slots.leave(microbatch)

    def _enter(self, microbatch: int) -> None:
        if self.slots is not None:
            self.slots.enter(microbatch)

    def held(self, microbatch: int | None = None) -> Iterable[Tensor]:
        works = [work for number, work in self._works.items() if microbatch in (None, number)]
        return [tensor for work in works for tensor in work.kept]

    def clear(self) -> None:
        self._works.clear()
        self._left = None
        if self.slots is not None:
            self.slots.clear()

    def count(self) -> None:
        """The graph says how much W does; there is nothing to count."""

    def report(self) -> SplitReport:
        """The split of the last trace; the share is None before the first forward, and where no product gives a weight gradient."""
        split = None if self.trace is None else self.trace.split
        if split is None:
            return SplitReport(self.index, self.way, None, ())
        share = split.flops_in_w / split.weight_flops if split.weight_flops else None
        names = [name for name, _ in self.module.named_parameters()]
        at_once = tuple(f"{names[i]}: {why}" for i, why in split.reasons.items())
        return SplitReport(self.index, self.way, share, at_once)

    def leave(self, work: _Work) -> None:
        """Called by the backward of a trace: what this B leaves."""
        self._left = work

    def _find_trace(self, inputs: Tensors) -> tuple[_Trace, list[Tensor]]:
        """The trace for these inputs, and the tensors that it takes."""
        tensors: list[Tensor] = []
        structure = flatten_pytree(arguments_of(inputs), tensors, opaque=True)
        autocast = autocast_of(tensors[0].device.type if tensors else "cpu")
        try:
            number = self._guard.number()
        except InputError as error:
            raise self.refuse(str(error)) from error
        kinds = tuple([kind_of(tensor) for tensor in tensors])
        key = (number, structure, kinds, shared_memory(tensors), autocast, global_state(), self._state)
        trace = self.traces.get(key)
        if trace is None:
            trace = self.traces[key] = _Trace(self, structure, tensors, autocast)
        self.trace = trace
        return trace, tensors

    def _forget_traces(self, number: int) -> None:
        """Drop the traces made in a state of Python."""
        self.traces = {key: trace for key, trace in self.traces.items() if key[0] != number}

    def _look(self) -> None:
        """At the first forward of a step: what the module is now, which the passes of a step leave as it is."""
        self.refuse_hooks()
        named = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        self.owned = tuple(named.values())
        kinds = tuple([(name, x.shape, x.stride(), x.dtype, x.requires_grad) for name, x in named.items()])
        self._state = kinds

    def refuse(self, reason: str, cause: Exception | None = None) -> InputError:
        """What to raise when this stage cannot be cut."""
        error = InputError(
            f"stage {self.index} cannot be split by its graph: {reason}; "
            f'give split={{{self.index}: "deferred"}}, or split={{{self.index}: "whole"}} to leave it whole'
        )
        error.__cause__ = cause
        return error

    def _find_hooks(self) -> None:
        """Find the parameters that have hooks, as long as no forward holds the nodes that add to their gradients."""
        self._hooked = [
            name
            for name, parameter in self.module.named_parameters()
            if is_watched(parameter) or (parameter.requires_grad and accumulator_is_kept(parameter))
        ]

    def refuse_hooks(self) -> None:
        """Raise for what a traced graph would run past: hooks of parameters and modules, and blocks that are compiled already."""
        if any(getattr(torch_module, f"_global_{kind}_hooks") for kind in ("forward", "forward_pre", "backward", "backward_pre")):
            raise self.refuse("there is a hook on all modules, which would run while tracing alone")
        for name in self._hooked:
            raise self.refuse(f"parameter {name} has a hook, or something made of it before the step is kept; a graph cannot honour hooks")
        for name, part in self.module.named_modules():
            if isinstance(part, torch._dynamo.OptimizedModule) or part._compiled_call_impl is not None:
                raise self.refuse(f"module {name or type(part).__name__} is compiled already, and a graph is traced from plain modules")
            kinds = (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks)
            if any(kinds):
                raise self.refuse(f"module {name or type(part).__name__} has a hook, which would run while tracing alone")

    def _require_compiler(self) -> None:
        devices = {tensor.device.type for tensor in (*self.module.parameters(), *self.module.buffers())}
        if devices - {"cuda"}:
            try:
                from torch._inductor.cpp_builder import get_cpp_compiler

                get_cpp_compiler()
            except Exception as error:
                raise InputError(
                    f'stage {self.index} cannot be compiled: there is no C++ compiler; install g++, or give split={{{self.index}: "graph"}}'
                ) from error


class _Trace:
    """A stage's graphs for one kind of input: `structure` is how the `inputs` lie in its arguments.

    Only the module's forward is traced under `autocast`, the one its caller has. The backward is traced and both run outside of autocast:
    the graph of the forward holds its casts, and what it does in full precision must stay so.
    """

    def __init__(self, stage: GraphSplitter, structure: Structure, inputs: Sequence[Tensor], autocast: Autocast | None) -> None:
        self._stage = stage
        self._structure = structure
        self._autocast = autocast
        self._is_ready = False
        self._traced = ForwardNodes()
        self._made_of_weights: set[str] = set()
        self._num_outputs = 0
        self._spec: TreeSpec
        self._leaves: list[tuple[Any] | None] = []
        self.split: BackwardSplit | None = None
        module = stage.module
        for what, tensors in (("one of its inputs", inputs), ("a parameter or buffer of it", stage.owned)):
            for tensor in tensors:
                if not is_traceable(tensor):
                    raise stage.refuse(f"{what} is a {described(tensor)}, and a graph takes plain tensors")
        foreign = next((kind.__name__ for kind in opaque_types_in(structure)), None)
        if foreign is not None:
            raise stage.refuse(f"it is given a {foreign}, and a graph takes tensors and constants")
        self._function = aot_function(
            self._forward,
            fw_compiler=self._compile_forward,  # type: ignore[arg-type]
            bw_compiler=self._compile_backward,  # type: ignore[arg-type]
            partition_fn=self._partition,
            num_params_buffers=len(stage.owned),
        )
        try:
            state = read_state(module)
        except InputError as error:
            raise stage.refuse(str(error)) from error
        numbers = random_state()
        try:
            with refusing("a graph does not repeat it"), outside_of_autocast():
                self._function(*stage.owned, *inputs)
        except _TracedError:
            self._is_ready = True
        except InputError as error:
            state.restore()
            raise stage.refuse(str(error)) from error
        except Exception as error:
            self._refuse_changes(state)
            raise stage.refuse(_why_untraceable(error), error) from error
        self._refuse_changes(state)
        if random_state() != numbers:
            raise stage.refuse("its forward draws from the random numbers of Python or numpy, which a graph does not repeat (use torch's)")

    def _refuse_changes(self, before: State) -> None:
        """Raise where tracing changed the Python state, which is put back."""
        changed = before.changed_to(read_state(self._stage.module))
        before.restore()
        if changed is not None:
            raise self._stage.refuse(f"its forward changes {changed}, which a graph does not repeat")

    def run(self, inputs: Sequence[Tensor]) -> Any:
        with outside_of_autocast():
            outputs = self._function(*self._stage.owned, *inputs)
        _pass_none_on(outputs)
        results = iter(outputs)
        return tree_unflatten([next(results) if constant is None else constant[0] for constant in self._leaves], self._spec)

    def _forward(self, *tensors: Any) -> Any:
        owned = dict(zip(self._stage.owned, tensors, strict=False))
        positional, named = unflatten_pytree(self._structure, iter(tensors[len(owned) :]))
        with _in_place_of(owned, self._stage.module):
            with recording_checkpoints(tensors) as checkpoint_of, within(self._autocast):
                output = self._stage.module(*positional, **named)
            given = set(owned.values())
            for name, buffer in self._stage.module.named_buffers():
                if buffer not in given:
                    raise InputError(f"its forward puts a new tensor in buffer {name} (change it in place)")
        mode = get_proxy_mode()
        if mode is not None:
            self._traced = ForwardNodes({node.name for node in mode.tracer.graph.nodes}, checkpoint_of)
        leaves, self._spec = tree_flatten(output)
        self._leaves = [None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves]
        return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))

    def _partition(self, joint: fx.GraphModule, _: Any, *, num_fwd_outputs: int, **__: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        for node in joint.graph.find_nodes(op="get_attr"):
            constant = getattr(joint, str(node.target), None)
            if isinstance(constant, Tensor) and constant.requires_grad:
                raise InputError("it uses a tensor with gradient that is neither a parameter nor an input")
        if joint.graph.find_nodes(op="call_function", target=torch.ops.aten.mkldnn_rnn_layer.default):
            raise InputError("its recurrent layer runs in oneDNN, which keeps nothing to go back from in a graph")
        self._num_outputs = num_fwd_outputs
        forward, backward = forward_and_backward(joint, num_fwd_outputs, self._traced, draw_again=self._stage.way == "graph")
        primals = [node for node in inputs_of(joint) if not is_cotangent(node)]
        if num_results(backward) != len(primals):
            raise InputError("its inputs are views of each other")
        parameters = {node.name for node in primals[: len(self._stage.parameters)]}
        self._made_of_weights = names_made_of(backward, names_made_of(forward, parameters))
        return forward, backward

    def _compile_forward(self, graph: fx.GraphModule, examples: Sequence[Any]) -> Part:
        part = self._compile(graph, examples, self._num_outputs)

        def forward(tensors: list[Any]) -> Sequence[Any]:
            if not self._is_ready:
                raise _TracedError
            return part(tensors)

        forward._boxed_call = True  # type: ignore[attr-defined]
        return forward

    def _compile_backward(self, graph: fx.GraphModule, examples: Sequence[Any]) -> Part:
        cotangents = [i for i, node in enumerate(inputs_of(graph)) if is_cotangent(node)]
        self.split, run_all = self._halve(graph, examples)
        with_some: dict[tuple[int, ...], Part] = {}

        def backward(tensors: list[Any]) -> Sequence[Any]:
            missing = tuple([i for i in cotangents if tensors[i] is None])
            if not missing:
                return run_all(tensors)
            if missing not in with_some:
                with_some[missing] = self._halve_without(missing, graph, examples)
            return with_some[missing](tensors)

        backward._boxed_call = True  # type: ignore[attr-defined]
        return backward

    def _halve_without(self, missing: tuple[int, ...], graph: fx.GraphModule, examples: Sequence[Any]) -> Part:
        """The backward pass where these cotangents are None."""
        left, taken = without_cotangents(graph, missing)
        _, run = self._halve(left, [examples[i] for i in taken])

        def backward(tensors: list[Any]) -> Sequence[Any]:
            given = [tensors[i] for i in taken]
            tensors.clear()
            return run(given)

        return backward

    def _halve(self, graph: fx.GraphModule, examples: Sequence[Any]) -> tuple[BackwardSplit, Part]:
        """A cut of a backward graph, and the call that runs B and leaves W to the stage."""
        parts = split_backward(
            graph, len(self._stage.parameters), {f"primals_{i + 1}" for i in range(len(self._stage.owned))}, self._made_of_weights
        )
        stage, count = self._stage, num_results(graph)
        b = self._compile(parts.b, examples, count)
        w = self._compile(parts.w, [node.meta["val"] for node in inputs_of(parts.w)], 0)

        def backward(tensors: list[Any]) -> Sequence[Any]:
            if isinstance(b, Captured):
                tensors[:] = b.settled(tensors)
            kept = [tensors[i].detach() for i in parts.kept_inputs]  # an input of the stage would keep its gradient
            results = b(tensors)
            kept += results[count:]
            if parts.waiting:
                late = [stage.parameters[i] for i in parts.waiting]
                counted = [stage.meter.hold(tensor) for tensor in kept] if stage.meter is not None else []
                stage.leave(_Work(w, late, kept, [tensor._version for tensor in kept], counted))
            return results[:count]

        return parts, backward

    def _compile(self, graph: fx.GraphModule, examples: Sequence[Any], leaving: int) -> Part:
        """What runs a part of the graph, the first `leaving` of whose results leave the stage."""
        if self._stage.way == "compiled":
            part = _inductor(graph, examples)
        else:
            graph.graph.set_codegen(_Boxed())
            graph.recompile()
            part = graph.forward
        stage = self._stage
        return part if stage.slots is None else Captured(part, stage.slots, leaving, lambda: stage.owned)


def _inductor(graph: fx.GraphModule, examples: Sequence[Any]) -> Part:
    from torch._inductor import compile as compile_graph

    compiled = compile_graph(graph, list(examples), options={"fallback_random": True})  # the random numbers of eager mode
    return lambda tensors: compiled(*tensors)


class _Boxed(CodeGen):
    """Code that takes its arguments out of one list, so that each tensor can go after its last use."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **_: Any) -> str:
        names = [name.split(":")[0].split("=")[0].strip() for name in free_vars if name != "self"]
        taken = f"\n    {', '.join(names)}, = taken\n    taken.clear()" if names else ""
        return f"def {self._func_name}(self, taken){maybe_return_annotation}:{taken}"


def _pass_none_on(outputs: Iterable[Tensor]) -> None:
    """Let the backward of the traced function that gave `outputs`, some as views, see None where no gradient comes back."""
    for y in outputs:
        node: Any = y.grad_fn
        while node is not None and not isinstance(node, BackwardCFunction):
            node = node.next_functions[0][0] if node.next_functions else None
        if node is not None:
            node.set_materialize_grads(False)
            return


def _why_untraceable(error: Exception) -> str:
    if "convert all Tensors to FakeTensors" in str(error):
        return "its forward reads a tensor that is neither an input nor a parameter or buffer (keep it with register_buffer)"
    line = (str(error).strip().splitlines() or [""])[0]
    return f"tracing raised {type(error).__name__}: {line}"


@contextmanager
def _in_place_of(owned: Mapping[Tensor, Tensor], module: nn.Module) -> Iterator[None]:
    """Inside, every place of `module` where one of the parameters and buffers `owned` lies holds the tensor it is mapped to.

    A tensor or a submodule may have several places. Recurrent layers list their weights again in attributes, which are put back too.
    """
    tables: list[dict[str, Any]] = [table for part in module.modules() for table in (part._parameters, part._buffers)]
    tables += [vars(part) for part in module.modules() if isinstance(part, nn.RNNBase)]
    before = [dict(table) for table in tables]
    for table in tables:
        table.update({name: owned[tensor] for name, tensor in table.items() if isinstance(tensor, Tensor) and tensor in owned})
    try:
        yield
    finally:
        for table, content in zip(tables, before, strict=True):
            table.clear()
            table.update(content)
