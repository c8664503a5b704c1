"""The backward graph of a stage in two: B, which gives the gradients of the inputs, and W, which gives those of the parameters.

B is what the gradients of the inputs need. Where no input has one, B is the chain that leads back through the stage all the same: every
product whose result goes on to another product or to an operation of its own, so that passes weigh as on other stages. What is left is
on either side, as a minimum cut over the bytes that B keeps for W decides. Products that lead to parameters alone are always W's. W
computes views again from what is kept, and pointwise operations where that saves bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from zerobubble.runtime.split.graphs.fx_nodes import (
    ancestors,
    extract,
    factors,
    flops,
    inputs_of,
    is_getitem,
    is_light,
    results_of,
    without_none,
)
from zerobubble.runtime.split.graphs.min_cut import cheapest_for_w

_CONVOLUTION = torch.ops.aten.convolution_backward.default


@dataclass(frozen=True)
class BackwardSplit:
    """A backward graph as B and W.

    `b` takes what the backward graph takes. It gives what the backward graph gives, with None for the gradients that wait, and behind it
    the tensors that it keeps for W. `w` takes the inputs of the backward graph at the positions `kept_inputs`, and then what B keeps. It
    gives the gradients of the parameters at the positions `waiting`.

    `flops_in_w` of `weight_flops` are those of the products that give weight gradients. `reasons` says for each other parameter, by its
    position, why its gradient does not wait.
    """

    b: fx.GraphModule
    w: fx.GraphModule
    waiting: tuple[int, ...]
    kept_inputs: tuple[int, ...]
    flops_in_w: int
    weight_flops: int
    reasons: dict[int, str]


def split_backward(backward: fx.GraphModule, num_parameters: int, free: Collection[str], made_of_weights: Collection[str]) -> BackwardSplit:
    """Split a backward graph whose first `num_parameters` results are the gradients of parameters, and the others those of inputs.

    `free` names the inputs that cost nothing to keep: parameters, which are there anyway. `made_of_weights` names the nodes that are
    computed from parameters alone.
    """
    _divide_convolutions(backward)
    nodes, inputs = list(backward.graph.nodes), inputs_of(backward)
    gradients, of_inputs = results_of(backward)[:num_parameters], results_of(backward)[num_parameters:]
    effects = [node for node in nodes if node.op == "call_function" and node.is_impure()]
    after_products = _after_all_products(nodes, made_of_weights)

    in_b = ancestors([*_ends_of_b(of_inputs, nodes, after_products), *effects]) | set(inputs)
    in_w = cheapest_for_w(nodes, set(without_none(gradients)), in_b, free)

    waiting = tuple(i for i, node in enumerate(gradients) if node in in_w and node not in in_b)
    late = [gradients[i] for i in waiting]
    at_once = [None if i in waiting else node for i, node in enumerate(gradients)]
    kept = _kept_for(late, nodes, in_w)
    kept_inputs = [node for node in kept if node in inputs]
    kept_of_b = [node for node in kept if node not in inputs]
    weight_products = _weight_products(after_products - ancestors(of_inputs), made_of_weights)
    return BackwardSplit(
        b=extract(backward, inputs, [*at_once, *of_inputs, *kept_of_b], effects),
        w=extract(backward, [*kept_inputs, *kept_of_b], late),
        waiting=waiting,
        kept_inputs=tuple(inputs.index(node) for node in kept_inputs),
        flops_in_w=sum(flops(node) for node in weight_products & ancestors(late, kept)),
        weight_flops=sum(flops(node) for node in weight_products),
        reasons={i: _reason(node, in_b) for i, node in enumerate(at_once) if node is not None},
    )


def _ends_of_b(of_inputs: Sequence[fx.Node | None], nodes: Sequence[fx.Node], after_products: set[fx.Node]) -> list[fx.Node]:
    """What B is there for: the gradients of the inputs or, without any, the products whose results go on to other products."""
    return without_none(of_inputs) or [node for node in nodes if flops(node) and node not in after_products]


def _after_all_products(nodes: Sequence[fx.Node], made_of_weights: Collection[str]) -> set[fx.Node]:
    """The nodes behind which no more products come: results follow by views, sums, pointwise operations and products with weights alone."""
    found: set[fx.Node] = set()
    for node in reversed(nodes):
        if all(_leads_to_results(node, user, found, made_of_weights) for user in node.users):
            found.add(node)
    return found


def _leads_to_results(node: fx.Node, user: fx.Node, after_products: set[fx.Node], made_of_weights: Collection[str]) -> bool:
    if user.op == "output":
        return True
    others = [source for source in user.all_input_nodes if source is not node]
    return user in after_products and (is_light(user) or all(source.name in made_of_weights for source in others))


def _kept_for(late: Sequence[fx.Node | None], nodes: Sequence[fx.Node], in_w: set[fx.Node]) -> list[fx.Node]:
    """What W takes from B to compute the results `late`, in the order of the graph. Constants are in both."""
    needed = ancestors(late, [node for node in nodes if node not in in_w])
    return [node for node in nodes if node in needed and node not in in_w and node.op != "get_attr"]


def _weight_products(candidates: set[fx.Node], made_of_weights: Collection[str]) -> set[fx.Node]:
    """Of these nodes the products that give gradients of weights: those of two tensors that are not made of weights alone."""
    return {node for node in candidates if flops(node) and not any(factor.name in made_of_weights for factor in factors(node))}


def _divide_convolutions(backward: fx.GraphModule) -> None:
    """Make each convolution's backward two nodes, one for the gradient of its input and one for those of its parameters."""
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


def _reason(gradient: fx.Node, in_b: set[fx.Node]) -> str:
    """Why the gradient of a parameter does not wait."""
    if gradient in in_b or (is_getitem(gradient) and gradient.args[0] in in_b):
        return "comes with the gradient of the input"
    return "waiting would keep more bytes than the gradient has"
