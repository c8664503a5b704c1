"""Symbolic sizes of a stage's inputs, and the guards that define for which sizes a trace is valid.

If Python compares a symbol while the module is traced, torch answers with the size of the current input and records the answer as a guard.
So a forward that branches on a size, or converts it to a number, gets one trace per branch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

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
        self.sizes = Sizes(list(symbols), self.values_for(self._given))
        self._condition: str | None = None
        self.pinned: frozenset[Dim] = frozenset()

    def values_for(self, sizes: Sequence[int]) -> Values:
        """Returns the values of the symbols for inputs of these sizes, which must satisfy the guards."""
        return tuple([sizes[position] for position in self._positions])

    def finish(self) -> None:
        """Produces the guards, and releases the state used only for tracing."""
        for guard in self._environment.guards:
            require_whole(guard.expr)
        self.pinned = frozenset((i, d) for i, d in self._dims if _is_number(self._inputs[i].shape[d]))
        asked: list[Any] = list(sizes_of(self._inputs))
        try:
            self._condition = self._environment.produce_guards_expression(asked, ignore_static=False)
        except Exception as error:
            raise NotGeneralError(f"torch has no guards for its sizes ({type(error).__name__})") from error
        if not self.hold_for(self._given):
            raise NotGeneralError("torch's guards do not hold for the inputs of the trace")
        self._inputs, self.tensors = [], []

    def hold_for(self, sizes: Sequence[int]) -> bool:
        """Returns whether the trace is valid for inputs of these sizes."""
        return self._condition is None or bool(self._environment.evaluate_guards_expression(self._condition, sizes))


def _is_number(size: Any) -> bool:
    return isinstance(size, int) or bool(size.node.expr.is_number)
