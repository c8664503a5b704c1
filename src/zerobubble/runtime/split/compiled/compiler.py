"""The compiled code of a stage. To compile a part of a large stage takes minutes, so it is done as seldom as can be.

The first graph of a kind is compiled as it is. With the second, which differs in sizes alone, goes a graph with symbols for sizes, whose
code serves for all that follow: two compilations, however many lengths come. What is new after `MOST_ROUNDS` runs node by node.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

from zerobubble.errors import InputError
from zerobubble.runtime.split.compiled.capture import Part
from zerobubble.runtime.split.graphs.general_graph import General, fill_in_example, with_symbols
from zerobubble.runtime.split.graphs.sized_graph import SizedGraph

MOST_ROUNDS = 6
"""How many traces of a stage are compiled, in whole or in part; three kinds of masks in batches of all lengths take as many."""
_OPTIONS = {"fallback_random": True}
"""Options of inductor: the random numbers of eager mode."""


@dataclass
class _General:
    """Compiled code with symbols, and what their numbers must fulfil."""

    general: General
    code: Callable[..., Sequence[Any]]
    holds_for: Callable[[list[int]], bool]

    def part(self, sizes: tuple[int, ...]) -> Part | None:
        """What runs a graph of these sizes; None where the code is not for it."""
        symbols = self.general.symbols_of(sizes)
        if symbols is None or not self.holds_for(symbols):
            return None
        return lambda tensors: self.code(*symbols, *tensors)


@dataclass
class _Kind:
    """Graphs that differ in sizes alone: those that were compiled, by their sizes, and the codes for all sizes."""

    compiled: dict[tuple[int, ...], Part] = field(default_factory=dict)
    general: list[_General] = field(default_factory=list)


class Compiler:
    """Compiles the parts of one stage, which messages call `name`. Call `new_trace` before the parts of each trace.

    `notes` tells, in a line each, what runs uncompiled, and what had to be compiled for its sizes alone.
    """

    def __init__(self, name: str) -> None:
        self.notes: list[str] = []
        self._name = name
        self._kinds: dict[Hashable, _Kind] = {}
        self._num_rounds = 0
        self._is_counted = False
        self._shapes = ""

    def new_trace(self, inputs: Iterable[Tensor]) -> None:
        """The parts that come now are those of a trace for such inputs of the stage."""
        self._is_counted = False
        self._shapes = ", ".join(str(tuple(tensor.shape)) for tensor in inputs)

    def part(self, graph: fx.GraphModule, examples: Sequence[Any]) -> Part | None:
        """Compiled code of a graph for inputs like the `examples`; None where it is to run node by node."""
        sized = SizedGraph.of(graph, examples)
        kind = self._kinds.setdefault(sized.kind, _Kind())
        known = next((part for general in kind.general if (part := general.part(sized.sizes)) is not None), None)
        part = known or kind.compiled.get(sized.sizes)
        if part is not None:
            return part
        if not self._may_compile():
            return None
        part = self._compile_for_all(kind, graph, examples, sized.sizes) or compile_graph(graph, examples)
        kind.compiled[sized.sizes] = part
        return part

    def _may_compile(self) -> bool:
        if not self._is_counted:
            self._is_counted = True
            self._num_rounds += 1
            if self._num_rounds > MOST_ROUNDS:
                self.notes.append(f"not compiled after {MOST_ROUNDS} others: inputs of shapes {self._shapes}")
            if self._num_rounds == MOST_ROUNDS + 1:
                self._warn()
        return self._num_rounds <= MOST_ROUNDS

    def _compile_for_all(self, kind: _Kind, graph: fx.GraphModule, examples: Sequence[Any], sizes: tuple[int, ...]) -> Part | None:
        """Compiled code for graphs of all sizes, this one among them; None where this is the first, or there is no such code."""
        known = [other for other in kind.compiled if _may_be_general([other, sizes])]
        if not known:
            return None
        try:
            general = General([*known, sizes])
            compiled = compile_with_symbols(graph, examples, general, sizes)
        except Exception as error:  # noqa: BLE001  # inductor has many ways to say that it needs a number and not a symbol
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            self.notes.append(f"compiled for inputs of shapes {self._shapes} alone: {reason}")
            return None
        kind.general.append(compiled)
        return compiled.part(sizes)

    def _warn(self) -> None:
        warnings.warn(
            f"{self._name} has been compiled {MOST_ROUNDS} times, for inputs of other kinds or other branches of its forward, and to "
            f'compile takes long: what is new from here on, such as inputs of shapes {self._shapes}, runs as with split="graph"; '
            "give microbatches of few kinds",
            stacklevel=2,
        )


def _may_be_general(sizes: Sequence[tuple[int, ...]]) -> bool:
    """Whether there is a general graph of those of these sizes. There is none where a size is 1 in one of them, or nothing differs."""
    try:
        return General(sizes).num_symbols > 0
    except ValueError:
        return False


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


def compile_graph(graph: fx.GraphModule, examples: Sequence[Any]) -> Part:
    """Code for a graph that takes inputs of the sizes of the `examples`."""
    from torch._inductor import compile as compile_graph

    compiled = compile_graph(graph, list(examples), options=_OPTIONS)
    return lambda tensors: compiled(*tensors)


def compile_with_symbols(graph: fx.GraphModule, examples: Sequence[Any], general: General, sizes: tuple[int, ...]) -> _General:
    """Code for all graphs that `general` stands for; `graph`, of these `sizes`, is one of them."""
    from torch._inductor import compile as compile_graph
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    numbers = general.symbols_of(sizes)
    assert numbers is not None
    environment = ShapeEnv()
    symbols = [_symbol(environment, number, f"size{i}") for i, number in enumerate(numbers)]
    fakes = FakeTensorMode(shape_env=environment)

    def fake(shape: list[Any], strides: list[Any], like: Tensor) -> Tensor:
        with fakes:
            return torch.empty_strided(shape, strides, dtype=like.dtype, device=like.device)

    with _disable_current_modes(), torch.no_grad():
        left = general.sizes(symbols)
        inputs = [fill_in_example(example, left, fake) for example in examples]
        code = compile_graph(with_symbols(graph, examples, general), [*symbols, *inputs], options=_OPTIONS)
        condition = environment.produce_guards_expression(symbols)
    return _General(general, code, lambda given: condition is None or environment.evaluate_guards_expression(condition, given))


def _symbol(environment: Any, number: int, name: str) -> Any:
    """A symbol for a size that is `number` now."""
    from torch._dynamo.source import LocalSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    source = LocalSource(name)
    expression = environment.create_symbol(number, source, dynamic_dim=DimDynamic.DYNAMIC)
    return environment.create_symintnode(expression, hint=number, source=source)
