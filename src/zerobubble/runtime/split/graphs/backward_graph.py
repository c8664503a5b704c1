"""Splits the backward graph of a stage into B (gradients of the inputs) and W (gradients of the parameters).

B contains all that the input gradients need. If no input requires grad, B instead contains every product whose result reaches another
product or a non-trivial operation, so that passes take about as long as on other stages. Products that lead only to parameters belong to W.
A minimum cut assigns the remaining nodes so that B keeps as few bytes as possible for W. W recomputes views of kept tensors, and pointwise
operations where that saves bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import inf

import networkx  # type: ignore[import-untyped]
import torch
from torch import Tensor, fx

from zerobubble.runtime.split.graphs.fx_nodes import (
    ancestors,
    extract,
    factors,
    flops,
    inputs_of,
    is_cheap,
    is_getitem,
    is_pointwise,
    is_view,
    num_bytes,
    results_of,
    without_none,
)

_CONVOLUTION = torch.ops.aten.convolution_backward.default


@dataclass(frozen=True)
class BackwardSplit:
    """A backward graph split into B and W.

    `b` has the inputs of the backward graph. It returns the results of the backward graph, with None for deferred gradients, followed by
    the tensors it keeps for W. `w` takes the inputs of the backward graph at the positions `kept_inputs`, followed by the tensors that B
    keeps. It returns the gradients of the parameters at the positions `waiting`.

    Of the `weight_flops` of all products that give weight gradients, `flops_in_w` are in W. `reasons` explains for each other parameter, by
    position, why its gradient is not deferred.
    """

    b: fx.GraphModule
    w: fx.GraphModule
    waiting: tuple[int, ...]
    kept_inputs: tuple[int, ...]
    flops_in_w: int
    weight_flops: int
    reasons: dict[int, str]


def split_backward(backward: fx.GraphModule, num_parameters: int, free: Collection[str], weight_only: Collection[str]) -> BackwardSplit:
    """Splits a backward graph. Its first `num_parameters` results are the gradients of parameters, the others the gradients of inputs.

    `free` names the inputs that cost no memory to keep: the parameters. `weight_only` names the nodes computed only from parameters.
    """
    _divide_convolutions(backward)
    nodes, inputs = list(backward.graph.nodes), inputs_of(backward)
    gradients, of_inputs = results_of(backward)[:num_parameters], results_of(backward)[num_parameters:]
    effects = [node for node in nodes if node.op == "call_function" and node.is_impure()]
    after_products = _after_last_product(nodes, weight_only)

    in_b = ancestors([*_targets_of_b(of_inputs, nodes, after_products), *effects]) | set(inputs)
    in_w = cheapest_for_w(nodes, set(without_none(gradients)), in_b, free)

    waiting = tuple(i for i, node in enumerate(gradients) if node in in_w and node not in in_b)
    late = [gradients[i] for i in waiting]
    at_once = [None if i in waiting else node for i, node in enumerate(gradients)]
    kept = _kept_for(late, nodes, in_w)
    kept_inputs = [node for node in kept if node in inputs]
    kept_of_b = [node for node in kept if node not in inputs]
    weight_products = _weight_products(after_products - ancestors(of_inputs), weight_only)
    return BackwardSplit(
        b=extract(backward, inputs, [*at_once, *of_inputs, *kept_of_b], effects),
        w=extract(backward, [*kept_inputs, *kept_of_b], late),
        waiting=waiting,
        kept_inputs=tuple(inputs.index(node) for node in kept_inputs),
        flops_in_w=sum(map(flops, weight_products & ancestors(late, kept))),
        weight_flops=sum(map(flops, weight_products)),
        reasons=_reasons(at_once, in_b),
    )


def _targets_of_b(of_inputs: Sequence[fx.Node | None], nodes: Sequence[fx.Node], after_products: set[fx.Node]) -> list[fx.Node]:
    """Returns the results that B must compute: the gradients of the inputs or, without any, the products that feed other products."""
    return without_none(of_inputs) or [node for node in nodes if flops(node) and node not in after_products]


def _after_last_product(nodes: Sequence[fx.Node], weight_only: Collection[str]) -> set[fx.Node]:
    """Returns the nodes with no product after them: only views, sums, pointwise operations and products with weights lie between them and
    the results.
    """
    last: set[fx.Node] = set()
    for node in reversed(nodes):
        if all(_leads_to_results(node, user, last, weight_only) for user in node.users):
            last.add(node)
    return last


def _leads_to_results(node: fx.Node, user: fx.Node, after_products: set[fx.Node], weight_only: Collection[str]) -> bool:
    if user.op == "output":
        return True
    others = [source for source in user.all_input_nodes if source is not node]
    return user in after_products and (is_cheap(user) or all(source.name in weight_only for source in others))


def _kept_for(late: Sequence[fx.Node | None], nodes: Sequence[fx.Node], in_w: set[fx.Node]) -> list[fx.Node]:
    """Returns the nodes that W takes from B to compute the results `late`, in graph order. Constants are in both graphs."""
    needed = ancestors(late, [node for node in nodes if node not in in_w])
    return [node for node in nodes if node in needed and node not in in_w and node.op != "get_attr"]


def _weight_products(candidates: set[fx.Node], weight_only: Collection[str]) -> set[fx.Node]:
    """Returns the products among these nodes that give weight gradients: those with no factor computed only from weights."""
    return {node for node in candidates if flops(node) and not any(factor.name in weight_only for factor in factors(node))}


def _divide_convolutions(backward: fx.GraphModule) -> None:
    """Splits each convolution's backward into two nodes: one for the input gradient, one for the parameter gradients."""
    for node in list(backward.graph.nodes):
        if node.target is not _CONVOLUTION:
            continue
        of_input, *of_parameters = node.args[-1]
        if not (of_input and any(of_parameters)):
            continue
        with backward.graph.inserting_after(node):
            late = backward.graph.node_copy(node)
        late.args = (*node.args[:-1], [False, *of_parameters])
        node.args = (*node.args[:-1], [True, False, False])
        for user in list(node.users):
            if user.args[1] > 0:
                user.replace_input_with(node, late)
        values = node.meta["val"]
        node.meta["val"] = (values[0], None, None)
        late.meta["val"] = (None, *values[1:])


