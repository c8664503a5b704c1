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
class GraphSegment:
    """Consecutive operations: the positions of their nodes in the graph, of their inputs, and of their results used elsewhere."""

    nodes: tuple[int, ...]
    parameters: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def cut_graph(graph: Graph, parameters: Collection[Node], num_stages: int) -> tuple[GraphSegment, list[GraphSegment]]:
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
    segments = [_segment(run, parameters, place) for run in runs]
    return segments[0], segments[1:]


def _needing_parameters(nodes: Sequence[Node], parameters: Collection[Node]) -> set[Node]:
    """Returns the nodes that only one stage may run, because they depend on parameters, draw random numbers, or mutate inputs."""
    staged = set(parameters)
    for node in nodes:
        tags, schema = getattr(node.target, "tags", ()), getattr(node.target, "_schema", None)
        is_of_one_stage = torch.Tag.nondeterministic_seeded in tags or getattr(schema, "is_mutable", False)
        if node.op == "call_function" and (is_of_one_stage or not staged.isdisjoint(node.all_input_nodes)):
            staged.add(node)
    return staged


def _starts(body: Sequence[Node], parameters: Collection[Node], num_stages: int) -> list[int]:
    """Returns the operations in `body` at which segments begin: few tensors cross them, and enough places to cut remain."""
    uses = [number for number, node in enumerate(body) if number and not set(parameters).isdisjoint(node.all_input_nodes)]
    widths = _widths(body)
    starts = [0] if body else []
    for width in sorted({widths[number] for number in uses}):
        starts = [0, *(number for number in uses if widths[number] <= width)]
        if len(starts) >= 2 * num_stages:
            break
    thin = max(1, -(-len(starts) // max(_MOST, 8 * num_stages)))
    return starts[::thin]


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


def _segment(run: Sequence[Node], parameters: Collection[Node], place: dict[Node, int]) -> GraphSegment:
    members = set(run)
    sources = dict.fromkeys(source for node in run for source in node.all_input_nodes)
    inputs = [source for source in sources if source not in members and source.op != "get_attr"]
    used = [node for node in run if any(user not in members for user in node.users)]
    return GraphSegment(
        tuple(place[node] for node in run),
        tuple(place[node] for node in inputs if node in parameters),
        tuple(place[node] for node in inputs if node not in parameters),
        tuple(place[node] for node in used),
    )


def graph_of(segment: GraphSegment, nodes: Sequence[Node], owner: torch.nn.Module) -> torch.fx.GraphModule:
    """Returns the operations of `segment` as a module, called with its parameters and inputs. `owner` has the attributes they look up."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    for number in (*segment.parameters, *segment.inputs):
        copies[nodes[number]] = graph.placeholder(nodes[number].name)

    def copied(node: Node) -> Node:
        if node not in copies and node.op == "get_attr":
            copies[node] = graph.get_attr(str(node.target))
        return copies[node]

    for number in segment.nodes:
        copies[nodes[number]] = graph.node_copy(nodes[number], copied)
        copies[nodes[number]].target = _PRODUCTS.get(nodes[number].target, nodes[number].target)
    graph.output(tuple(copies[nodes[number]] for number in segment.outputs))
    return torch.fx.GraphModule(owner, graph)
