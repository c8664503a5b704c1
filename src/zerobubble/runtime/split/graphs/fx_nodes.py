"""Reads and copies graphs of `torch.fx`: what a node is, what it needs, what it costs, and the part of a graph that gives some outputs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry

from zerobubble.runtime.split.weight_flops import GROUPED

_WITH_ADDEND = (torch.ops.aten.addmm, torch.ops.aten.baddbmm)
_SUMS = {torch.ops.aten.sum.default, torch.ops.aten.sum.dim_IntList, torch.ops.aten.clone.default, torch.ops.aten._to_copy.default}


def inputs_of(module: fx.GraphModule) -> list[fx.Node]:
    """The placeholders of a graph, in order."""
    return list(module.graph.find_nodes(op="placeholder"))


def results_of(module: fx.GraphModule) -> list[fx.Node | None]:
    """What a graph gives, in order."""
    output = next(iter(reversed(module.graph.nodes)))
    return list(output.args[0])


def num_results(module: fx.GraphModule) -> int:
    """How many values a graph gives."""
    return len(results_of(module))


def ancestors(ends: Iterable[fx.Node | None], stop: Collection[fx.Node] = ()) -> set[fx.Node]:
    """`ends` and all nodes that they need; what nodes in `stop` need is left out."""
    found: set[fx.Node] = set()
    stops = set(stop)
    stack = without_none(ends)
    while stack:
        node = stack.pop()
        if node in found:
            continue
        found.add(node)
        if node not in stops:
            stack += node.all_input_nodes
    return found


def without_none(values: Iterable[fx.Node | None]) -> list[fx.Node]:
    """The values that are nodes."""
    return [value for value in values if isinstance(value, fx.Node)]


def extract(
    source: fx.GraphModule, inputs: Sequence[fx.Node], outputs: Sequence[fx.Node | None], effects: Iterable[fx.Node] = ()
) -> fx.GraphModule:
    """The part of `source` that computes `outputs` from `inputs`, and runs `effects`, nodes that do something beside giving a value."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    needed = ancestors([*outputs, *effects], inputs)
    for node in source.graph.nodes:
        if node in needed and node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(None if node is None else copies[node] for node in outputs))
    return fx.GraphModule(source, graph)


def names_made_of(graph: fx.GraphModule, sources: Collection[str]) -> set[str]:
    """The names of the inputs among `sources`, and of the nodes that are computed from them alone."""
    found: set[str] = set()
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            is_made = node.name in sources
        else:
            needed = [source.name for source in node.all_input_nodes]
            is_made = bool(needed) and found.issuperset(needed)
        if is_made:
            found.add(node.name)
    return found


def is_cotangent(node: fx.Node) -> bool:
    """Whether an input of a joint or backward graph is the gradient of an output of the forward graph."""
    return "tangents" in node.name


def is_getitem(node: fx.Node) -> bool:
    """Whether a node takes one of the results of another."""
    return node.target is getitem


def is_view(node: fx.Node) -> bool:
    """Whether a node gives a view of what it is given, which takes no memory."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)


def is_pointwise(node: fx.Node) -> bool:
    """Whether a node computes element by element, without random numbers."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) and not is_random(node)


def is_light(node: fx.Node) -> bool:
    """Whether a node takes little time: a view, a pointwise operation, a sum or a copy."""
    return is_view(node) or is_pointwise(node) or is_getitem(node) or node.target in _SUMS


def is_random(node: fx.Node) -> bool:
    """Whether a node draws random numbers. Attention draws them with dropout alone."""
    target: Any = node.target
    if torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ()):
        return False
    names = [argument.name for argument in target._schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return "dropout_p" not in names or given.get("dropout_p", 0.0) != 0.0


def num_bytes(node: fx.Node) -> int:
    """The bytes of a node's value: at least 1 for a tensor, 0 for what is none."""
    value = node.meta.get("val")
    return max(1, value.numel() * value.element_size()) if isinstance(value, Tensor) else 0


def flops(node: fx.Node) -> int:
    """The FLOPs of a matrix product, convolution or attention, at least 1; 0 for every other node."""
    operation: Any = getattr(node.target, "overloadpacket", None)
    count = flop_registry.get(operation) or GROUPED.get(operation)
    if count is None:
        return 0
    args, kwargs = map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
    return max(1, int(count(*args, **kwargs, out_val=node.meta["val"])))


def factors(product: fx.Node) -> list[fx.Node]:
    """The two nodes that a product multiplies, without what it adds to them."""
    has_addend = getattr(product.target, "overloadpacket", None) in _WITH_ADDEND
    given = product.args[1:3] if has_addend else product.args[:2]
    return [argument for argument in given if isinstance(argument, fx.Node)]
