"""Runs a part of a traced graph: node by node, compiled by inductor, or as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.graph import CodeGen

from zerobubble.runtime.split.compiled.capture import CapturedPart, CaptureSlots, Part
from zerobubble.runtime.split.compiled.compiler import Compiler
from zerobubble.runtime.split.graphs.symbolic_sizes import Values, taking_values, with_numbers


class PartMaker:
    """Creates the functions that run the parts of a stage: compiled if there is a `compiler`, captured as CUDA graphs if there are `slots`.

    `fixed_tensors` returns the tensors that keep their addresses between calls: the parameters and buffers.
    """

    def __init__(self, fixed_tensors: Callable[[], Sequence[Tensor]], *, compiler: Compiler | None, slots: CaptureSlots | None) -> None:
        self._fixed_tensors = fixed_tensors
        self._slots = slots
        self._compiler = compiler

    @property
    def compiles(self) -> bool:
        """Whether parts may be compiled."""
        return self._compiler is not None

    def new_trace(self, inputs: Sequence[Tensor]) -> None:
        """Starts a trace for inputs of these shapes: the parts requested next belong to it."""
        if self._compiler is not None:
            self._compiler.new_trace(inputs)

    def __call__(self, graph: fx.GraphModule, examples: Sequence[Any], num_returned: int) -> Part:
        """Returns a function that runs `graph` on inputs like `examples`. The first `num_returned` results leave the stage."""
        compiled = None if self._compiler is None else self._compiler.part(graph, examples)
        part = compiled or _node_by_node(graph)
        return part if self._slots is None else CapturedPart(part, self._slots, num_returned, self._fixed_tensors)

    def general(self, graph: fx.GraphModule) -> GeneralPart:
        """Returns a part for a `graph` with symbolic sizes, valid for all sizes that satisfy its guards."""
        return GeneralPart(graph, self._compiler)

    @property
    def takes_symbols(self) -> bool:
        """Whether parts may have symbolic sizes. CUDA graphs are captured for each shape anyway."""
        return self._slots is None


class GeneralPart:
    """A part with symbolic sizes. `bind` returns the function for given values; compiled code is looked up for each."""

    def __init__(self, graph: fx.GraphModule, compiler: Compiler | None) -> None:
        self._graph = graph
        self._compiler = compiler
        self._code = _node_by_node(taking_values(graph))
        self._compiled: dict[Values, Part | None] = {}

    def bind(self, values: Values) -> Part:
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
    """Returns a function that runs `graph` by torch's own kernels.

    Some of them give other strides than in tracing, such as batch norm of a transposed input. So a view may have to copy.
    """
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        node.target = torch.ops.aten.reshape.default
    graph.graph.set_codegen(_BoxedCodeGen())
    graph.recompile()
    run: Part = graph.forward
    return run


class _BoxedCodeGen(CodeGen):
    """Generates code that takes its arguments from a list and clears it, so that each tensor is freed after its last use."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **_: Any) -> str:
        names = [name.split(":")[0].split("=")[0].strip() for name in free_vars if name != "self"]
        head = f"def {self._func_name}(self, arguments){maybe_return_annotation}:"
        return f"{head}\n    {', '.join(names)}, = arguments\n    arguments.clear()" if names else head
