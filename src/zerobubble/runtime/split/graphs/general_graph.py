"""Derives one graph for all sizes from graphs traced with constant sizes.

Graphs traced for 512 and for 640 tokens differ only in integers: sizes of inputs and arguments of views. `General` compares two or more of
them and finds formulas (multiples, products, sums) between these integers. `with_symbols` builds a graph that takes the independent
integers as inputs, to be compiled once.

The general graph is used for another graph only if substituting numbers for its symbols gives exactly that graph, integer by integer. A
wrong formula therefore costs another compilation, never a wrong result.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations_with_replacement
from typing import Any, NamedTuple

from torch import Tensor, fx

from zerobubble.runtime.split.graphs.fx_nodes import inputs_of


class _Formula(NamedTuple):
    """A size as `factor` times the product of these symbols, plus `addend`."""

    factor: int
    symbols: tuple[int, ...]
    addend: int

    def value(self, symbols: Sequence[Any]) -> Any:
        product: Any = self.factor
        for number in self.symbols:
            product = product * symbols[number]
        return product + self.addend if self.addend else product


class General:
    """Formulas for the sizes of graphs of one kind, derived from the sizes of at least two.

    `num_symbols` sizes are symbols; all others are constants or formulas of these. The smallest sizes that differ become symbols, so that
    the others are multiples of them.

    Raises `ValueError` if a symbol would be 0 or 1 in one of the graphs: code for such sizes is specialized.
    """

    def __init__(self, examples: Sequence[tuple[int, ...]]) -> None:
        columns = list(zip(*examples, strict=True))
        self._positions: list[int] = []
        self._columns: list[tuple[int, ...]] = []
        formulas = {column: self._formula(column) or self._new_symbol(column, columns) for column in sorted(set(columns))}
        self._formulas = [formulas[column] for column in columns]

    @property
    def num_symbols(self) -> int:
        return len(self._positions)

    def symbols_of(self, sizes: Sequence[int]) -> list[int] | None:
        """Returns the values of the symbols for a graph of these sizes, None if no values match."""
        symbols = [sizes[position] for position in self._positions]
        return symbols if list(self.sizes(symbols)) == list(sizes) else None

    def sizes(self, symbols: Sequence[Any]) -> Iterator[Any]:
        """Evaluates all sizes for these symbols, which are numbers or symbolic values."""
        return iter([formula.value(symbols) for formula in self._formulas])

    def _new_symbol(self, column: tuple[int, ...], columns: list[tuple[int, ...]]) -> _Formula:
        if min(column) < 2:
            raise ValueError(f"a size is {min(column)} in one of the graphs and another in others")
        self._positions.append(columns.index(column))
        self._columns.append(column)
        return _Formula(1, (len(self._columns) - 1,), 0)

    def _formula(self, column: tuple[int, ...]) -> _Formula | None:
        """Returns a formula for the values of a size (one per graph) in the known symbols, None if none fits."""
        if len(set(column)) == 1:
            return _Formula(column[0], (), 0)
        for numbers in self._products():
            of_product = [_Formula(1, numbers, 0).value(by_graph) for by_graph in zip(*self._columns, strict=True)]
            factor, rest = divmod(column[0], of_product[0])
            if rest == 0 and all(factor * a == b for a, b in zip(of_product, column, strict=True)):
                return _Formula(factor, numbers, 0)
            addend = column[0] - of_product[0]
            if len(numbers) == 1 and all(a + addend == b for a, b in zip(of_product, column, strict=True)):
                return _Formula(1, numbers, addend)
        return None

    def _products(self) -> list[tuple[int, ...]]:
        """Returns each single symbol, then each product of two."""
        numbers = range(len(self._columns))
        return [*((number,) for number in numbers), *combinations_with_replacement(numbers, 2)]


def with_symbols(module: fx.GraphModule, examples: Sequence[Any], general: General) -> fx.GraphModule:
    """Returns the general graph of `module` for inputs like `examples`; it takes the symbols before its other inputs."""
    graph = fx.Graph()
    symbols = [_Symbolic(graph, graph.placeholder(f"size{i}")) for i in range(general.num_symbols)]
    copies: dict[fx.Node, Any] = {node: graph.placeholder(node.name) for node in inputs_of(module)}
    sizes = general.sizes(symbols)
    for example in examples:
        fill_in_example(example, sizes, lambda *_: None)
    for node in module.graph.nodes:
        if node.op == "get_attr":
            copies[node] = graph.get_attr(str(node.target))
        elif node.op != "placeholder":
            args, kwargs = _filled((node.args, node.kwargs), sizes, copies)
            copies[node] = graph.create_node(node.op, node.target, args, kwargs)
    return fx.GraphModule(module, graph)


def fill_in_example(example: Any, sizes: Iterator[Any], make: Callable[[list[Any], list[Any], Tensor], Any]) -> Any:
    """Returns an input like `example` with the next of `sizes`. For a tensor, calls `make` with the shape, the strides and the tensor."""
    if not isinstance(example, Tensor):
        return _filled(example, sizes, {})
    shape = [next(sizes) for _ in range(example.dim())]
    return make(shape, [next(sizes) for _ in range(example.dim())], example)


def _filled(argument: Any, sizes: Iterator[Any], copies: dict[fx.Node, Any]) -> Any:
    """Replaces each integer in an argument of a node with the next of `sizes`, in the order in which they were read."""
    if isinstance(argument, fx.Node):
        return copies[argument]
    if type(argument) is int:
        size = next(sizes)
        return size.node if isinstance(size, _Symbolic) else size
    if isinstance(argument, (tuple, list)):
        parts = [_filled(part, sizes, copies) for part in argument]
        return parts if type(argument) is list else tuple(parts)
    if isinstance(argument, dict):
        return {name: _filled(part, sizes, copies) for name, part in argument.items()}
    return argument


class _Symbolic:
    """An integer known only when the graph runs: its sums and products become nodes."""

    def __init__(self, graph: fx.Graph, node: fx.Node) -> None:
        self._graph = graph
        self.node = node

    def __add__(self, other: int) -> _Symbolic:
        return _Symbolic(self._graph, self._graph.call_function(operator.add, (self.node, other)))

    def __mul__(self, other: _Symbolic) -> _Symbolic:
        return _Symbolic(self._graph, self._graph.call_function(operator.mul, (self.node, other.node)))

    def __rmul__(self, factor: int) -> _Symbolic:
        return self if factor == 1 else _Symbolic(self._graph, self._graph.call_function(operator.mul, (self.node, factor)))
