"""A module traced by AOTAutograd for one kind of input: its graphs of F, B and W, and how its outputs are put together.

AOTAutograd traces the forward and its backward pass into one joint graph, and keeps in order what surrounds them when they run: buffers
that change, outputs that are views, random numbers. It asks us to divide the joint graph and to make functions of the two graphs; our
backward runs B, and leaves W.
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
from zerobubble.runtime.split.autocast import Autocast, outside_of_autocast, within
from zerobubble.runtime.split.compiled.capture import Part
from zerobubble.runtime.split.compiled.part import PartMaker
from zerobubble.runtime.split.graphs.backward_graph import BackwardSplit
from zerobubble.runtime.split.graphs.fx_nodes import extract, inputs_of, is_cotangent, is_random, names_made_of, num_results, results_of
from zerobubble.runtime.split.graphs.sized_graph import SizedGraph
from zerobubble.runtime.split.graphs.symbolic_sizes import SYMBOLIC, NotGeneralError, Values, take_out_sizes, with_numbers
from zerobubble.runtime.split.python_state.state import State, random_state, read_state
from zerobubble.runtime.split.tracing.backward_pass import BackwardPass, LeaveWork, holding_values
from zerobubble.runtime.split.tracing.culprit import culprit
from zerobubble.runtime.split.tracing.grouped_products import TraceableGroupedProducts
from zerobubble.runtime.split.tracing.joint_graph import ForwardNodes, forward_and_backward
from zerobubble.runtime.split.tracing.module_tensors import TensorsOfModule, replacing_tensors
from zerobubble.runtime.split.tracing.recompute import recording_checkpoints
from zerobubble.runtime.split.tracing.symbols import Dim, Symbols, sizes_of
from zerobubble.runtime.split.tracing.traceable import refuse_recurrent_dropout, refuse_untraceable
from zerobubble.runtime.split.tracing.value_guard import AnsweringMode, ValueGuard
from zerobubble.runtime.values.added_losses import add_loss, collecting_losses
from zerobubble.runtime.values.payload import Structure, unflatten_pytree


class _TracedError(Exception):
    """Raised by the first call of a traced function: its graphs are there, and nothing was computed."""


class Trace:
    """Traces `module` for `inputs`, which lie in its arguments as `structure` says; `split` says what became of its backward pass.

    Where the forward branches on numbers, the trace took the branches of `inputs`; `values` tells for which other inputs it holds.

    Only the module's forward is traced under `autocast`, the one its caller has. The backward is traced and both run outside of autocast:
    the graph of the forward holds its casts, and what it does in full precision must stay so.

    `make_part` makes functions of graphs. `leave_work` is called by every B with what is left for its W.

    With `dims`, dimensions of inputs, their sizes are symbols in the graphs, and the trace holds for all inputs for whose sizes
    the guards of `symbols` hold. It raises `NotGeneralError` where there is no such trace. `sized` is the graph of forward and backward
    together of a trace without symbols.

    Raises `InputError` with the reason where the module cannot be traced. The module is then in the state of Python it was in before.
    """

    def __init__(
        self,
        module: nn.Module,
        owned: TensorsOfModule,
        structure: Structure,
        inputs: Sequence[Tensor],
        autocast: Autocast | None,
        make_part: PartMaker,
        leave_work: LeaveWork,
        dims: Collection[Dim] = (),
    ) -> None:
        refuse_untraceable(structure, inputs, owned.tensors)
        refuse_recurrent_dropout(module)
        self._module = module
        self._owned = owned.tensors
        self._given = (*owned.tensors, *inputs)
        self._num_owned = owned.num
        self._places = owned.places
        self._structure = structure
        self._autocast = autocast
        self._make_part = make_part
        self._leave_work = leave_work
        self.values = ValueGuard()
        self.symbols = Symbols(owned.tensors, inputs, dims) if dims else None
        self.sized: SizedGraph | None = None
        self._joint: fx.GraphModule | None = None
        self._backward_graph: fx.GraphModule | None = None
        self._values_now: Values = ()
        self._is_ready = False
        self._forward_nodes = ForwardNodes()
        self._made_of_weights: set[str] = set()
        self._backward: BackwardPass | None = None
        self._num_outputs = 0
        self._output_spec: TreeSpec
        self._constants: list[tuple[Any] | None] = []
        self._added: tuple[str, ...] = ()
        self._function = aot_function(
            self._forward,
            fw_compiler=self._make_forward,  # type: ignore[arg-type]
            bw_compiler=self._make_backward,  # type: ignore[arg-type]
            partition_fn=self._divide,
            num_params_buffers=owned.num.tensors,
        )
        self._trace(inputs)
        self._owned = self._given = self._places = ()  # a trace outlives parameters that are replaced

    @property
    def split(self) -> BackwardSplit | None:
        """What B and W do; None where nothing has a gradient."""
        return None if self._backward is None else self._backward.split

    def run(self, tensors: Sequence[Tensor], inputs: Sequence[Tensor]) -> Any:
        """The module's output for these `inputs`, with `tensors` as its parameters and buffers."""
        self._values_now = self.values_for(inputs)
        with outside_of_autocast():
            outputs = self._function(*tensors, *inputs)
        _keep_none_gradients(outputs)
        results = iter(outputs)
        for name in self._added:
            add_loss(name, next(results))
        leaves = [next(results) if constant is None else constant[0] for constant in self._constants]
        return tree_unflatten(leaves, self._output_spec)

    @property
    def pinned(self) -> frozenset[Dim]:
        """The dimensions that were to be symbols and of which the forward made numbers."""
        return frozenset() if self.symbols is None else self.symbols.pinned

    def holds_for_sizes(self, sizes: Sequence[int]) -> bool:
        """Whether a trace with symbols holds for inputs of these sizes."""
        return self.symbols is not None and self.symbols.hold_for(sizes)

    def holds_for_numbers(self, owned: Sequence[Tensor], inputs: Sequence[Tensor]) -> bool:
        """Whether the module's parameters and buffers `owned` and these `inputs` lead to the branches of the trace."""
        return not self.values.is_needed or self.values.holds_for(owned, inputs, self.values_for(inputs))

    def values_for(self, inputs: Sequence[Tensor]) -> Values:
        """The values of the symbols for `inputs`."""
        return () if self.symbols is None else self.symbols.values_for(sizes_of(inputs))

    def is_general_of(self, other: Trace, sizes: Sequence[int]) -> bool:
        """Whether the graph of this trace, for inputs of these `sizes`, is that of the `other` one, which was traced without symbols."""
        if self.symbols is None or self._joint is None or other.sized is None:
            return False
        return SizedGraph.of(with_numbers(self._joint, self.symbols.values_for(sizes)), ()) == other.sized

    def _trace(self, inputs: Sequence[Tensor]) -> None:
        before, random_before = read_state(self._module), random_state()
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
            raise InputError(f"{self._where(error)}{error}") from error
        except Exception as error:
            self._refuse_changes(before)
            raise InputError(f"{self._where(error)}{_why_untraceable(error)}") from error
        self._refuse_changes(before)
        self._split_general()
        if random_state() != random_before:
            raise InputError("its forward draws from the random numbers of Python or numpy, which a graph does not repeat (use torch's)")

    def _where(self, error: Exception) -> str:
        part = culprit(error, self._module)
        return f"module {part}: " if part else ""

    def _refuse_changes(self, before: State) -> None:
        """Raise where tracing changed the state of Python, which is put back."""
        changed = before.changed_to(read_state(self._module))
        before.restore()
        if changed is not None:
            raise InputError(f"its forward changes {changed}, which a graph does not repeat")

    def _forward(self, *tensors: Any) -> Any:
        """The module as a function of its parameters, buffers and inputs, which AOTAutograd calls with the tensors of a trace."""
        num_owned = self._num_owned.tensors
        positional, named = unflatten_pytree(self._structure, iter(tensors[num_owned:]))
        with replacing_tensors(self._module, self._places, dict(zip(self._owned, tensors[:num_owned], strict=True))):
            answering = AnsweringMode(tensors, self._given, self._positions_of_known(), self.symbols)
            noting = recording_checkpoints(tensors)
            with noting as checkpoint_of, answering, TraceableGroupedProducts(), within(self._autocast), collecting_losses() as added:
                output = self._module(*positional, **named)
            self._refuse_new_buffers(tensors[:num_owned])
        self.values = answering.guard()
        mode = get_proxy_mode()
        if mode is not None:
            self._forward_nodes = ForwardNodes({node.name for node in mode.tracer.graph.nodes}, checkpoint_of)
        leaves, self._output_spec = tree_flatten(output)
        self._constants = [None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves]
        if any(isinstance(leaf, SYMBOLIC) for leaf in leaves):
            raise NotGeneralError("it gives a size as a result")
        self._added = tuple(added)
        # Of an output that is a lazy conjugate the backward graph would view conjugates as real numbers, which torch refuses.
        results = [*added.values(), *(leaf for leaf in leaves if isinstance(leaf, Tensor))]
        return tuple(result.resolve_conj().resolve_neg() for result in results)

    def _positions_of_known(self) -> list[int]:
        """Which of the given tensors may be read again before each forward: all but parameters that have no gradient."""
        first = self._num_owned.parameters
        return [i for i, tensor in enumerate(self._given[first:], first) if not tensor.requires_grad]

    def _refuse_new_buffers(self, given: Iterable[Tensor]) -> None:
        known = set(given)
        for name, buffer in self._module.named_buffers():
            if buffer not in known:
                raise InputError(f"its forward puts a new tensor in buffer {name} (change it in place)")

    def _divide(self, joint: fx.GraphModule, _: Any, *, num_fwd_outputs: int, **__: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        """The forward and the backward graph of a joint graph."""
        _refuse_graph(joint)
        self._keep_for_proof(joint)
        self._num_outputs = num_fwd_outputs
        draw_again = not self._make_part.compiles  # inductor cannot draw from a kept state
        forward, backward = forward_and_backward(joint, num_fwd_outputs, self._forward_nodes, draw_again=draw_again)
        primals = [node for node in inputs_of(joint) if not is_cotangent(node)]
        if num_results(backward) != len(primals) or self._are_merged(len(primals)):
            raise InputError("it changes a tensor in place of which another of its inputs, parameters or buffers is a view")
        parameters = {node.name for node in primals[: self._num_owned.parameters]}
        self._made_of_weights = names_made_of(backward, names_made_of(forward, parameters))
        if self.symbols is not None:
            self._backward_graph = with_numbers(backward)
            _pass_values_on(forward, backward, num_fwd_outputs)
        return forward, backward

    def _are_merged(self, num_inputs: int) -> bool:
        """Whether AOTAutograd gave this many inputs to the graph since it took views of one memory together, in an order of its own.

        It also takes together a tensor that is given twice, in the order in which they come.
        """
        distinct = set(self._given)
        if num_inputs == len(self._given):
            return False
        memories = {tensor.untyped_storage().data_ptr() for tensor in distinct}
        return num_inputs < len(distinct) or len(memories) < len(distinct)

    def _keep_for_proof(self, graph: fx.GraphModule) -> None:
        """Take the sizes out of a graph with symbols; keep it, and of another one what `is_general_of` compares."""
        if self.symbols is None:
            self.sized = SizedGraph.of(graph, ())
        else:
            take_out_sizes(graph, self.symbols.sizes)
            self._joint = with_numbers(graph)

    def _make_forward(self, graph: fx.GraphModule, examples: Sequence[Any]) -> Part:
        if self.sized is None and self._joint is None:  # nothing has a gradient, and there was nothing to divide
            self._keep_for_proof(graph)
        run = self._make_part(graph, examples, self._num_outputs) if self.symbols is None else self._general_forward(graph)

        def forward(tensors: list[Any]) -> Sequence[Any]:
            if not self._is_ready:
                raise _TracedError
            return run(tensors)

        return _taking_a_list(forward)

    def _general_forward(self, graph: fx.GraphModule) -> Part:
        """What runs a forward graph with symbols; with a backward pass, it hands their values on to it."""
        assert self.symbols is not None
        if self._backward_graph is not None:
            results = results_of(graph)
            del results[self._num_outputs]
            graph = extract(graph, inputs_of(graph), results, [node for node in graph.graph.nodes if is_random(node)])
        part = self._make_part.general(graph)

        def run(tensors: list[Any]) -> Sequence[Any]:
            found = list(part.of(self._values_now)(tensors))
            if self._backward_graph is not None:
                found.insert(self._num_outputs, holding_values(self._values_now))
            return found

        return run

    def _make_backward(self, graph: fx.GraphModule, examples: Sequence[Any]) -> Part:
        if self._backward is None:  # with symbols it is there already
            self._backward = BackwardPass(graph, examples, self._num_owned, self._made_of_weights, self._make_part, self._leave_work)
        return _taking_a_list(self._backward.run)

    def _split_general(self) -> None:
        """Split the backward graph with symbols, and make the guards, before the trace is used."""
        if self.symbols is None:
            return
        if self._backward_graph is not None:
            graph = self._backward_graph
            examples = [node.meta["val"] for node in inputs_of(graph)]
            self._backward = BackwardPass(
                graph, examples, self._num_owned, self._made_of_weights, self._make_part, self._leave_work, has_symbols=True
            )
        self.symbols.finish()


def _pass_values_on(forward: fx.GraphModule, backward: fx.GraphModule, num_outputs: int) -> None:
    """Let the forward graph save one value more, the first, for the backward graph: a tensor whose shape holds the values of symbols."""
    example = FakeTensorMode().from_tensor(torch.empty(0, device="cpu"))
    output = next(iter(reversed(forward.graph.nodes)))
    with forward.graph.inserting_before(output):
        saved = forward.graph.call_function(torch.ops.aten.empty.memory_format, ([0],))
    results = list(output.args[0])
    output.args = ((*results[:num_outputs], saved, *results[num_outputs:]),)
    with backward.graph.inserting_before(next(iter(backward.graph.nodes))):
        given = backward.graph.placeholder("values_of_symbols")
    saved.meta["val"] = given.meta["val"] = example
    forward.recompile()
    backward.recompile()


def _taking_a_list(run: Part) -> Part:
    """Tell AOTAutograd that this function takes its arguments in one list, which it may empty."""

    def boxed(tensors: list[Any]) -> Sequence[Any]:
        return run(tensors)

    boxed._boxed_call = True  # type: ignore[attr-defined]
    return boxed


def _refuse_graph(joint: fx.GraphModule) -> None:
    """Raise for operations that a graph cannot go back from."""
    for node in joint.graph.find_nodes(op="get_attr"):
        constant = getattr(joint, str(node.target), None)
        if isinstance(constant, Tensor) and constant.requires_grad:
            raise InputError("it uses a tensor with gradient that is neither a parameter nor an input")
    if joint.graph.find_nodes(op="call_function", target=torch.ops.aten.mkldnn_rnn_layer.default):
        raise InputError("its recurrent layer runs in oneDNN, which keeps nothing to go back from in a graph")


def _keep_none_gradients(outputs: Iterable[Tensor]) -> None:
    """Let the backward of the traced function that gave `outputs` see None, not zeros, where no gradient comes back to one.

    Outputs may be views of what the function gave, so its node may lie some steps behind theirs.
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
    first_line = (str(error).strip().splitlines() or [""])[0]
    other_experts = "model.set_experts_implementation('batched_mm') of Transformers chooses experts that a graph takes"
    if "Expected inputs of BF16 type" in first_line:
        return f"torch has graphs of such grouped products in bfloat16 alone, and these are of another type ({other_experts})"
    if isinstance(error, DynamicOutputShapeException):
        first_line += f", the shape of whose result depends on numbers ({other_experts})"
    return f"tracing raised {type(error).__name__}: {first_line}"
