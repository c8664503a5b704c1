"""Partitions the joint graph of AOTAutograd into a forward and a backward graph.

The partition follows the trace: a node belongs to the forward if it existed when the forward had been traced. AOTAutograd's min-cut
partitioner minimizes memory instead, and may move work between the passes. That would change the times that the schedule was planned for.
"""

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
    """The `names` of the nodes that existed in the joint graph when the module's forward had been traced, before its backward.

    `checkpoint_of` maps the names of those made in a checkpoint to that checkpoint.
    """

    names: Collection[str] = frozenset()
    checkpoint_of: CheckpointOf = field(default_factory=dict)


def forward_and_backward(
    joint: fx.GraphModule, num_outputs: int, traced: ForwardNodes, *, redraw: bool
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Returns the forward graph, with the first `num_outputs` results of `joint` and saved values, and the backward graph for the other
    results.

    The forward graph has the nodes that were `traced` with the forward, and all that its outputs need. The backward graph takes the saved
    values and the cotangents, and recomputes the nodes of checkpoints. With `redraw`, it also redraws the random numbers of a checkpoint;
    otherwise the forward saves them.

    Raises `InputError` if the backward pass draws random numbers, since autograd would draw them in another order.
    """
    forward = _forward_nodes(joint, num_outputs, traced.names)
    if traced.checkpoint_of:
        forward = recompute_in_backward(joint, forward, traced.checkpoint_of, redraw=redraw)
    outputs, gradients = results_of(joint)[:num_outputs], results_of(joint)[num_outputs:]
    backward = ancestors(gradients, forward) - forward
    _refuse_random_numbers(joint, backward)
    saved = _saved_for(backward, gradients, forward, joint)
    inputs = [node for node in inputs_of(joint) if not is_cotangent(node)]
    cotangents = [node for node in inputs_of(joint) if is_cotangent(node)]
    # Unused random numbers are drawn too: they advance torch's generator, as in eager mode.
    draws = [node for node in joint.graph.nodes if node in forward and is_random(node)]
    return extract(joint, inputs, [*outputs, *saved], draws), extract(joint, [*saved, *cotangents], gradients)


def _forward_nodes(joint: fx.GraphModule, num_outputs: int, names: Collection[str]) -> set[fx.Node]:
    """Returns the nodes of the forward graph: the nodes in `names`, and all nodes that the first `num_outputs` results need."""
    nodes = list(joint.graph.nodes)
    forward = ancestors(results_of(joint)[:num_outputs])
    forward.update(node for node in nodes if node.name in names)
    forward.update(inputs_of(joint))
    forward.difference_update(node for node in inputs_of(joint) if is_cotangent(node))  # cotangents existed too when the forward was traced
    # A node that selects one of several results stays with the operation.
    for node in nodes:
        if is_getitem(node) and node.args[0] in forward:
            forward.add(node)
    return forward


def _refuse_random_numbers(joint: fx.GraphModule, backward: set[fx.Node]) -> None:
    for node in joint.graph.nodes:
        if node in backward and is_random(node):
            raise InputError("its backward pass draws random numbers ({operation})", operation=str(node.target))


def _saved_for(backward: set[fx.Node], gradients: list[fx.Node | None], forward: set[fx.Node], joint: fx.GraphModule) -> list[fx.Node]:
    """Returns the values that the backward graph takes from the forward graph, in the order of the joint graph.

    Constants (`get_attr`) are in both graphs, so they are not saved. A gradient computed in the forward is saved like other values.
    """
    used = {source for node in backward for source in node.all_input_nodes}
    used.update(without_none(gradients))
    return [node for node in joint.graph.nodes if node in used and node in forward and node.op != "get_attr"]
