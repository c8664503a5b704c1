"""Guards on the values that a forward branched on while it was traced.

`if mask.all()` takes one branch for one mask and another for the next, and a graph contains one branch. So, while a forward is traced on
fake tensors, a dispatch mode repeats its operations on the real values where these are available: inputs that do not require grad, such as
masks and positions, and buffers. When the forward reads a value, the mode answers with the current microbatch's. The operations that lead
to such values form a `ValueGuard`. Before another microbatch uses the trace, the guard recomputes the values, and they must be equal.

Values that come from parameters or from inputs that require grad are refused: to recompute them, each guard would run a part of the forward
a second time.
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


class _GuardFailedError(Exception):
    """Raised by a guard if a value differs from the value in the trace."""


class ValueGuard:
    """Checks whether tensors give the values that a trace depends on.

    `graph` takes the tensors at `positions` and raises if they do not. It is None if the trace depends on no values. With `has_symbols`, it
    has symbolic sizes, and takes the values of the symbols before the tensors.
    """

    def __init__(self, graph: fx.GraphModule | None = None, positions: Sequence[int] = (), *, has_symbols: bool = False) -> None:
        self._run: Callable[..., Any] | None = None
        if graph is not None:
            self._run = (taking_values(graph) if has_symbols else graph).forward
        self._positions = tuple(positions)
        self._has_symbols = has_symbols

    @property
    def is_needed(self) -> bool:
        """Whether the trace depends on values."""
        return self._run is not None

    def holds_for(self, owned: Sequence[Tensor], inputs: Sequence[Tensor], values: Values = ()) -> bool:
        """Returns whether the trace is valid for the module's tensors `owned` and the `inputs` of a microbatch.

        `values` are the values of the symbols.
        """
        if self._run is None:
            return True
        tensors = (*owned, *inputs)
        symbols = [values] if self._has_symbols else []
        try:
            with torch.no_grad(), outside_of_autocast():
                self._run(*symbols, *[tensors[i] for i in self._positions])
        except _GuardFailedError:
            return False
        return True


class ValueMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers reads of values while a forward is traced on the tensors `traced`, with the values of `real`.

    Known are the values of the tensors at `positions` and of all tensors computed only from these tensors. `symbols` are the symbols of the
    traced tensors, if any. Raises `InputError` if the forward reads an unknown value.
    """

    supports_higher_order_operators = True

    def __init__(self, traced: Sequence[Tensor], real: Sequence[Tensor], positions: Iterable[int], symbols: Symbols | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._symbols = symbols
        self._graph = fx.Graph()
        self._constants: dict[str, Tensor] = {}
        self._nodes: dict[int, fx.Node] = {}
        """The node of each traced tensor with known values, by `id`."""
        self._values: dict[fx.Node, Tensor] = {}
        """The real tensor of each node."""
        self._alive: list[Tensor] = []
        self._stale: set[int] = set()
        """Storages whose real values are outdated, because the traced forward wrote unknown values to them."""
        self._positions = list(positions)
        for position in self._positions:
            self._note(traced[position], self._graph.placeholder(f"tensor{position}"), real[position])
        self._borrowed = {_memory(value) for value in self._values.values()}
        """Storages that belong to others, and must not be written to."""
        self._is_asked = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Returns True, as for the modes of selective checkpoints: torch may call compiled code under this mode."""
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
        """Returns the guard that another microbatch must satisfy to take the same branches."""
        if not self._is_asked:
            return ValueGuard()
        _keep_operations_of_answers(self._graph, self._values)
        positions = []
        for position, node in zip(self._positions, self._graph.find_nodes(op="placeholder"), strict=True):
            if node.users:
                positions.append(position)
            else:
                self._graph.erase_node(node)
        if not positions:
            return ValueGuard()  # values computed only from constants never change
        self._graph.output(None)
        if self._symbols is not None:
            _put_sizes(self._graph, self._symbols.sizes)
        return ValueGuard(fx.GraphModule(self._constants, self._graph), positions, has_symbols=self._symbols is not None)

    def _answer(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if not self._are_known((args, kwargs)):
            raise InputError("its forward branches on a value that comes from parameters or from an input with a gradient")
        answer = self._compute(func, args, kwargs)
        asked = self._graph.call_function(func, self._as_nodes(args), self._as_nodes(dict(kwargs)))
        self._graph.call_function(_require, (asked, _exact(answer)))
        self._is_asked = True
        return answer

    def _follow(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Repeats an operation of the forward on the real values, if all its inputs are known."""
        written = [value for value in map(self._value, _written(func, args, kwargs)) if value is not None]
        is_repeatable = torch.Tag.nondeterministic_seeded not in func.tags and not self._borrowed.intersection(map(_memory, written))
        if not (is_repeatable and self._are_known((args, kwargs))):
            self._stale.update(map(_memory, written))
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
        """Records a tensor that the forward creates from Python numbers, as in `torch.tensor(2)`."""
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
        """Returns the real values of a tensor, None if unknown."""
        node = self._nodes.get(id(tensor))
        value = None if node is None else self._values[node]
        return None if value is None or _memory(value) in self._stale else value

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
    """Wraps a symbolic number in a graph until an answer depends on it; torch warns about unwrapped ones."""

    def __init__(self, number: Any) -> None:
        self.number = number


def _keep_operations_of_answers(graph: fx.Graph, values: Mapping[fx.Node, Tensor]) -> None:
    """Erases the operations that no answer depends on. A write to a storage counts as a change of all tensors in it."""
    needed: set[int] = set()
    for node in reversed(graph.nodes):
        if node.op == "call_function":
            touched = {_memory(values[part]) for part in (node, *node.all_input_nodes) if part in values}
            if node.users or node.target is _require or not touched.isdisjoint(needed):
                needed |= touched
            else:
                graph.erase_node(node)


def _put_sizes(graph: fx.Graph, sizes: Sizes) -> None:
    """Replaces the symbolic numbers in a graph by sizes."""

    def size_for(argument: Any) -> Any:
        return sizes.of_number(argument.number) if isinstance(argument, _Symbolic) else argument

    for node in graph.nodes:
        node.args = map_aggregate(node.args, size_for)
        node.kwargs = map_aggregate(node.kwargs, size_for)


def _require(answer: Any, exact: str) -> None:
    if _exact(answer) != exact:
        raise _GuardFailedError


def _exact(number: Any) -> str:
    """Returns a number as text that distinguishes 0.0 from -0.0 and 1 from True, and is equal for NaN."""
    return f"{type(number).__name__} {number.hex() if isinstance(number, float) else number!r}"


def _written(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yields the arguments that an operation writes to."""
    if not func._schema.is_mutable:
        return
    for i, argument in enumerate(func._schema.arguments):
        if argument.is_write:
            yield from _tensors_in(args[i] if i < len(args) else kwargs.get(argument.name))


def _tensors_in(arguments: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor))


def _has_numbers(tensor: Tensor) -> bool:
    """Returns whether a tensor is a real one, not part of the trace, which torch refuses."""
    return type(tensor) is Tensor and not torch._is_functional_tensor(tensor)


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
