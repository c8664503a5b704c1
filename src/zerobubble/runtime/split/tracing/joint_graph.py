"""Divides the joint graph that AOTAutograd traces, of a forward and its backward pass together, into a forward and a backward graph."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from torch import fx

from zerobubble.errors import InputError
from zerobubble.runtime.split.graphs.fx_nodes import (
    ancestors,
    extract,
    inputs_of,
    is_cotangent,
    is_getitem,
    is_random,
    results_of,
    without_none,
)
from zerobubble.runtime.split.tracing.recompute import CheckpointOf, recompute_in_backward


@dataclass
class ForwardNodes:
    """The `names` of the nodes of a joint graph that were there when the module's forward, and not yet its backward pass, had been traced.

    `checkpoint_of` tells of those made in a checkpoint in which one.
    """

    names: Collection[str] = frozenset()
    checkpoint_of: CheckpointOf = field(default_factory=dict)


def forward_and_backward(
    joint: fx.GraphModule, num_outputs: int, traced: ForwardNodes, *, draw_again: bool
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward graph, which gives the first `num_outputs` results of `joint` and saved values, and the backward graph for the others.

    The forward graph has the nodes that were `traced` with the forward, and all that its outputs need. The backward graph takes the saved
    values and the cotangents, and computes again what was made in checkpoints. Random numbers of a checkpoint it draws again with
    `draw_again`; otherwise the forward saves them.

    Raises `InputError` where the backward pass draws random numbers, which autograd draws in another order.
    """
    forward = _forward_nodes(joint, num_outputs, traced.names)
    if traced.checkpoint_of:
        forward = recompute_in_backward(joint, forward, traced.checkpoint_of, draw_again=draw_again)
    outputs, gradients = results_of(joint)[:num_outputs], results_of(joint)[num_outputs:]
    backward = ancestors(gradients, forward) - forward
    _refuse_random_numbers(joint, backward)
    saved = _saved_for(backward, gradients, forward, joint)
    inputs = [node for node in inputs_of(joint) if not is_cotangent(node)]
    cotangents = [node for node in inputs_of(joint) if is_cotangent(node)]
    # Numbers that nobody uses are drawn, too: they move torch's generator on, as they do in eager mode.
    draws = [node for node in joint.graph.nodes if node in forward and is_random(node)]
    return extract(joint, inputs, [*outputs, *saved], draws), extract(joint, [*saved, *cotangents], gradients)


def _forward_nodes(joint: fx.GraphModule, num_outputs: int, names: Collection[str]) -> set[fx.Node]:
    """The nodes that the forward graph takes or computes: those with `names`, and all that the first `num_outputs` results need."""
    nodes = list(joint.graph.nodes)
    forward = ancestors(results_of(joint)[:num_outputs])
    forward.update(node for node in nodes if node.name in names)
    forward.update(inputs_of(joint))
    forward.difference_update(node for node in inputs_of(joint) if is_cotangent(node))  # which were there, too, when it was traced
    # Where an operation has several results, each is taken by a node of its own, which goes where the operation goes.
    for node in nodes:
        if is_getitem(node) and node.args[0] in forward:
            forward.add(node)
    return forward


def _refuse_random_numbers(joint: fx.GraphModule, backward: set[fx.Node]) -> None:
    for node in joint.graph.nodes:
        if node in backward and is_random(node):
            raise InputError(f"its backward pass draws random numbers ({node.target})")


def _saved_for(backward: set[fx.Node], gradients: list[fx.Node | None], forward: set[fx.Node], joint: fx.GraphModule) -> list[fx.Node]:
    """The values that the backward graph takes from the forward graph, in the order of the joint graph.

    Constants (`get_attr`) are in both graphs, so they are not saved. A gradient that the forward computes is passed on like other values.
    """
    used = {source for node in backward for source in node.all_input_nodes}
    used.update(without_none(gradients))
    return [node for node in joint.graph.nodes if node in used and node in forward and node.op != "get_attr"]
