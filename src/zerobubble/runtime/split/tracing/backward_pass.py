"""Runs the B of a trace and defers its W. The graph is split separately for each set of outputs without a gradient."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from zerobubble.runtime.split.compiled.capture import CapturedPart, Part
from zerobubble.runtime.split.compiled.part import GeneralPart, PartMaker
from zerobubble.runtime.split.graphs.backward_graph import BackwardSplit, split_backward
from zerobubble.runtime.split.graphs.fx_nodes import inputs_of, is_cotangent, num_results
from zerobubble.runtime.split.graphs.missing_cotangents import without_cotangents
from zerobubble.runtime.split.graphs.symbolic_sizes import Values
from zerobubble.runtime.split.tracing.module_tensors import TensorCounts

DeferWork: TypeAlias = Callable[[Part, tuple[int, ...], list[Tensor]], None]
"""Receives the work that a B defers: the function of W, the positions of the parameters of its gradients, and the tensors it reads."""


class BackwardPass:
    """The backward `graph` of a trace, for inputs like `examples`. `split` describes its B and W if no gradient is None.

    With `has_symbols`, the graph has symbolic sizes, and `run` takes their values as the shape of its first tensor.

    `owned` gives the number of parameters, and `weight_only` names the nodes computed only from parameters.
    """

    def __init__(
        self,
        graph: fx.GraphModule,
        examples: Sequence[Any],
        owned: TensorCounts,
        weight_only: Collection[str],
        make_part: PartMaker,
        defer_work: DeferWork,
        *,
        has_symbols: bool = False,
    ) -> None:
        self._has_symbols = has_symbols
        self._graph = graph
        self._examples = examples
        self._owned = owned
        self._weight_only = weight_only
        self._make_part = make_part
        self._defer_work = defer_work
        self._cotangents = [i for i, node in enumerate(inputs_of(graph)) if is_cotangent(node)]
        self._complete = self._split(graph, examples)
        self._without: dict[tuple[int, ...], tuple[_Parts, list[int]]] = {}
        self.split = self._complete.split

    def run(self, tensors: list[Any]) -> Sequence[Any]:
        """Runs B on `tensors`, clears the list, and defers W. Returns the gradients, with None for deferred ones."""
        values = values_held_by(tensors.pop(0)) if self._has_symbols else None
        missing = tuple([i for i in self._cotangents if tensors[i] is None])
        if not missing:
            return self._run_b(self._complete, tensors, values)
        if missing not in self._without:
            pruned = without_cotangents(self._graph, missing)
            self._without[missing] = self._split(pruned.graph, [self._examples[i] for i in pruned.inputs]), pruned.inputs
        parts, positions = self._without[missing]
        taken = [tensors[i] for i in positions]
        tensors.clear()
        return self._run_b(parts, taken, values)

    def _split(self, graph: fx.GraphModule, examples: Sequence[Any]) -> _Parts:
        split = split_backward(graph, self._owned.parameters, self._owned.names(), self._weight_only)
        num_gradients = num_results(graph)
        if self._has_symbols:
            return _Parts(split, self._make_part.general(split.b), self._make_part.general(split.w), num_gradients)
        examples_of_w = [node.meta["val"] for node in inputs_of(split.w)]
        return _Parts(split, self._make_part(split.b, examples, num_gradients), self._make_part(split.w, examples_of_w, 0), num_gradients)

    def _run_b(self, parts: _Parts, tensors: list[Any], values: Values | None) -> Sequence[Any]:
        b, w = _part_for(values, parts.b), _part_for(values, parts.w)
        if isinstance(b, CapturedPart):
            tensors[:] = b.in_static_memory(tensors)
        kept = [tensors[i].detach() for i in parts.split.kept_inputs]  # detached: an input of the stage would keep its gradient alive
        results = b(tensors)
        if parts.split.waiting:
            self._defer_work(w, parts.split.waiting, [*kept, *results[parts.num_gradients :]])
        return results[: parts.num_gradients]


@dataclass
class _Parts:
    """B and W as functions. The first `num_gradients` results of `b` are gradients, the others are kept for `w`."""

    split: BackwardSplit
    b: Part | GeneralPart
    w: Part | GeneralPart
    num_gradients: int


def _part_for(values: Values | None, part: Part | GeneralPart) -> Part:
    """Returns the function of a part, bound to `values` if it has symbolic sizes."""
    if isinstance(part, GeneralPart):
        assert values is not None
        return part.bind(values)
    return part


def holding_values(values: Values) -> Tensor:
    """Returns an empty tensor whose shape encodes the values of symbols, so that a forward can save them for its B like any tensor."""
    return torch.empty((*values, 0), device="cpu")


def values_held_by(tensor: Tensor) -> Values:
    """Returns the values encoded in the shape of such a tensor."""
    return tuple(tensor.shape[:-1])