def _reasons(gradients: Sequence[fx.Node | None], in_b: set[fx.Node]) -> dict[int, str]:
    """Returns why gradients of parameters are not deferred, by position."""

    def reason(gradient: fx.Node) -> str:
        comes_with_input = gradient in in_b or (is_getitem(gradient) and gradient.args[0] in in_b)
        return "comes with the gradient of the input" if comes_with_input else "deferring it would keep more bytes than the gradient has"

    return {i: reason(gradient) for i, gradient in enumerate(gradients) if gradient is not None}


_SOURCE = "W"
_SINK = "B"
_RECOMPUTE_PRICE = 1 / 16
"""Cost of a byte that W recomputes, relative to a byte that B keeps: a pointwise operation is recomputed only if that saves much memory."""


def cheapest_for_w(nodes: Collection[fx.Node], gradients: set[fx.Node], in_b: set[fx.Node], free: Collection[str]) -> set[fx.Node]:
    """Returns the nodes of a backward graph that W computes.

    W computes or receives the `gradients` of the parameters. `in_b` are the nodes that B needs for the input gradients; all other products
    belong to W. Inputs named in `free`, such as the parameters, are in memory anyway and cost nothing to keep.

    B keeps the fewest bytes at a minimum cut. Costs are on nodes, not edges, so every node becomes two vertices connected by an edge:

    - the vertex "computed" is on W's side if W computes the node;
    - the vertex "available" is on W's side if W has the node's value, computed by W or kept by B;
    - the edge between them is cut if B keeps the value, at a cost of its bytes.

    The source is W and the sink is B, not the reverse. Of several minimum cuts, `networkx` returns the one nearest to the sink. With this
    orientation, W computes as much as it can at the minimum cost.
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
