"""Symbolic sizes of a stage's inputs, and the guards that define for which sizes a trace is valid.

If Python compares a symbol while the module is traced, torch answers with the size of the current input and records the answer as a guard.
So a forward that branches on a size, or converts it to a number, gets one trace per branch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from zerobubble.runtime.split.graphs.symbolic_sizes import NotGeneralError, Sizes, Values, require_whole

Dim = tuple[int, int]
"""The index of an input and of one of its dimensions."""


def sizes_of(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    """Returns the shapes and strides of inputs, concatenated."""
    return tuple([size for tensor in tensors for size in (*tensor.shape, *tensor.stride())])


class Symbols:
    """Fake tensors for the `inputs` of a module that owns the tensors `owned`, with symbols for their dimensions `dims`.

    Trace with `tensors`; `sizes` converts symbolic sizes of the trace. After tracing, `finish` produces the guards, and `pinned` are the
    dimensions that the guards fix to their size in the trace.
    """

    def __init__(self, owned: Sequence[Tensor], inputs: Sequence[Tensor], dims: Collection[Dim]) -> None:
        from torch._dynamo.source import LocalSource

        self._environment = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
        self._fakes = FakeTensorMode(shape_env=self._environment)
        self._given = sizes_of(inputs)
        self._dims = dims
        self._inputs: list[Tensor] = []
        for i, tensor in enumerate(inputs):
            dynamic = [DimDynamic.DYNAMIC if (i, d) in dims else DimDynamic.STATIC for d in range(tensor.dim())]
            context: Any = StatelessSymbolicContext(dynamic_sizes=dynamic)
            self._inputs.append(
                self._fakes.from_tensor(tensor, static_shapes=False, symbolic_context=context, source=LocalSource(f"input{i}"))
            )
        self.tensors = [*(self._fakes.from_tensor(tensor, static_shapes=True) for tensor in owned), *self._inputs]
        symbols: dict[Any, int] = {}
        for position, size in enumerate(sizes_of(self._inputs)):
            if not isinstance(size, int) and size.node.expr.is_Symbol:
                symbols.setdefault(size.node.expr, position)
        self._positions = tuple(symbols.values())
        self._order = tuple(symbols)
        self.sizes = Sizes(self._order, self.values_for(self._given))
        self._formulas: tuple[Any, ...] = ()
        self._guards: tuple[Any, ...] = ()
        self.pinned: frozenset[Dim] = frozenset()

    def values_for(self, sizes: Sequence[int]) -> Values:
        """Returns the values of the symbols for inputs of these sizes, which must satisfy the guards."""
        return tuple([sizes[position] for position in self._positions])

    def finish(self) -> None:
        """Produces the guards, and releases the state used only for tracing."""
        self.pinned = frozenset((i, d) for i, d in self._dims if _is_number(self._inputs[i].shape[d]))
        self._formulas = tuple([sympy.Integer(size) if isinstance(size, int) else size.node.expr for size in sizes_of(self._inputs)])
        self._guards = tuple(dict.fromkeys((*self._ranges(), *(guard.expr for guard in self._environment.guards))))
        for expression in (*self._formulas, *self._guards):
            require_whole(expression)
            if not expression.free_symbols.issubset(self._order):
                raise NotGeneralError(f"a size or a branch ({expression}) is no formula of the sizes of the inputs")
        if not self.hold_for(self._given):
            raise NotGeneralError("torch's guards do not hold for the inputs of the trace")
        self._inputs, self.tensors = [], []

    def hold_for(self, sizes: Sequence[int]) -> bool:
        """Returns whether the trace is valid for inputs of these sizes.

        Evaluates expressions, not text: torch's own function joins guards with `and`, without parentheses around an `or`.
        """
        values = dict(zip(self._order, map(sympy.Integer, self.values_for(sizes)), strict=True))
        try:
            fits = all(formula.xreplace(values) == size for formula, size in zip(self._formulas, sizes, strict=True))
            return fits and all(guard.xreplace(values) == sympy.true for guard in self._guards)
        except (ZeroDivisionError, AssertionError):  # outside of the domain of a function in a guard, such as a remainder of 0
            return False

    def _ranges(self) -> Iterator[Any]:
        """Yields the bounds that torch assumes for the symbols."""
        for symbol in self._order:
            bounds = self._environment.var_to_range[symbol]
            yield from (bound for bound in (sympy.Ge(symbol, bounds.lower), sympy.Le(symbol, bounds.upper)) if bound != sympy.true)


def _is_number(size: Any) -> bool:
    return isinstance(size, int) or bool(size.node.expr.is_number)
