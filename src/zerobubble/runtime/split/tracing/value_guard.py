"""The numbers on which a forward branched while it was traced, and the operations that give them again before another forward.

`if mask.all()` takes one branch for one mask and another for the next; a graph holds one. So tracing computes, beside the graph, what the
forward makes of the tensors whose numbers are there: inputs without a gradient, such as masks and positions, and buffers. Where the forward
asks for a number it is told the one of this microbatch. The operations that lead to such numbers are kept as a `ValueGuard`, and the trace
is taken for other microbatches only where they give the same numbers.

Numbers that come from parameters or from inputs with a gradient are not answered: to ask for them again would run a part of the forward
twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from zerobubble.errors import InputError
from zerobubble.runtime.split.autocast import outside_of_autocast
from zerobubble.runtime.split.graphs.symbolic_sizes import SYMBOLIC, Sizes, Values, taking_values
from zerobubble.runtime.split.tracing.symbols import Symbols


class _OtherNumberError(Exception):
    """Raised by the operations of a guard where they give another number than when the forward was traced."""


class ValueGuard:
    """Tells whether tensors give the numbers on which a trace depends.

    `graph` takes those of the tensors at `positions` and raises where they do not. It is None where the trace depends on no number.
    With `has_symbols` it may have symbols for sizes, and takes their values before the tensors.
    """

    def __init__(self, graph: fx.GraphModule | None = None, positions: Sequence[int] = (), *, has_symbols: bool = False) -> None:
        self._run: Callable[..., Any] | None = None
        if graph is not None:
            self._run = (taking_values(graph) if has_symbols else graph).forward
        self._positions = tuple(positions)
        self._has_symbols = has_symbols

    @property
    def is_needed(self) -> bool:
        """Whether the trace depends on numbers."""
        return self._run is not None

    def holds_for(self, owned: Sequence[Tensor], inputs: Sequence[Tensor], values: Values = ()) -> bool:
        """Whether the trace may be taken for the module's parameters and buffers `owned` and the `inputs` of a microbatch.

        `values` are those of the symbols.
        """
        if self._run is None:
            return True
        tensors = (*owned, *inputs)
        given = [values] if self._has_symbols else []
        try:
            with torch.no_grad(), outside_of_autocast():
                self._run(*given, *[tensors[i] for i in self._positions])
        except _OtherNumberError:
            return False
        return True


class AnsweringMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While a forward is traced on the tensors `traced`, answers what it asks of their numbers, which are those of `given`.

    Numbers are known of those tensors at the positions `known`, and of all that is made of them alone. `symbols` are those in the traced
    tensors, if there are any. Raises `InputError` where the forward asks for another number.
    """

    supports_higher_order_operators = True

    def __init__(self, traced: Sequence[Tensor], given: Sequence[Tensor], known: Iterable[int], symbols: Symbols | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._symbols = symbols
        self._graph = fx.Graph()
        self._constants: dict[str, Tensor] = {}
        self._nodes: dict[int, fx.Node] = {}
        """The node of each traced tensor whose numbers are known, by its `id`."""
        self._values: dict[fx.Node, Tensor] = {}
        """The tensor with the numbers, for each node."""
        self._alive: list[Tensor] = []
        self._lost: set[int] = set()
        """Memory that holds other numbers by now in the traced forward, since something unknown was written to it."""
        self._positions = list(known)
        for position in self._positions:
            self._note(traced[position], self._graph.placeholder(f"tensor{position}"), given[position])
        self._borrowed = {_memory(value) for value in self._values.values()}
        """Memory that is not this mode's, and must not be written to."""
        self._is_asked = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """As the modes of selective checkpoints: torch may call what it compiles under this one."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.lift_fresh.default:
            self._add_constant(args[0])
        if torch.Tag.data_dependent_output in getattr(func, "tags", ()) and not any(map(_has_numbers, _tensors_in((args, kwargs)))):
            return self._answer(func, args, kwargs)
        result = func(*args, **kwargs)
        if isinstance(func, torch._ops.OpOverload):
            self._follow(func, args, kwargs, result)
        return result

    def guard(self) -> ValueGuard:
        """What another microbatch must fulfil to have the same branches."""
        if not self._is_asked:
            return ValueGuard()
        _keep_what_is_asked(self._graph, self._values)
        positions = []
        for position, node in zip(self._positions, self._graph.find_nodes(op="placeholder"), strict=True):
            if node.users:
                positions.append(position)
            else:
                self._graph.erase_node(node)
        if not positions:
            return ValueGuard()  # made of constants alone, the numbers are always the same
        self._graph.output(None)
        if self._symbols is not None:
            _put_sizes(self._graph, self._symbols.sizes)
        return ValueGuard(fx.GraphModule(self._constants, self._graph), positions, has_symbols=self._symbols is not None)

    def _answer(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if not self._are_known((args, kwargs)):
            raise InputError("its forward branches on a number that comes from parameters or from an input with a gradient")
        answer = self._compute(func, args, kwargs)
        asked = self._graph.call_function(func, self._as_nodes(args), self._as_nodes(dict(kwargs)))
        self._graph.call_function(_require, (asked, _exactly(answer)))
        self._is_asked = True
        return answer

    def _follow(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Do what the forward did with the known numbers, if it did it with these alone."""
        written = [value for value in map(self._value, _written(func, args, kwargs)) if value is not None]
        is_repeatable = torch.Tag.nondeterministic_seeded not in func.tags and not self._borrowed.intersection(map(_memory, written))
        if not (is_repeatable and self._are_known((args, kwargs))):
            self._lost.update(map(_memory, written))
            return
        values = self._compute(func, args, kwargs)
        node = self._graph.call_function(func, self._as_nodes(args), self._as_nodes(dict(kwargs)))
        if isinstance(result, Tensor):
            self._note(result, node, values)
        elif isinstance(result, (tuple, list)):
            for i, part in enumerate(result):
                if isinstance(part, Tensor):
                    self._note(part, self._graph.call_function(getitem, (node, i)), values[i])

    def _add_constant(self, tensor: Tensor) -> None:
        """Note a tensor that the forward makes of a number or a list, as `torch.tensor(2)` does."""
        name = f"constant{len(self._constants)}"
        self._constants[name] = tensor
        self._borrowed.add(_memory(tensor))
        self._note(tensor, self._graph.get_attr(name), tensor)

    def _note(self, traced: Tensor, node: fx.Node, value: Tensor) -> None:
        self._values[node] = value
        if id(traced) not in self._nodes:
            self._nodes[id(traced)] = node
            self._alive.append(traced)

    def _are_known(self, arguments: Any) -> bool:
        return all(self._value(tensor) is not None for tensor in _tensors_in(arguments))

    def _value(self, tensor: Tensor) -> Tensor | None:
        """The numbers of a tensor, None where they are not known."""
        node = self._nodes.get(id(tensor))
        value = None if node is None else self._values[node]
        return None if value is None or _memory(value) in self._lost else value

    def _as_nodes(self, arguments: Any) -> Any:
        nodes = tree_map_only(Tensor, lambda tensor: self._nodes[id(tensor)], arguments)
        return tree_map_only(SYMBOLIC, _Symbolic, nodes)

    def _compute(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        args, kwargs = tree_map_only(Tensor, self._value, (args, dict(kwargs)))
        if self._symbols is not None:
            args, kwargs = tree_map_only(SYMBOLIC, self._symbols.sizes.in_trace, (args, kwargs))
        with _disable_current_modes(), torch.no_grad():
            return func(*args, **kwargs)


class _Symbolic:
    """A symbolic number in a graph, until it is known that an answer depends on it; torch warns of such numbers as they are."""

    def __init__(self, number: Any) -> None:
        self.number = number


def _keep_what_is_asked(graph: fx.Graph, values: Mapping[fx.Node, Tensor]) -> None:
    """Erase from `graph` the operations that no answer depends on; what writes to memory counts as all that lies there."""
    needed: set[int] = set()
    for node in reversed(graph.nodes):
        if node.op == "call_function":
            touched = {_memory(values[part]) for part in (node, *node.all_input_nodes) if part in values}
            if node.users or node.target is _require or not touched.isdisjoint(needed):
                needed |= touched
            else:
                graph.erase_node(node)


def _put_sizes(graph: fx.Graph, sizes: Sizes) -> None:
    """Put sizes in the place of the symbolic numbers in a graph."""

    def size_for(argument: Any) -> Any:
        return sizes.of_number(argument.number) if isinstance(argument, _Symbolic) else argument

    for node in graph.nodes:
        node.args = map_aggregate(node.args, size_for)
        node.kwargs = map_aggregate(node.kwargs, size_for)


def _require(answer: Any, exactly: str) -> None:
    if _exactly(answer) != exactly:
        raise _OtherNumberError


def _exactly(number: Any) -> str:
    """A number as a text that tells 0.0 from -0.0 and 1 from True, and is equal for NaN."""
    return f"{type(number).__name__} {number.hex() if isinstance(number, float) else number!r}"


def _written(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors among the arguments that an operation writes to."""
    if not func._schema.is_mutable:
        return
    for i, argument in enumerate(func._schema.arguments):
        if argument.is_write:
            yield from _tensors_in(args[i] if i < len(args) else kwargs.get(argument.name))


def _tensors_in(arguments: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor))


def _has_numbers(tensor: Tensor) -> bool:
    """Whether a tensor is not one of the trace but reached in another way, which torch refuses."""
    return type(tensor) is Tensor and not torch._is_functional_tensor(tensor)


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
