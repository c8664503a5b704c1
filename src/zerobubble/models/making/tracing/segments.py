"""Finds where a graph of operations can be cut: before operations with parameters, where few tensors cross."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from zerobubble.errors import InputError
from zerobubble.units import counted

_MOST = 128
"""Maximum number of segments, in addition to 8 per stage."""

_aten = torch.ops.aten
_PRODUCTS: dict[Any, Any] = {
    _aten.linear.default: torch.nn.functional.linear,
    _aten.matmul.default: torch.matmul,
    _aten.mm.default: torch.mm,
    _aten.bmm.default: torch.bmm,
    _aten.addmm.default: torch.addmm,
    _aten.baddbmm.default: torch.baddbmm,
}
"""Matrix products, mapped to the functions whose weight gradients a stage can defer."""


@dataclass(frozen=True)
class Segment:
    """Consecutive operations: the positions of their nodes in the graph, of their inputs, and of their results used elsewhere."""

    nodes: tuple[int, ...]
    parameters: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def cut_graph(graph: Graph, parameters: Collection[Node], num_stages: int) -> tuple[Segment, list[Segment]]:
    """Returns the operations on the model's arguments that every stage computes, and the operations with parameters in segments.

    Raises `InputError` if there are fewer than `num_stages` possible starts of a segment.
    """
    nodes = list(graph.nodes)
    place = {node: number for number, node in enumerate(nodes)}
    staged = _needing_parameters(nodes, parameters)
    body = [node for node in nodes if node.op == "call_function" and node in staged]
    before = [node for node in nodes if node.op == "call_function" and node not in staged]
    starts = _starts(body, parameters, num_stages)
    if len(starts) < num_stages:
        raise InputError(
            "torch.export finds operations with parameters for only {stages}",
            stages=counted(len(starts), "stage"),
            num_starts=len(starts),
            num_stages=num_stages,
        )
    runs = [before, *(body[first:end] for first, end in pairwise([*starts, len(body)]))]
    made = [_segment(run, parameters, place) for run in runs]
    return made[0], made[1:]


def _needing_parameters(nodes: Sequence[Node], parameters: Collection[Node]) -> set[Node]:
    """Returns the nodes that only one stage may run: those that depend on parameters, draw random numbers, or mutate inputs."""
    found = set(parameters)
    for node in nodes:
        tags, schema = getattr(node.target, "tags", ()), getattr(node.target, "_schema", None)
        is_of_one_stage = torch.Tag.nondeterministic_seeded in tags or getattr(schema, "is_mutable", False)
        if node.op == "call_function" and (is_of_one_stage or not found.isdisjoint(node.all_input_nodes)):
            found.add(node)
    return found


def _starts(body: Sequence[Node], parameters: Collection[Node], num_stages: int) -> list[int]:
    """Returns the operations in `body` at which segments begin: few tensors cross them, and enough places to cut remain."""
    uses = [number for number, node in enumerate(body) if number and not set(parameters).isdisjoint(node.all_input_nodes)]
    widths = _widths(body)
    found = [0] if body else []
    for width in sorted({widths[number] for number in uses}):
        found = [0, *(number for number in uses if widths[number] <= width)]
        if len(found) >= 2 * num_stages:
            break
    thin = max(1, -(-len(found) // max(_MOST, 8 * num_stages)))
    return found[::thin]


def _widths(body: Sequence[Node]) -> list[int]:
    """Returns for each operation how many earlier results it or later operations use."""
    place = {node: number for number, node in enumerate(body)}
    widths = [0] * (len(body) + 1)
    for number, node in enumerate(body):
        end = max((place.get(user, len(body)) for user in node.users), default=number)
        value = node.meta.get("val")
        count = len(value) if isinstance(value, (tuple, list)) else isinstance(value, Tensor)
        for between in range(number + 1, end + 1):
            widths[between] += count
    return widths


def _segment(run: Sequence[Node], parameters: Collection[Node], place: dict[Node, int]) -> Segment:
    own = set(run)
    given = list(dict.fromkeys(each for node in run for each in node.all_input_nodes if each not in own and each.op != "get_attr"))
    used = [node for node in run if any(user not in own for user in node.users)]
    return Segment(
        tuple(place[node] for node in run),
        tuple(place[node] for node in given if node in parameters),
        tuple(place[node] for node in given if node not in parameters),
        tuple(place[node] for node in used),
    )


def graph_of(segment: Segment, nodes: Sequence[Node], owner: torch.nn.Module) -> torch.fx.GraphModule:
    """Returns the operations of `segment` as a module, called with its parameters and inputs. `owner` has the attributes they look up."""
    graph = Graph()
    made: dict[Node, Node] = {}
    for number in (*segment.parameters, *segment.inputs):
        made[nodes[number]] = graph.placeholder(nodes[number].name)

    def copied(node: Node) -> Node:
        if node not in made and node.op == "get_attr":
            made[node] = graph.get_attr(str(node.target))
        return made[node]

    for number in segment.nodes:
        made[nodes[number]] = graph.node_copy(nodes[number], copied)
        made[nodes[number]].target = _PRODUCTS.get(nodes[number].target, nodes[number].target)
    graph.output(tuple(made[nodes[number]] for number in segment.outputs))
    return torch.fx.GraphModule(owner, graph)
