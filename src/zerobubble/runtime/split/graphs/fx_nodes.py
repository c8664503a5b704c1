"""Queries on `torch.fx` nodes (kind, inputs, cost), and extraction of subgraphs."""

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
_SUMS_AND_COPIES = {
    torch.ops.aten.sum.default,
    torch.ops.aten.sum.dim_IntList,
    torch.ops.aten.clone.default,
    torch.ops.aten._to_copy.default,
}


def inputs_of(module: fx.GraphModule) -> list[fx.Node]:
    """Returns the placeholders of a graph, in order."""
    return list(module.graph.find_nodes(op="placeholder"))


def results_of(module: fx.GraphModule) -> list[fx.Node | None]:
    """Returns the results of a graph, in order."""
    output = next(iter(reversed(module.graph.nodes)))
    return list(output.args[0])


def num_results(module: fx.GraphModule) -> int:
    """Returns the number of results of a graph."""
    return len(results_of(module))


def ancestors(ends: Iterable[fx.Node | None], stop: Collection[fx.Node] = ()) -> set[fx.Node]:
    """Returns `ends` and all their ancestors, without passing through nodes in `stop`."""
    reached: set[fx.Node] = set()
    stops = set(stop)
    stack = without_none(ends)
    while stack:
        node = stack.pop()
        if node in reached:
            continue
        reached.add(node)
        if node not in stops:
            stack += node.all_input_nodes
    return reached


def without_none(values: Iterable[fx.Node | None]) -> list[fx.Node]:
    """Returns the values that are nodes."""
    return [value for value in values if isinstance(value, fx.Node)]


def extract(
    source: fx.GraphModule, inputs: Sequence[fx.Node], outputs: Sequence[fx.Node | None], effects: Iterable[fx.Node] = ()
) -> fx.GraphModule:
    """Extracts the subgraph of `source` that computes `outputs` from `inputs` and runs `effects`, the nodes with side effects."""
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


def names_derived_from(module: fx.GraphModule, sources: Collection[str]) -> set[str]:
    """Returns the names of the inputs in `sources` and of all nodes computed only from them."""
    derived: set[str] = set()
    for node in module.graph.nodes:
        if node.op == "placeholder":
            is_derived = node.name in sources
        else:
            needed = [source.name for source in node.all_input_nodes]
            is_derived = bool(needed) and derived.issuperset(needed)
        if is_derived:
            derived.add(node.name)
    return derived


def is_cotangent(node: fx.Node) -> bool:
    """Returns whether an input of a joint or backward graph is the gradient of a forward output."""
    return "tangents" in node.name


def is_getitem(node: fx.Node) -> bool:
    """Returns whether a node selects one result of another."""
    return node.target is getitem


def is_view(node: fx.Node) -> bool:
    """Returns whether a node returns a view of an input, which takes no memory."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)


def is_pointwise(node: fx.Node) -> bool:
    """Returns whether a node is elementwise and draws no random numbers."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) and not is_random(node)


def is_cheap(node: fx.Node) -> bool:
    """Returns whether a node is cheap: a view, a pointwise operation, a sum or a copy."""
    return is_view(node) or is_pointwise(node) or is_getitem(node) or node.target in _SUMS_AND_COPIES


def is_random(node: fx.Node) -> bool:
    """Returns whether a node draws random numbers. Attention draws them only with dropout."""
    target: Any = node.target
    if torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ()):
        return False
    names = [argument.name for argument in target._schema.arguments]
    arguments = dict(zip(names, node.args, strict=False)) | node.kwargs
    return "dropout_p" not in names or arguments.get("dropout_p", 0.0) != 0.0


def num_bytes(node: fx.Node) -> int:
    """Returns the bytes of a node's value: at least 1 for a tensor, 0 for other values."""
    value = node.meta.get("val")
    return max(1, value.numel() * value.element_size()) if isinstance(value, Tensor) else 0


def flops(node: fx.Node) -> int:
    """Returns the FLOPs of a matrix product, convolution or attention, at least 1; 0 for every other node."""
    operation: Any = getattr(node.target, "overloadpacket", None)
    count = flop_registry.get(operation) or GROUPED.get(operation)
    if count is None:
        return 0
    args, kwargs = map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
    return max(1, int(count(*args, **kwargs, out_val=node.meta["val"])))


def factors(product: fx.Node) -> list[fx.Node]:
    """Returns the two factors of a product, without its addend."""
    has_addend = getattr(product.target, "overloadpacket", None) in _WITH_ADDEND
    both = product.args[1:3] if has_addend else product.args[:2]
    return [argument for argument in both if isinstance(argument, fx.Node)]
