"""Compiles the parts of a stage with inductor, with as few compilations as possible.

Compiling a part of a large stage takes minutes. The first graph of a kind is compiled with its sizes as constants. When a second graph
differs only in sizes, a graph with symbolic sizes is compiled, whose code serves all later ones: two compilations, for any number of
sequence lengths. After `MOST_ROUNDS` compilations, new graphs run node by node.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

from zerobubble.error_reports.user_code import warn_user
from zerobubble.errors import InputError
from zerobubble.runtime.device import interface
from zerobubble.runtime.split.compiled.capture import Part
from zerobubble.runtime.split.graphs.general_graph import General, fill_in_example, with_symbols
from zerobubble.runtime.split.graphs.sized_graph import SizedGraph

MOST_ROUNDS = 6
"""Maximum number of traces of a stage that are compiled. Three kinds of masks, each with batches of varying length, need six."""
_OPTIONS = {"fallback_random": True}
"""Options of inductor. `fallback_random` gives the random numbers of eager mode."""


@dataclass
class _General:
    """Compiled code with symbolic sizes, and the guards on their values."""

    general: General
    code: Callable[..., Sequence[Any]]
    holds_for: Callable[[list[int]], bool]

    def part(self, sizes: tuple[int, ...]) -> Part | None:
        """Returns a function for a graph of these sizes, None if the guards fail."""
        symbols = self.general.symbols_of(sizes)
        if symbols is None or not self.holds_for(symbols):
            return None
        return lambda tensors: self.code(*symbols, *tensors)


@dataclass
class _Kind:
    """Graphs that differ only in sizes: code compiled for constant sizes, and code for symbolic sizes."""

    compiled: dict[tuple[int, ...], Part] = field(default_factory=dict)
    general: list[_General] = field(default_factory=list)


class Compiler:
    """Compiles the parts of one stage; `name` names it in messages. Call `new_trace` before the parts of each trace.

    `notes` has a line for each part that runs uncompiled and for each that needed a compilation of its own for its sizes.
    """

    def __init__(self, name: str) -> None:
        self.notes: list[str] = []
        self._name = name
        self._kinds: dict[Hashable, _Kind] = {}
        self._num_rounds = 0
        self._is_counted = False
        self._shapes = ""

    def new_trace(self, inputs: Iterable[Tensor]) -> None:
        """Starts a trace for inputs of these shapes: the parts requested next belong to it."""
        self._is_counted = False
        self._shapes = ", ".join(str(tuple(tensor.shape)) for tensor in inputs)

    def part(self, graph: fx.GraphModule, examples: Sequence[Any]) -> Part | None:
        """Returns compiled code of a graph for inputs like `examples`, None if the graph should run node by node."""
        sized = SizedGraph.from_graph(graph, examples)
        kind = self._kinds.setdefault(sized.kind, _Kind())
        parts = (general.part(sized.sizes) for general in kind.general)
        part = next(filter(None, parts), None) or kind.compiled.get(sized.sizes)
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
        """Returns code for all sizes including these, None for the first graph of a kind and if sizes cannot be symbolic."""
        similar = [other for other in kind.compiled if _may_be_general([other, sizes])]
        if not similar:
            return None
        try:
            general = General([*similar, sizes])
            compiled = compile_with_symbols(graph, examples, general, sizes)
        except Exception as error:  # noqa: BLE001  # inductor raises many types of errors when it needs a constant instead of a symbol
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            self.notes.append(f"compiled only for inputs of shapes {self._shapes}: {reason}")
            return None
        kind.general.append(compiled)
        return compiled.part(sizes)

    def _warn(self) -> None:
        warn_user(
            f"{self._name} has been compiled {MOST_ROUNDS} times, for inputs of other kinds or other branches of its forward, and "
            f'compilation is slow: new inputs, such as those of shapes {self._shapes}, run as with split="graph"; '
            "use microbatches of few kinds"
        )


def _may_be_general(sizes: Sequence[tuple[int, ...]]) -> bool:
    """Returns whether graphs of these sizes share a symbolic graph: not if a size is 1 in one of them."""
    try:
        General(sizes)
    except ValueError:
        return False
    return True


def require_compiler(tensors: Iterable[Tensor], stage: int) -> None:
    """Raises `InputError` if inductor has no code generator for a stage with these tensors, or needs a C++ compiler and finds none."""
    devices = {tensor.device for tensor in tensors}
    for device in devices:
        if not _generates_code(device):
            raise InputError(
                "stage {stage} cannot be compiled: inductor of torch {version} has no code generator for {device}; {remedy}",
                stage=stage,
                version=torch.__version__,
                device=str(device),
                remedy=f'give split={{{stage}: "graph"}}',
            )
    if not any(interface(device).needs_host_compiler for device in devices):
        return
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler

        get_cpp_compiler()
    except Exception as error:
        raise InputError(
            "stage {stage} cannot be compiled: there is no C++ compiler; {remedy}",
            stage=stage,
            remedy=f'install g++, or give split={{{stage}: "graph"}}',
        ) from error


def _generates_code(device: torch.device) -> bool:
    from torch._inductor.codegen.common import get_scheduling_for_device, init_backend_registration

    init_backend_registration()
    return get_scheduling_for_device(device.type) is not None


def compile_graph(graph: fx.GraphModule, examples: Sequence[Any]) -> Part:
    """Compiles a graph for inputs with the sizes of `examples`."""
    from torch._inductor import compile as compile_graph

    compiled = compile_graph(graph, list(examples), options=_OPTIONS)
    return lambda tensors: compiled(*tensors)


def compile_with_symbols(graph: fx.GraphModule, examples: Sequence[Any], general: General, sizes: tuple[int, ...]) -> _General:
    """Compiles a graph with symbolic sizes for all graphs that `general` describes; `graph`, with these `sizes`, is one of them."""
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
    return _General(general, code, lambda values: condition is None or environment.evaluate_guards_expression(condition, values))


def _symbol(environment: Any, number: int, name: str) -> Any:
    """Creates a symbol for a size, with `number` as its hint."""
    from torch._dynamo.source import LocalSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    source = LocalSource(name)
    expression = environment.create_symbol(number, source, dynamic_dim=DimDynamic.DYNAMIC)
    return environment.create_symintnode(expression, hint=number, source=source)
