"""Assigns the nodes of a backward graph to W so that B keeps the fewest bytes for it: a minimum cut.

Costs are on nodes, not edges, so every node becomes two vertices connected by an edge:

- the vertex "computed" is on W's side if W computes the node;
- the vertex "available" is on W's side if W has the node's value, computed by W or kept by B;
- the edge between them is cut if B keeps the value, at a cost of its bytes.

The source is W and the sink is B, not the reverse. Of several minimum cuts, `networkx` returns the one nearest to the sink. With this
orientation, W computes as much as it can at the minimum cost.
"""

from __future__ import annotations

from collections.abc import Collection
from math import inf

import networkx  # type: ignore[import-untyped]
from torch import Tensor, fx

from zerobubble.runtime.split.graphs.fx_nodes import flops, is_getitem, is_pointwise, is_view, num_bytes

_SOURCE = "W"
_SINK = "B"
_RECOMPUTE_PRICE = 1 / 16
"""Cost of a byte that W recomputes, relative to a byte that B keeps: a pointwise operation is recomputed only if that saves much memory."""


def cheapest_for_w(nodes: Collection[fx.Node], gradients: set[fx.Node], in_b: set[fx.Node], free: Collection[str]) -> set[fx.Node]:
    """Returns which of `nodes`, those of a backward graph, W computes.

    W must have the `gradients` of the parameters. `in_b` are the nodes that B needs for the input gradients; all other products belong to
    W. Inputs named in `free`, such as the parameters, are in memory anyway and cost nothing to keep.
    """
    network = networkx.DiGraph()
    network.add_nodes_from((_SOURCE, _SINK))
    for node in nodes:
        if node.op not in ("output", "get_attr"):
            keeping = 0.0 if node in gradients else _price_of_keeping(node, free)
            _add(network, node, in_b, keeping)
            if node in gradients:
                network.add_edge(_SOURCE, _available(node))
    in_w, _ = networkx.minimum_cut(network, _SOURCE, _SINK)[1]
    return {node for node in nodes if _computed(node) in in_w}


def _computed(node: fx.Node) -> tuple[str, fx.Node]:
    return "computed", node


def _available(node: fx.Node) -> tuple[str, fx.Node]:
    return "available", node


def _add(network: networkx.DiGraph, node: fx.Node, in_b: set[fx.Node], keeping: float) -> None:
    """Adds a node with the cost of `keeping` it. Edges without a capacity are never cut."""
    network.add_edge(_available(node), _computed(node), capacity=keeping)
    for source in node.all_input_nodes:
        if source.op != "get_attr":
            network.add_edge(_computed(node), _available(source))  # W computes a node only if it has all inputs
            if source not in in_b:
                network.add_edge(_computed(source), _computed(node))  # B takes nothing from W
    if node in in_b:
        network.add_edge(_computed(node), _SINK, capacity=_price_of_recomputing(node))
    elif flops(node):
        network.add_edge(_SOURCE, _computed(node))


def _price_of_keeping(node: fx.Node, free: Collection[str]) -> float:
    """Returns the bytes that B would keep for W. Views and non-tensors are never kept: a view would keep its base alive."""
    if node.name in free:
        return 0.0
    if node.op != "placeholder" and (is_view(node) or not isinstance(node.meta.get("val"), Tensor)):
        return inf
    return float(num_bytes(node))


def _price_of_recomputing(node: fx.Node) -> float:
    """Returns the cost of recomputing in W: zero for a view, small for a pointwise operation, infinite for others."""
    if node.op == "placeholder":
        return inf
    if is_view(node) or is_getitem(node):
        return 0.0
    return _RECOMPUTE_PRICE * num_bytes(node) if is_pointwise(node) else inf
