"""Prunes a backward graph for outputs whose gradient is None, because a later stage or the loss ignores them."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import fx

from zerobubble.runtime.split.graphs.fx_nodes import ancestors, extract, inputs_of, is_cotangent, results_of
from zerobubble.runtime.split.graphs.symbolic_sizes import shape_of


class Pruned(NamedTuple):
    """A backward graph without some cotangents, and the positions of the original inputs that it still takes."""

    graph: fx.GraphModule
    inputs: list[int]


def without_cotangents(backward: fx.GraphModule, missing: Collection[int]) -> Pruned:
    """Returns the backward graph with None for the cotangents at positions `missing`.

    The rules are the same as autograd's: a node that depends only on None is None, a sum of two gradients becomes the other one, and other
    operations take zeros.
    """
    inputs = inputs_of(backward)
    pruning = _Pruning({inputs[position] for position in missing}, inputs)
    for node in backward.graph.nodes:
        if node.op != "output":
            pruning.visit(node)
    results = tuple(pruning.copies.get(result) if result is not None else None for result in results_of(backward))
    pruning.graph.output(results)
    needed = ancestors(results)
    taken = [i for i, node in enumerate(inputs) if pruning.copies.get(node) in needed]
    module = fx.GraphModule(backward, pruning.graph)
    return Pruned(extract(module, [pruning.copies[inputs[i]] for i in taken], results), taken)


class _Pruning:
    """Copies a backward graph node by node into `graph`; nodes that are None have no entry in `copies`."""

    def __init__(self, missing: set[fx.Node], inputs: list[fx.Node]) -> None:
        self.graph = fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}
        self._none = set(missing)
        self._zeros: dict[fx.Node, fx.Node] = {}
        self._follows_from_gradient = {node for node in inputs if is_cotangent(node)} - missing

    def visit(self, node: fx.Node) -> None:
        """Copies the next node, in graph order."""
        sources = node.all_input_nodes
        has_none = not self._none.isdisjoint(sources)
        has_gradient = not self._follows_from_gradient.isdisjoint(sources)
        if node in self._none or (has_none and not has_gradient):
            self._none.add(node)
            return
        if has_gradient:
            self._follows_from_gradient.add(node)
        if has_none and _adds_gradients(node):
            self.copies[node] = next(self.copies[source] for source in sources if source not in self._none)
            return
        for source in sources:
            if source in self._none and source not in self._zeros:
                self._zeros[source] = self._zeros_like(source)
        self.copies[node] = self.graph.node_copy(node, lambda source: self._zeros[source] if source in self._none else self.copies[source])

    def _zeros_like(self, node: fx.Node) -> fx.Node:
        value = node.meta["val"]
        kind = {"dtype": value.dtype, "device": value.device}
        zeros = self.graph.call_function(torch.ops.aten.full.default, (shape_of(node), 0), kind)
        zeros.meta = {name: node.meta[name] for name in ("val", "shape") if name in node.meta}
        return zeros


def _adds_gradients(node: fx.Node) -> bool:
    """Returns whether a node adds two tensors of the same shape, as autograd accumulates gradients."""
    shapes = {source.meta["val"].shape for source in node.all_input_nodes}
    return node.target is torch.ops.aten.add.Tensor and len(shapes) == 1
