"""Graphs with symbolic sizes: one graph for all input sizes that satisfy its guards.

In a graph that torch traces with symbols, separate nodes compute the sizes. These nodes are removed, and a `Size` replaces them as an
argument. The graph can then be divided and cut as if its sizes were constants, and no part keeps a size for another part. Each part
computes all its sizes at once from the values of the symbols.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import getitem
from typing import Any, TypeAlias

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import map_aggregate, map_arg
from torch.utils._pytree import tree_leaves, tree_map_only

from zerobubble.runtime.split.graphs.fx_nodes import inputs_of

Values: TypeAlias = tuple[int, ...]
"""A value for each symbol of a trace."""

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
"""The types of symbolic numbers."""
_WHOLE = {"FloorDiv", "Mod", "PythonMod", "CleanDiv", "ModularIndexing", "Max", "Min", "Abs"}
"""Integer functions in formulas. Formulas with other functions are refused: sympy may round them differently from Python."""


class NotGeneralError(Exception):
    """Raised if a graph cannot be used for other sizes; the message has the reason."""


class Size:
    """A number in a graph; `evaluate` computes it from the values of the symbols."""

    def __init__(self, compute: Callable[[Values], Any]) -> None:
        self.evaluate = compute

    def __repr__(self) -> str:
        return "size_without_number"  # a valid identifier: torch generates code for every graph, even if it never runs


class Sizes:
    """Creates sizes from formulas over the symbols in `order`, whose values were `values` in the trace."""

    def __init__(self, order: Sequence[Any], values: Values) -> None:
        self._order = tuple(order)
        self._values = values
        self._of_formula: dict[Any, Size | int] = {}

    def of_number(self, number: Any) -> Size | int:
        """Returns the size for an integer of the trace, the integer itself if it is constant."""
        if isinstance(number, (torch.SymFloat, torch.SymBool)):
            raise NotGeneralError(f"a branch on values depends on a float or a condition computed from a size ({number.node.expr})")
        if not isinstance(number, torch.SymInt):
            return int(number)
        formula = number.node.expr
        if formula not in self._of_formula:
            self._of_formula[formula] = int(formula) if formula.is_Integer else self._new(formula)
        return self._of_formula[formula]

    def in_trace(self, number: Any) -> int:
        """Returns the value of an integer in the trace."""
        size = self.of_number(number)
        return int(size.evaluate(self._values)) if isinstance(size, Size) else size

    def _new(self, formula: Any) -> Size:
        require_whole(formula)
        if not formula.free_symbols.issubset(self._order):
            raise NotGeneralError(f"a size ({formula}) is no formula of the sizes of the inputs")
        order = self._order
        return Size(lambda values: int(formula.xreplace(dict(zip(order, map(sympy.Integer, values), strict=True)))))


def require_whole(formula: Any) -> None:
    """Raises `NotGeneralError` for a formula with fractions, which sympy may round differently from Python."""
    others = {type(function).__name__ for function in formula.atoms(sympy.Function)} - _WHOLE
    if others or formula.atoms(sympy.Float):
        raise NotGeneralError(f"a size or a branch depends on a fraction ({formula})")


def take_out_sizes(module: fx.GraphModule, sizes: Sizes) -> None:
    """Replaces the nodes that compute sizes with `Size` objects. Tensors in `meta["val"]` get the sizes of the trace.

    Raises `NotGeneralError` for a graph that returns a size or has one that is not a formula of the symbols.
    """
    size_of: dict[fx.Node, Any] = {}
    fakes = FakeTensorMode()
    for node in module.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, SYMBOLIC):
            size_of[node] = _size_of(node, sizes, size_of)
            continue
        node.args = map_arg(node.args, lambda source: size_of.get(source, source))
        node.kwargs = map_arg(node.kwargs, lambda source: size_of.get(source, source))
        if any(isinstance(leaf, SYMBOLIC) or (node.op == "output" and isinstance(leaf, Size)) for leaf in tree_leaves(node.args)):
            raise NotGeneralError("it returns a size")
        if isinstance(value, Tensor):
            node.meta["shape"] = [sizes.of_number(size) for size in value.shape]
        node.meta["val"] = tree_map_only(Tensor, lambda tensor: _in_trace(tensor, sizes, fakes), value)
    for node in reversed(size_of):
        module.graph.erase_node(node)


def _size_of(node: fx.Node, sizes: Sizes, size_of: Mapping[fx.Node, Any]) -> Any:
    """Returns the size for a node that computes one, from the shape of a tensor or from other sizes."""
    if node.op == "placeholder" or any(source not in size_of for source in node.all_input_nodes):
        if not isinstance(node.meta["val"], torch.SymInt):
            raise NotGeneralError("a number other than a size is computed from a tensor")
        return sizes.of_number(node.meta["val"])
    target: Any = node.target
    arguments = map_arg((node.args, node.kwargs), size_of.__getitem__)
    return Size(lambda values: _call(target, arguments, values))


def _call(target: Any, arguments: Any, values: Values) -> Any:
    args, kwargs = map_aggregate(arguments, lambda argument: argument.evaluate(values) if isinstance(argument, Size) else argument)
    return target(*args, **kwargs)


def _in_trace(tensor: Tensor, sizes: Sizes, fakes: FakeTensorMode) -> Tensor:
    with fakes:
        shape, strides = map(sizes.in_trace, tensor.shape), map(sizes.in_trace, tensor.stride())
        return torch.empty_strided(list(shape), list(strides), dtype=tensor.dtype, device=tensor.device)


def shape_of(node: fx.Node) -> list[Any]:
    """Returns the shape of a node's tensor, as an argument for another node."""
    shape: list[Any] = node.meta["shape"] if "shape" in node.meta else list(node.meta["val"].shape)
    return shape


