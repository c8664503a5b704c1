"""Functions that run a part of a traced graph: node by node, compiled by inductor, or replayed as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, fx
from torch.fx.graph import CodeGen

from zerobubble.errors import InputError
from zerobubble.runtime.split.capture import CapturedPart, Part, Slots


class PartMaker:
    """Makes the parts of a stage: compiled by inductor if it `compiles`, and captured as CUDA graphs where it has `slots`.

    `stays` gives the tensors that stay where they are from one call of a part to the next: the parameters and buffers.
    """

    def __init__(self, stays: Callable[[], Sequence[Tensor]], *, compiles: bool, slots: Slots | None) -> None:
        self._stays = stays
        self._slots = slots
        self.compiles = compiles

    def without_compiler(self) -> PartMaker:
        """Makes the same parts, run node by node."""
        return PartMaker(self._stays, compiles=False, slots=self._slots)

    def __call__(self, graph: fx.GraphModule, examples: Sequence[Any], num_leaving: int) -> Part:
        """What runs `graph` on inputs like the `examples`. The first `num_leaving` of its results leave the stage."""
        part = _compiled(graph, examples) if self.compiles else _node_by_node(graph)
        return part if self._slots is None else CapturedPart(part, self._slots, num_leaving, self._stays)


def require_compiler(tensors: Iterable[Tensor], stage: int) -> None:
    """Raise `InputError` where inductor needs a C++ compiler for a stage that holds these tensors, and finds none."""
    if {tensor.device.type for tensor in tensors} <= {"cuda"}:
        return
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler

        get_cpp_compiler()
    except Exception as error:
        raise InputError(
            f'stage {stage} cannot be compiled: there is no C++ compiler; install g++, or give split={{{stage}: "graph"}}'
        ) from error


def _compiled(graph: fx.GraphModule, examples: Sequence[Any]) -> Part:
    from torch._inductor import compile as compile_graph

    options = {"fallback_random": True}  # the random numbers of eager mode
    compiled = compile_graph(graph, list(examples), options=options)
    return lambda tensors: compiled(*tensors)


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
