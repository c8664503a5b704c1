"""Functions that run a part of a traced graph: node by node, compiled by inductor, or replayed as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.graph import CodeGen

from zerobubble.runtime.split.compiled.capture import CapturedPart, Part, Slots
from zerobubble.runtime.split.compiled.compiler import Compiler
from zerobubble.runtime.split.graphs.symbolic_sizes import Values, taking_values, with_numbers


class PartMaker:
    """Makes the parts of a stage: compiled where it has a `compiler`, and captured as CUDA graphs where it has `slots`.

    `stays` gives the tensors that stay where they are from one call of a part to the next: the parameters and buffers.
    """

    def __init__(self, stays: Callable[[], Sequence[Tensor]], *, compiler: Compiler | None, slots: Slots | None) -> None:
        self._stays = stays
        self._slots = slots
        self._compiler = compiler

    @property
    def compiles(self) -> bool:
        """Whether parts are compiled, all or some."""
        return self._compiler is not None

    def new_trace(self, inputs: Sequence[Tensor]) -> None:
        """The parts that come now are those of a trace for such inputs of the stage."""
        if self._compiler is not None:
            self._compiler.new_trace(inputs)

    def __call__(self, graph: fx.GraphModule, examples: Sequence[Any], num_leaving: int) -> Part:
        """What runs `graph` on inputs like the `examples`. The first `num_leaving` of its results leave the stage."""
        compiled = None if self._compiler is None else self._compiler.part(graph, examples)
        part = compiled or _node_by_node(graph)
        return part if self._slots is None else CapturedPart(part, self._slots, num_leaving, self._stays)

    def general(self, graph: fx.GraphModule) -> GeneralPart:
        """What runs a `graph` with symbols for sizes on inputs of all sizes for which it holds."""
        return GeneralPart(graph, self._compiler)

    @property
    def takes_symbols(self) -> bool:
        """Whether parts may have symbols for sizes. CUDA graphs are captured for each shape anyway."""
        return self._slots is None


class GeneralPart:
    """A part with symbols for sizes. `of` gives what runs it for values of these; compiled code is looked up for each."""

    def __init__(self, graph: fx.GraphModule, compiler: Compiler | None) -> None:
        self._graph = graph
        self._compiler = compiler
        self._code = _node_by_node(taking_values(graph))
        self._compiled: dict[Values, Part | None] = {}

    def of(self, values: Values) -> Part:
        return partial(self._run, values)

    def _run(self, values: Values, tensors: list[Any]) -> Sequence[Any]:
        compiled = self._compiled_for(values, tensors)
        if compiled is not None:
            return compiled(tensors)
        arguments = [values, *tensors]
        tensors.clear()
        return self._code(arguments)

    def _compiled_for(self, values: Values, tensors: list[Any]) -> Part | None:
        if self._compiler is None:
            return None
        if values not in self._compiled:
            fakes = FakeTensorMode()
            examples = [fakes.from_tensor(tensor.detach()) if isinstance(tensor, Tensor) else tensor for tensor in tensors]
            self._compiled[values] = self._compiler.part(with_numbers(self._graph, values), examples)
        return self._compiled[values]


def _node_by_node(graph: fx.GraphModule) -> Part:
    graph.graph.set_codegen(_TakesList())
    graph.recompile()
    run: Part = graph.forward
    return run


class _TakesList(CodeGen):
    """Code that takes its arguments out of one list and empties it, so that each tensor is freed after its last use."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **_: Any) -> str:
        names = [name.split(":")[0].split("=")[0].strip() for name in free_vars if name != "self"]
        head = f"def {self._func_name}(self, arguments){maybe_return_annotation}:"
        return f"{head}\n    {', '.join(names)}, = arguments\n    arguments.clear()" if names else head