def with_numbers(module: fx.GraphModule, values: Values | None = None) -> fx.GraphModule:
    """Returns the graph for these values, as if traced without symbols. Without values, returns a copy."""
    graph = fx.Graph()
    _copy(module, graph, lambda argument: argument.evaluate(values) if values is not None and isinstance(argument, Size) else argument)
    return fx.GraphModule(module, graph)


def taking_values(module: fx.GraphModule) -> fx.GraphModule:
    """Returns a graph that computes its own sizes: it takes the values of the symbols, as a tuple, before its other inputs."""
    used = list(dict.fromkeys(_sizes_in(module)))
    graph = fx.Graph()
    values = graph.placeholder("values_of_symbols")
    copies = {node: graph.node_copy(node) for node in inputs_of(module)}  # first, so that their names stay the same
    numbers = graph.call_function(_computing(used), (values,))
    nodes = {size: graph.call_function(getitem, (numbers, i)) for i, size in enumerate(used)}
    _copy(module, graph, lambda argument: nodes[argument] if isinstance(argument, Size) else argument, copies)
    return fx.GraphModule(module, graph)


def _sizes_in(module: fx.GraphModule) -> Iterator[Size]:
    for node in module.graph.nodes:
        yield from (leaf for leaf in tree_leaves((node.args, dict(node.kwargs))) if isinstance(leaf, Size))


def _computing(sizes: Sequence[Size]) -> Callable[[Values], tuple[Any, ...]]:
    """Returns a function that computes the sizes, with the last result cached."""
    last: list[tuple[Values, tuple[Any, ...]]] = []

    def numbers_of(values: Values) -> tuple[Any, ...]:
        if not last or last[0][0] != values:
            last[:] = [(values, tuple([size.evaluate(values) for size in sizes]))]
        return last[0][1]

    return numbers_of


def _copy(module: fx.GraphModule, graph: fx.Graph, fill: Callable[[Any], Any], copies: dict[fx.Node, fx.Node] | None = None) -> None:
    """Copies all nodes that have no copy yet, with `fill` applied to each argument."""
    copies = {} if copies is None else copies
    for node in module.graph.nodes:
        if node not in copies:
            copy = copies[node] = graph.node_copy(node, copies.__getitem__)
            copy.args, copy.kwargs = map_aggregate(copy.args, fill), map_aggregate(copy.kwargs, fill)
