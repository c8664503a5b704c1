"""The joint graph of a stage cut in three: F, then B, which gives the gradients of the inputs, and W, which gives the others.

B is what the gradients of the inputs need. Where no input has one, B is the chain that leads back through the stage all the same:
every matrix product or convolution whose result goes on to another one or to an operation of its own, so that passes weigh as
elsewhere. The rest is on either side: a minimum cut decides, so that what B keeps for W has the fewest bytes; products that lead
to parameters alone are always W's. W computes views of what is kept again, and pointwise operations where that saves bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import inf
from operator import getitem
from typing import Any, NamedTuple

import networkx  # type: ignore[import-untyped]
import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry

from zerobubble.errors import InputError
from zerobubble.runtime.split.recompute import compute_again, is_random

_CONVOLUTION = torch.ops.aten.convolution_backward.default
_SUMS = {torch.ops.aten.sum.default, torch.ops.aten.sum.dim_IntList, torch.ops.aten.clone.default, torch.ops.aten._to_copy.default}
_WITH_ADDEND = (torch.ops.aten.addmm, torch.ops.aten.baddbmm)
_RECOMPUTE_PRICE = 1 / 16
"""Bytes that a byte computed again must save, so that W repeats pointwise operations only where it pays."""


class Cut(NamedTuple):
    """The backward graph as B and W.

    B takes what the backward graph takes and gives its outputs, None for those that wait, then what it keeps. W takes
    `from_inputs`, the positions of the backward graph's inputs that are kept as they are, and then what B keeps; it gives the
    gradients at the positions `waits`. `flops` are those of the products that give weight gradients, (W's, all). `at_once` says why the
    gradients at other positions do not wait.
    """

    b: fx.GraphModule
    w: fx.GraphModule
    waits: tuple[int, ...]
    from_inputs: tuple[int, ...]
    flops: tuple[int, int]
    at_once: dict[int, str]


def halves(
    joint: fx.GraphModule, num_outputs: int, traced: Collection[str], checkpointed: Mapping[str, Any], *, draw: bool
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward graph, of the nodes named in `traced` and all its outputs need, and the backward graph.

    The backward graph computes again what is `checkpointed`, nodes by name, each with its checkpoint; random numbers only with `draw`.

    Raises `InputError` where the backward pass draws random numbers, which autograd draws in another order.
    """
    results = _results(joint)
    nodes = list(joint.graph.nodes)
    primals = [node for node in nodes if node.op == "placeholder" and not is_tangent(node)]
    tangents = [node for node in nodes if node.op == "placeholder" and is_tangent(node)]
    forward = (_ancestors(results[:num_outputs]) | {node for node in nodes if node.name in traced} | set(primals)) - set(tangents)
    for node in nodes:
        if _is_getitem(node) and node.args[0] in forward:
            forward.add(node)
    if checkpointed:
        forward = compute_again(joint, forward, checkpointed, draw=draw)
        nodes, results = list(joint.graph.nodes), _results(joint)
    backward = _ancestors(results[num_outputs:], forward) - forward
    random = next((node for node in nodes if node in backward and is_random(node)), None)
    if random is not None:
        raise InputError(f"its backward pass draws random numbers ({random.target})")
    used = {source for node in backward for source in node.all_input_nodes} | set(_nodes(results[num_outputs:]))
    saved = [node for node in nodes if node in used and node in forward and node.op != "get_attr"]
    drawn = [node for node in nodes if node in forward and is_random(node)]
    return extract(joint, primals, [*results[:num_outputs], *saved], drawn), extract(joint, [*saved, *tangents], results[num_outputs:])


def extract(
    source: fx.GraphModule, inputs: Sequence[fx.Node], outputs: Sequence[fx.Node | None], also: Iterable[fx.Node] = ()
) -> fx.GraphModule:
    """The part of `source` that leads from `inputs` to `outputs`, and to the nodes `also`."""
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        made[node] = graph.placeholder(node.name)
        made[node].meta = dict(node.meta)
    needed = _ancestors([*outputs, *also], inputs)
    for node in source.graph.nodes:
        if node in needed and node not in made:
            made[node] = graph.node_copy(node, made.__getitem__)
    graph.output(tuple(None if node is None else made[node] for node in outputs))
    return fx.GraphModule(source, graph)


def without(backward: fx.GraphModule, missing: Collection[int]) -> tuple[fx.GraphModule, list[int]]:
    """The backward graph where the inputs at positions `missing`, cotangents, are None; and the positions of the inputs it still takes.

    As in autograd, nothing comes of what only they lead to, a sum is what else is added, and any other operation takes zeros for them.
    """
    nodes = list(backward.graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    absent = {inputs[i] for i in missing}
    present = {node for node in inputs if is_tangent(node)} - absent
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in nodes[:-1]:
        sources = node.all_input_nodes
        if node in absent or (not absent.isdisjoint(sources) and present.isdisjoint(sources)):
            absent.add(node)
            continue
        if not present.isdisjoint(sources):
            present.add(node)
        left = [source for source in sources if source not in absent]
        if len(left) < len(sources) and _adds_alike(node):
            made[node] = made[left[0]]
            continue
        for source in sources:
            if source not in made:
                made[source] = _zeros(graph, source)
        made[node] = graph.node_copy(node, made.__getitem__)
    results = tuple(None if result is None or result in absent else made[result] for result in _results(backward))
    graph.output(results)
    needed = _ancestors(results)
    taken = [i for i, node in enumerate(inputs) if node not in absent and made[node] in needed]
    return extract(fx.GraphModule(backward, graph), [made[inputs[i]] for i in taken], results), taken


def _adds_alike(node: fx.Node) -> bool:
    """Whether a node is the sum of two tensors of one shape, as autograd sums gradients."""
    return node.target is torch.ops.aten.add.Tensor and len({source.meta["val"].shape for source in node.all_input_nodes}) == 1


def _zeros(graph: fx.Graph, like: fx.Node) -> fx.Node:
    value = like.meta["val"]
    node = graph.call_function(torch.ops.aten.full.default, (list(value.shape), 0), {"dtype": value.dtype, "device": value.device})
    node.meta["val"] = value
    return node


def cut(backward: fx.GraphModule, num_parameters: int, free: Collection[str], weights: Collection[str]) -> Cut:
    """Cut a backward graph whose first `num_parameters` outputs are gradients of parameters, the others of inputs.

    `free` names the inputs that cost nothing to keep: parameters, which are there anyway. `weights` names the nodes made of them alone.
    """
    _divide_convolutions(backward)
    nodes, results = list(backward.graph.nodes), _results(backward)
    inputs = [node for node in nodes if node.op == "placeholder"]
    impure = [node for node in nodes if node.op == "call_function" and node.is_impure()]
    direct, leading = _direct(nodes, weights), _ancestors(results[num_parameters:])
    ends = _nodes(results[num_parameters:]) or [node for node in nodes if flops(node) and node not in direct]
    in_b = _ancestors([*ends, *impure]) | set(inputs)
    parameters = {node: i for i, node in enumerate(results[:num_parameters]) if node is not None}
    in_w = _cheapest(nodes, parameters, in_b, free)
    waits = tuple(i for i, node in enumerate(results[:num_parameters]) if node in in_w and node not in in_b)
    late = [results[i] for i in waits]
    needed = _ancestors(late, [node for node in nodes if node not in in_w])
    kept = [node for node in nodes if node in needed and node not in in_w and node.op != "get_attr"]
    as_given, made = [node for node in kept if node in inputs], [node for node in kept if node not in inputs]
    at_once = [None if i in waits else node for i, node in enumerate(results)]
    products = {node: flops(node) for node in direct - leading if not any(factor.name in weights for factor in _factors(node))}
    return Cut(
        extract(backward, inputs, [*at_once, *made], impure),
        extract(backward, [*as_given, *made], late),
        waits,
        tuple(inputs.index(node) for node in as_given),
        (sum(count for node, count in products.items() if node in needed), sum(products.values())),
        {i: _why(node, in_b) for node, i in parameters.items() if i not in waits},
    )


def flops(node: fx.Node) -> int:
    """What a matrix product, convolution or attention takes; 0 for everything else."""
    count = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if count is None:
        return 0
    args, kwargs = map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
    return max(1, int(count(*args, **kwargs, out_val=node.meta["val"])))


def _factors(node: fx.Node) -> list[fx.Node]:
    """The two that a product multiplies."""
    given = node.args[1:3] if getattr(node.target, "overloadpacket", None) in _WITH_ADDEND else node.args[:2]
    return [arg for arg in given if isinstance(arg, fx.Node)]


def names_from(graph: fx.GraphModule, sources: Collection[str]) -> set[str]:
    """The names of the nodes that follow from the inputs named in `sources` alone."""
    found: set[str] = set()
    for node in graph.graph.nodes:
        needed = [source.name for source in node.all_input_nodes]
        if node.name in sources if node.op == "placeholder" else needed and found.issuperset(needed):
            found.add(node.name)
    return found


def _direct(nodes: Sequence[fx.Node], weights: Collection[str]) -> set[fx.Node]:
    """The nodes from which outputs follow by views, sums, pointwise operations and those that take but `weights` beside."""
    found: set[fx.Node] = set()
    for node in reversed(nodes):
        if all(user.op == "output" or (user in found and (_is_light(user) or _is_beside(node, user, weights))) for user in node.users):
            found.add(node)
    return found


def _is_beside(node: fx.Node, user: fx.Node, weights: Collection[str]) -> bool:
    return all(source is node or source.name in weights for source in user.all_input_nodes)


def _cheapest(nodes: Iterable[fx.Node], parameters: Collection[fx.Node], in_b: set[fx.Node], free: Collection[str]) -> set[fx.Node]:
    """What W computes, by the minimum cut nearest to B.

    A node has two ends: "in" is on W's side where W computes it, "out" where W has its value, and the edge between is cut where B
    keeps it. The network is drawn from W to B, for networkx gives the cut nearest to where the flow ends.
    """
    network = networkx.DiGraph()
    network.add_nodes_from(("w", "b"))
    for node in nodes:
        if node.op in ("output", "get_attr"):
            continue
        network.add_edge(("out", node), ("in", node), capacity=_price(node, parameters, free))
        sources = [source for source in node.all_input_nodes if source.op != "get_attr"]
        network.add_edges_from((("in", node), ("out", source)) for source in sources)
        network.add_edges_from((("in", source), ("in", node)) for source in sources if source not in in_b)  # B needs nothing of W
        if node in in_b:
            network.add_edge(("in", node), "b", capacity=_price_again(node))
        elif flops(node):
            network.add_edge("w", ("in", node))
        if node in parameters:
            network.add_edge("w", ("out", node))
    in_w, _ = networkx.minimum_cut(network, "w", "b")[1]
    return {end[1] for end in in_w if end[0] == "in"}


def _price(node: fx.Node, parameters: Collection[fx.Node], free: Collection[str]) -> float:
    """Bytes held by keeping a node's value: none for a gradient, which is added at once; a view would hold all that it is a view of."""
    if node in parameters or node.name in free:
        return 0.0
    if node.op != "placeholder" and (_is_view(node) or not isinstance(node.meta.get("val"), Tensor)):
        return inf
    return float(_bytes(node))


def _price_again(node: fx.Node) -> float:
    """What it costs that W computes again what B has computed, in bytes."""
    if node.op == "placeholder":
        return inf
    if _is_view(node) or _is_getitem(node):
        return 0.0
    return _RECOMPUTE_PRICE * _bytes(node) if _is_pointwise(node) else inf


def _bytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    return max(1, value.numel() * value.element_size()) if isinstance(value, Tensor) else 0


def _divide_convolutions(backward: fx.GraphModule) -> None:
    """Give each backward of a convolution its input's gradient apart from its parameters'."""
    for node in list(backward.graph.nodes):
        if node.target is not _CONVOLUTION or not (node.args[-1][0] and any(node.args[-1][1:])):
            continue
        mask = node.args[-1]
        with backward.graph.inserting_after(node):
            late = backward.graph.node_copy(node)
        late.args = (*node.args[:-1], [False, *mask[1:]])
        node.args = (*node.args[:-1], [True, False, False])
        for user in list(node.users):
            if user.args[1] > 0:
                user.replace_input_with(node, late)
        values = node.meta["val"]
        node.meta["val"], late.meta["val"] = (values[0], None, None), (None, *values[1:])


def _why(node: fx.Node, in_b: set[fx.Node]) -> str:
    if node in in_b or (_is_getitem(node) and node.args[0] in in_b):
        return "comes with the gradient of the input"
    return "waiting would keep more bytes than the gradient has"


def is_tangent(node: fx.Node) -> bool:
    """Whether an input of a joint or backward graph is a cotangent."""
    return "tangents" in node.name


def num_results(module: fx.GraphModule) -> int:
    """How many values a graph gives."""
    return len(_results(module))


def _results(module: fx.GraphModule) -> list[fx.Node | None]:
    return list(next(iter(reversed(module.graph.nodes))).args[0])


def _nodes(values: Iterable[fx.Node | None]) -> list[fx.Node]:
    return [value for value in values if isinstance(value, fx.Node)]


def _ancestors(ends: Iterable[fx.Node | None], stop: Collection[fx.Node] = ()) -> set[fx.Node]:
    """`ends` and all they need, up to `stop`."""
    found: set[fx.Node] = set()
    stops = set(stop)
    stack = _nodes(ends)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            if node not in stops:
                stack += node.all_input_nodes
    return found


def _is_light(node: fx.Node) -> bool:
    return _is_view(node) or _is_pointwise(node) or _is_getitem(node) or node.target in _SUMS


def _is_view(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)


def _is_pointwise(node: fx.Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) and not is_random(node)


def _is_getitem(node: fx.Node) -> bool:
    return node.target is getitem
