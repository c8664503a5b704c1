"""Which nodes of a backward graph W computes, so that what B keeps for W has the fewest bytes: a minimum cut.

Every node of the graph becomes two ends with an edge between them, as is usual where nodes and not edges have a price:

- the end "computed" is on W's side where W computes the node;
- the end "available" is on W's side where W has its value, computed by W or kept by B;
- the edge between them is cut where B keeps the value, at the price of its bytes.

The source is W and the sink is B, not the other way round: of several minimum cuts `networkx` gives the one nearest to the sink, so that W
computes as much as it can at that price.
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
"""What a byte costs that W computes again though B has computed it, as a share of a byte kept: a pointwise operation is repeated where
that keeps much less."""


def cheapest_for_w(nodes: Collection[fx.Node], gradients: set[fx.Node], in_b: set[fx.Node], free: Collection[str]) -> set[fx.Node]:
    """Which of `nodes`, those of a backward graph, W computes.

    W must have the `gradients` of the parameters. `in_b` are the nodes that B computes for the gradients of its inputs; all products
    beside them are W's. Inputs named in `free`, such as the parameters, are in memory anyway and cost nothing to keep.
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
    """Add a node with its price of `keeping`. Edges without a capacity are never cut."""
    network.add_edge(_available(node), _computed(node), capacity=keeping)
    for source in node.all_input_nodes:
        if source.op != "get_attr":
            network.add_edge(_computed(node), _available(source))  # W computes only what it has all inputs of
            if source not in in_b:
                network.add_edge(_computed(source), _computed(node))  # B takes nothing from W
    if node in in_b:
        network.add_edge(_computed(node), _SINK, capacity=_price_of_recomputing(node))
    elif flops(node):
        network.add_edge(_SOURCE, _computed(node))


def _price_of_keeping(node: fx.Node, free: Collection[str]) -> float:
    """The bytes that B holds for W. A view is never kept, for it would hold all that it is a view of, nor is what is no tensor."""
    if node.name in free:
        return 0.0
    if node.op != "placeholder" and (is_view(node) or not isinstance(node.meta.get("val"), Tensor)):
        return inf
    return float(num_bytes(node))


def _price_of_recomputing(node: fx.Node) -> float:
    """The price of computing in W what B has computed, too: nothing for a view, little for a pointwise operation, others never."""
    if node.op == "placeholder":
        return inf
    if is_view(node) or is_getitem(node):
        return 0.0
    return _RECOMPUTE_PRICE * num_bytes(node) if is_pointwise(node) else inf
