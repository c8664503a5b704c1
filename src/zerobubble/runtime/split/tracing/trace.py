"""Traces a module with AOTAutograd for one kind of input, and runs its graphs of F, B and W.

AOTAutograd traces the forward and its backward into one joint graph. Its runtime wrappers handle the rest at run time: mutated buffers,
outputs that are views, random numbers. It calls us back three times: to partition the joint graph, and to make a function from the forward
and from the backward graph. Our backward function runs B and defers W.

Three details need care. AOTAutograd traces at the first call of its function; the forward function then raises, so that this call computes
nothing. AOTAutograd would replace None gradients by zeros; that is switched off on its autograd node, so that B can skip outputs without a
gradient. Autocast is active only inside the module's forward: the graph contains the casts, and running them under autocast would cast a
second time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import aot_function
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.autograd.function import BackwardCFunction
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from zerobubble.errors import InputError
from zerobubble.runtime.device import Autocast
from zerobubble.runtime.split.autocast import outside_of_autocast, within
from zerobubble.runtime.split.compiled.capture import Part
from zerobubble.runtime.split.compiled.part import PartMaker
from zerobubble.runtime.split.graphs.backward_graph import BackwardSplit
from zerobubble.runtime.split.graphs.fx_nodes import (
    extract,
    inputs_of,
    is_cotangent,
    is_random,
    names_derived_from,
    num_results,
    results_of,
)
from zerobubble.runtime.split.graphs.sized_graph import SizedGraph
from zerobubble.runtime.split.graphs.symbolic_sizes import SYMBOLIC, NotGeneralError, Values, take_out_sizes, with_numbers
from zerobubble.runtime.split.python_state.state import State, read_state
from zerobubble.runtime.split.tracing.backward_pass import BackwardPass, DeferWork, holding_values
from zerobubble.runtime.split.tracing.grouped_products import TraceableGroupedProducts
from zerobubble.runtime.split.tracing.joint_graph import ForwardNodes, forward_and_backward
from zerobubble.runtime.split.tracing.module_tensors import TensorsOfModule, replacing_tensors
from zerobubble.runtime.split.tracing.recompute import recording_checkpoints
from zerobubble.runtime.split.tracing.symbols import Dim, Symbols, sizes_of
from zerobubble.runtime.split.tracing.traceable import refuse_recurrent_dropout, refuse_untraceable
from zerobubble.runtime.split.tracing.value_guard import ValueGuard, ValueMode
from zerobubble.runtime.values.added_losses import add_loss, collecting_losses
from zerobubble.runtime.values.payload import Structure, flatten_pytree, opaque_types_in, unflatten_pytree


class _TracedError(Exception):
    """Raised in the first call of a traced function, when its graphs exist, so that it computes nothing."""


class Trace:
    """Traces `module` for `inputs`, arranged in its arguments as in `structure`. `split` describes its backward pass.

    If the forward branches on values, the trace follows the branches of `inputs`; `values` checks whether it is valid for others.

    Only the module's forward is traced under `autocast`, the context of its caller. The backward is traced outside of autocast, and both
    run outside of it: the forward graph contains its casts, and operations in full precision must stay so.

    `make_part` creates functions from graphs. Every B calls `defer_work` with the work for its W.

    With `dims`, the sizes of these dimensions of inputs are symbols, and the trace is valid for all sizes that satisfy the guards of
    `symbols`. Raises `NotGeneralError` if no such trace exists. `sized` is the joint graph of a trace without symbols.

    Raises `InputError` with the reason if the module cannot be traced, after restoring the module's Python state.
    """

    def __init__(
        self,
        module: nn.Module,
        owned: TensorsOfModule,
        structure: Structure,
        inputs: Sequence[Tensor],
        autocast: Autocast | None,
        make_part: PartMaker,
        defer_work: DeferWork,
        dims: Collection[Dim] = (),
    ) -> None:
        refuse_untraceable(structure, inputs, owned.tensors)
        refuse_recurrent_dropout(module)
        self._module = module
        self._owned = owned.tensors
        self._given = (*owned.tensors, *inputs)
        self._owned_counts = owned.counts
        self._places = owned.places
        self._structure = structure
        self._autocast = autocast
        self._make_part = make_part
        self._defer_work = defer_work
        self.values = ValueGuard()
        self.symbols = Symbols(owned.tensors, inputs, dims) if dims else None
        self.sized: SizedGraph | None = None
        self._joint: fx.GraphModule | None = None
        self._backward_graph: fx.GraphModule | None = None
        self._values_now: Values = ()
        self._is_ready = False
        self._forward_nodes = ForwardNodes()
        self._weight_only: set[str] = set()
        self._backward: BackwardPass | None = None
        self._num_outputs = 0
        self._output_spec: TreeSpec
        self._leaves: Structure = None
        self._added: tuple[str, ...] = ()
        self._function = aot_function(
            self._forward,
            fw_compiler=self._make_forward,  # type: ignore[arg-type]
            bw_compiler=self._make_backward,  # type: ignore[arg-type]
            partition_fn=self._divide,
            num_params_buffers=owned.counts.tensors,
        )
        self._trace(inputs)
        self._owned = self._given = self._places = ()  # a trace must not keep replaced parameters alive

    @property
    def split(self) -> BackwardSplit | None:
        """The split into B and W, None if nothing has a gradient."""
        return None if self._backward is None else self._backward.split

    def run(self, tensors: Sequence[Tensor], inputs: Sequence[Tensor]) -> Any:
        """Returns the module's output for `inputs`, with `tensors` as its parameters and buffers."""
        self._values_now = self.values_for(inputs)
        with outside_of_autocast():
            outputs = self._function(*tensors, *inputs)
        _keep_none_gradients(outputs)
        results = iter(outputs)
        for name in self._added:
            add_loss(name, next(results))
        return tree_unflatten(unflatten_pytree(self._leaves, results), self._output_spec)

    @property
    def pinned(self) -> frozenset[Dim]:
        """The requested symbolic dimensions that the forward converted to numbers."""
        return frozenset() if self.symbols is None else self.symbols.pinned

    def holds_for_sizes(self, sizes: Sequence[int]) -> bool:
        """Returns whether a symbolic trace is valid for inputs of these sizes."""
        return self.symbols is not None and self.symbols.hold_for(sizes)

    def holds_for_numbers(self, owned: Sequence[Tensor], inputs: Sequence[Tensor]) -> bool:
        """Returns whether the module's tensors `owned` and these `inputs` lead to the branches of the trace."""
        return not self.values.is_needed or self.values.holds_for(owned, inputs, self.values_for(inputs))

    def values_for(self, inputs: Sequence[Tensor]) -> Values:
        """Returns the values of the symbols for `inputs`."""
        return () if self.symbols is None else self.symbols.values_for(sizes_of(inputs))

    def is_general_of(self, other: Trace, sizes: Sequence[int]) -> bool:
        """Returns whether this trace, for inputs of these `sizes`, has the same graph as `other`, which was traced without symbols."""
        if self.symbols is None or self._joint is None or other.sized is None:
            return False
        return SizedGraph.from_graph(with_numbers(self._joint, self.symbols.values_for(sizes)), ()) == other.sized

    def _trace(self, inputs: Sequence[Tensor]) -> None:
        before = read_state(self._module)
        try:
            with outside_of_autocast():
                self._function(*(self.symbols.tensors if self.symbols is not None else (*self._owned, *inputs)))
        except _TracedError:
            self._is_ready = True
        except NotGeneralError:
            before.restore()
            raise
        except InputError as error:
            before.restore()
            raise InputError("{where}{reason}", where=self._where(error), reason=str(error)) from error
        except Exception as error:
            self._refuse_changes(before)
            raise InputError("{where}{reason}", where=self._where(error), reason=str(_why_untraceable(error))) from error
        self._refuse_changes(before)
        self._split_general()

    def _where(self, error: Exception) -> str:
        part = culprit(error, self._module)
        return f"module {part}: " if part else ""

    def _refuse_changes(self, before: State) -> None:
        """Restores the Python state, and raises if tracing has changed it."""
        changed = before.changed_to(read_state(self._module))
        before.restore()
        if changed is not None:
            raise InputError("its forward changes {changed}, which a graph does not repeat", changed=changed)

    def _forward(self, *tensors: Any) -> Any:
        """The module as a function of its parameters, buffers and inputs; AOTAutograd calls it with fake tensors."""
        num_owned = self._owned_counts.tensors
        positional, named = unflatten_pytree(self._structure, iter(tensors[num_owned:]))
        with replacing_tensors(self._module, self._places, dict(zip(self._owned, tensors[:num_owned], strict=True))):
            answering = ValueMode(tensors, self._given, self._positions_of_known(), self.symbols)
            recording = recording_checkpoints(tensors)
            with recording as checkpoint_of, answering, TraceableGroupedProducts(), within(self._autocast), collecting_losses() as added:
                output = self._module(*positional, **named)
            _refuse_new_buffers(self._module, tensors[:num_owned])
            _refuse_new_hooks(tensors[: self._owned_counts.parameters])
        self.values = answering.guard()
        mode = get_proxy_mode()
        if mode is not None:
            self._forward_nodes = ForwardNodes({node.name for node in mode.tracer.graph.nodes}, checkpoint_of)
        leaves, self._output_spec = tree_flatten(output)
        returned, self._leaves = flatten_pytree(leaves, opaque=True)  # a dataclass is a leaf to torch
        if any(issubclass(kind, SYMBOLIC) for kind in opaque_types_in(self._leaves)):
            raise NotGeneralError("it returns a size")
        self._added = tuple(added)
        # For a lazily conjugated output, the backward graph would view a conjugate as real, which torch rejects.
        results = [*added.values(), *returned]
        return tuple(result.resolve_conj().resolve_neg() for result in results)

    def _positions_of_known(self) -> list[int]:
        """Returns the positions of tensors whose values may be read before each forward: buffers and inputs that do not require grad."""
        first = self._owned_counts.parameters
        return [i for i, tensor in enumerate(self._given[first:], first) if not tensor.requires_grad]

    def _divide(self, joint: fx.GraphModule, _: Any, *, num_fwd_outputs: int, **__: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Partitions a joint graph into the forward and the backward graph."""
        _refuse_graph(joint)
        self._keep_for_proof(joint)
        self._num_outputs = num_fwd_outputs
        redraw = not self._make_part.compiles  # inductor cannot draw from a saved generator state
        forward, backward = forward_and_backward(joint, num_fwd_outputs, self._forward_nodes, redraw=redraw)
        primals = [node for node in inputs_of(joint) if not is_cotangent(node)]
        if num_results(backward) != len(primals) or self._are_merged(len(primals)):
            raise InputError("it changes a tensor in place that shares memory with another of its inputs, parameters or buffers")
        parameters = {node.name for node in primals[: self._owned_counts.parameters]}
        self._weight_only = names_derived_from(backward, names_derived_from(forward, parameters))
        if self.symbols is not None:
            self._backward_graph = with_numbers(backward)
            _pass_values_on(forward, backward, num_fwd_outputs)
        return forward, backward

    def _are_merged(self, num_inputs: int) -> bool:
        """Returns whether AOTAutograd merged inputs that share memory, which also reorders them.

        It also deduplicates a tensor that is passed twice, but this keeps the order.
        """
        distinct = set(self._given)
        if num_inputs == len(self._given):
            return False
        memories = {tensor.untyped_storage().data_ptr() for tensor in distinct}
        return num_inputs < len(distinct) or len(memories) < len(distinct)

    def _keep_for_proof(self, graph: fx.GraphModule) -> None:
        """Removes the sizes from a symbolic graph and keeps it; keeps what `is_general_of` compares of any other."""
        if self.symbols is None:
            self.sized = SizedGraph.from_graph(graph, ())
        else:
            take_out_sizes(graph, self.symbols.sizes)
            self._joint = with_numbers(graph)

    def _make_forward(self, graph: fx.GraphModule, examples: Sequence[Any]) -> Part:
        if self.sized is None and self._joint is None:  # nothing has a gradient, so there was no joint graph to partition
            self._keep_for_proof(graph)
        run = self._make_part(graph, examples, self._num_outputs) if self.symbols is None else self._general_forward(graph)

        def forward(tensors: list[Any]) -> Sequence[Any]:
            if not self._is_ready:
                raise _TracedError
            return run(tensors)

        return _boxed(forward)

    def _general_forward(self, graph: fx.GraphModule) -> Part:
        """Returns a function for a symbolic forward graph, which passes the values of the symbols on to the backward, if any."""
        assert self.symbols is not None
        if self._backward_graph is not None:
            results = results_of(graph)
            del results[self._num_outputs]
            graph = extract(graph, inputs_of(graph), results, [node for node in graph.graph.nodes if is_random(node)])
        part = self._make_part.general(graph)

        def run(tensors: list[Any]) -> Sequence[Any]:
            results = list(part.bind(self._values_now)(tensors))
            if self._backward_graph is not None:
                results.insert(self._num_outputs, holding_values(self._values_now))
            return results

        return run

    def _make_backward(self, graph: fx.GraphModule, examples: Sequence[Any]) -> Part:
        if self._backward is None:  # `_split_general` has created that of a symbolic trace
            self._backward = BackwardPass(graph, examples, self._owned_counts, self._weight_only, self._make_part, self._defer_work)
        return _boxed(self._backward.run)

    def _split_general(self) -> None:
        """Splits a symbolic backward graph and produces the guards, before the trace is used."""
        if self.symbols is None:
            return
        if self._backward_graph is not None:
            graph = self._backward_graph
            examples = [node.meta["val"] for node in inputs_of(graph)]
            self._backward = BackwardPass(
                graph, examples, self._owned_counts, self._weight_only, self._make_part, self._defer_work, has_symbols=True
            )
        self.symbols.finish()


def _refuse_new_buffers(module: nn.Module, given: Iterable[Tensor]) -> None:
    known = set(given)
    for name, buffer in module.named_buffers():
        if buffer not in known:
            raise InputError("its forward puts a new tensor in buffer {name} (change it in place)", name=name)


def _refuse_new_hooks(parameters: Iterable[Tensor]) -> None:
    """Raises `InputError` if the forward has registered a hook on one of its parameters, which would get gradients of microbatches."""
    if any(parameter._backward_hooks for parameter in parameters):
        raise InputError("its forward registers a hook on a parameter (register it once, before or between steps)")


def _pass_values_on(forward: fx.GraphModule, backward: fx.GraphModule, num_outputs: int) -> None:
    """Adds a first saved value to the forward graph for the backward graph: a tensor whose shape encodes the values of symbols."""
    example = FakeTensorMode().from_tensor(torch.empty(0, device="cpu"))
    output = next(iter(reversed(forward.graph.nodes)))
    with forward.graph.inserting_before(output):
        saved = forward.graph.call_function(torch.ops.aten.empty.memory_format, ([0],))
    results = list(output.args[0])
    output.args = ((*results[:num_outputs], saved, *results[num_outputs:]),)
    with backward.graph.inserting_before(next(iter(backward.graph.nodes))):
        values = backward.graph.placeholder("values_of_symbols")
    saved.meta["val"] = values.meta["val"] = example
    forward.recompile()
    backward.recompile()


def _boxed(run: Part) -> Part:
    """Marks a function for AOTAutograd as boxed: it takes its arguments in one list, which it may clear."""

    def boxed(tensors: list[Any]) -> Sequence[Any]:
        return run(tensors)

    boxed._boxed_call = True  # type: ignore[attr-defined]
    return boxed


def _refuse_graph(joint: fx.GraphModule) -> None:
    """Raises for operations with a backward that a graph cannot contain."""
    for node in joint.graph.find_nodes(op="get_attr"):
        constant = getattr(joint, str(node.target), None)
        if isinstance(constant, Tensor) and constant.requires_grad:
            raise InputError("it uses a tensor with gradient that is neither a parameter nor an input")
    if joint.graph.find_nodes(op="call_function", target=torch.ops.aten.mkldnn_rnn_layer.default):
        raise InputError("its recurrent layer runs in oneDNN, whose backward a graph cannot contain")


def _keep_none_gradients(outputs: Iterable[Tensor]) -> None:
    """Makes the backward of the traced function receive None instead of zeros for `outputs` without a gradient.

    Outputs may be views of the function's results, so its node may be several steps behind theirs.
    """
    for output in outputs:
        node: Any = output.grad_fn
        while node is not None and not isinstance(node, BackwardCFunction):
            node = node.next_functions[0][0] if node.next_functions else None
        if node is not None:
            node.set_materialize_grads(False)
            return


def _why_untraceable(error: Exception) -> str:
    if "convert all Tensors to FakeTensors" in str(error):
        return "its forward reads a tensor that is neither an input nor a parameter or buffer (keep it with register_buffer)"
    if "use_reentrant=True" in str(error):
        return "it calls torch.utils.checkpoint with use_reentrant=True, whose backward no graph contains (use use_reentrant=False)"
    first_line = (str(error).strip().splitlines() or [""])[0]
    other_experts = "model.set_experts_implementation('batched_mm') of Transformers chooses experts that can be traced"
    if "Expected inputs of BF16 type" in first_line:
        return f"torch traces such grouped products only in bfloat16, and these have another dtype ({other_experts})"
    if isinstance(error, DynamicOutputShapeException):
        first_line += f", the shape of whose result depends on numbers ({other_experts})"
    return f"tracing raised {type(error).__name__}: {first_line}"


def culprit(error: BaseException, module: nn.Module) -> str:
    """Returns the name of the innermost submodule of `module` in the traceback of `error`, empty for the module itself or none."""
    names = {part: name for name, part in module.named_modules()}
    innermost = ""
    traceback = error.__traceback__
    while traceback is not None:
        part = traceback.tb_frame.f_locals.get("self")
        if isinstance(part, nn.Module):
            innermost = names.get(part, innermost)
        traceback = traceback.tb_next
    return innermost
