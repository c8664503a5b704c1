"""Graphs of a stage's backward, by hand: how they are divided, pruned and made general, and which numbers each part gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

import zerobubble as zb
from tests.refusals import raises
from zerobubble.runtime.split.graphs.backward_graph import BackwardSplit, cheapest_for_w, split_backward
from zerobubble.runtime.split.graphs.fx_nodes import (
    ancestors,
    extract,
    factors,
    flops,
    inputs_of,
    is_cheap,
    is_pointwise,
    is_random,
    is_view,
    names_derived_from,
    num_bytes,
    num_results,
    results_of,
)
from zerobubble.runtime.split.graphs.general_graph import General, with_symbols
from zerobubble.runtime.split.graphs.missing_cotangents import without_cotangents
from zerobubble.runtime.split.graphs.sized_graph import SizedGraph
from zerobubble.runtime.split.tracing.grouped_products import HAS_GROUPED_PRODUCTS, grouped_product
from zerobubble.runtime.split.tracing.joint_graph import ForwardNodes, forward_and_backward
from zerobubble.runtime.split.tracing.module_tensors import TensorsOfModule
from zerobubble.runtime.split.tracing.traceable import hooked_parameters, refuse_hooks
from zerobubble.runtime.split.weight_flops import WeightFlops, flops_of, grouped_product_flops

pytestmark = pytest.mark.in_process


def traced(function: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    """The graph of a function; its inputs are named like the parameters of the function, with `_1`."""
    return make_fx(function, tracing_mode="fake")(*inputs)


def named(graph: fx.GraphModule, target: Any) -> list[fx.Node]:
    return [node for node in graph.graph.nodes if node.target is target]


aten = torch.ops.aten
BATCH, IN, HIDDEN, OUT = 5, 2, 3, 4


def two_layers(x: Tensor, h: Tensor, v: Tensor, w: Tensor, tangents: Tensor) -> list[Tensor]:
    """The backward of `y = h @ w` with `h = x @ v`."""
    dh = tangents @ w.t()
    return [x.t() @ dh, h.t() @ tangents, dh @ v.t()]


def of_two_layers() -> list[Tensor]:
    return [torch.randn(*size) for size in ((BATCH, IN), (BATCH, HIDDEN), (IN, HIDDEN), (HIDDEN, OUT), (BATCH, OUT))]


def run(split: BackwardSplit, inputs: list[Tensor], num_results: int) -> tuple[list[Tensor | None], list[Tensor]]:
    """The results of B, and of W for the gradients that wait."""
    results = list(split.b(*inputs))
    late = split.w(*[inputs[i] for i in split.kept_inputs], *results[num_results:])
    return results[:num_results], list(late)


def test_products_of_weight_gradients_are_in_w_and_give_the_same_numbers() -> None:
    inputs = of_two_layers()
    split = split_backward(traced(two_layers, *inputs), 2, {"v_1", "w_1"}, {"v_1", "w_1"})
    assert split.waiting == (0, 1)
    assert split.kept_inputs == (0, 1, 4)
    assert split.reasons == {}
    assert split.weight_flops == split.flops_in_w == 2 * BATCH * (IN * HIDDEN + HIDDEN * OUT)
    assert num_results(split.b) == 4
    in_b, in_w = run(split, inputs, 3)
    expected = two_layers(*inputs)
    assert in_b[:2] == [None, None]
    assert in_b[2] is not None
    assert torch.equal(in_b[2], expected[2])
    assert all(map(torch.equal, in_w, expected[:2]))


def test_without_input_gradients_b_has_the_products_that_feed_others() -> None:
    inputs = of_two_layers()
    graph = traced(lambda x, h, v, w, tangents: two_layers(x, h, v, w, tangents)[:2], *inputs)
    split = split_backward(graph, 2, {"v_1", "w_1"}, {"v_1", "w_1"})
    assert split.waiting == (0, 1)
    assert len(named(split.b, aten.mm.default)) == 1
    assert len(named(split.w, aten.mm.default)) == 2
    in_b, in_w = run(split, inputs, 2)
    assert in_b == [None, None]
    assert all(map(torch.equal, in_w, two_layers(*inputs)[:2]))


def test_a_product_with_a_weight_alone_gives_no_weight_gradient() -> None:
    def backward(x: Tensor, w: Tensor, tangents: Tensor) -> list[Tensor]:
        return [w @ (x.t() @ tangents), tangents.sum(0)]

    graph = traced(backward, torch.randn(BATCH, IN), torch.randn(HIDDEN, IN), torch.randn(BATCH, OUT))
    split = split_backward(graph, 2, {"w_1"}, {"w_1"})
    assert split.weight_flops == split.flops_in_w == 2 * BATCH * IN * OUT
    assert split.waiting == (0, 1)


def test_a_gradient_that_the_input_s_needs_stays_in_b() -> None:
    def backward(x: Tensor, tangents: Tensor) -> list[Tensor]:
        shared = torch.tanh(tangents)
        return [shared, x.t() @ shared, shared * 2]

    inputs = [torch.randn(BATCH, IN), torch.randn(BATCH, OUT)]
    split = split_backward(traced(backward, *inputs), 2, set(), set())
    assert split.waiting == (1,)
    assert split.reasons.keys() == {0}
    assert split.weight_flops == 2 * BATCH * IN * OUT
    in_b, (late,) = run(split, inputs, 3)
    assert in_b[1] is None
    assert in_b[0] is not None
    assert torch.equal(in_b[0], torch.tanh(inputs[1]))
    assert torch.equal(late, inputs[0].t() @ torch.tanh(inputs[1]))


def test_b_keeps_the_smaller_tensor_for_w() -> None:
    """W needs the expanded tensor: B keeps the small one, and W recomputes the pointwise operations after it."""

    def backward(small: Tensor, x: Tensor, tangents: Tensor) -> list[Tensor]:
        wide = torch.tanh(small.sum(1, keepdim=True)).expand(BATCH, 64).exp()
        return [x.t() @ wide, wide * tangents]

    inputs = [torch.randn(BATCH, 2), torch.randn(BATCH, IN), torch.randn(BATCH, 64)]
    graph = traced(backward, *inputs)
    split = split_backward(graph, 1, set(), set())
    assert split.waiting == (0,)
    kept = [node.name for node in results_of(split.b)[2:] if node is not None]
    assert kept in (["tanh"], ["sum_1"])
    _, (late,) = run(split, inputs, 2)
    assert torch.equal(late, backward(*inputs)[0])
    in_b = ancestors(results_of(graph)[1:])
    in_w = {node.name for node in cheapest_for_w(list(graph.graph.nodes), set(results_of(graph)[:1]), in_b, set())}  # type: ignore[arg-type]
    assert {"mm", "exp", "expand", "t"} <= in_w
    assert not {"sum_1", "mul"} & in_w


def test_a_convolution_s_backward_is_divided() -> None:
    def backward(x: Tensor, w: Tensor, tangents: Tensor) -> list[Tensor]:
        dx, dw, db = aten.convolution_backward.default(tangents, x, w, [4], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True])
        return [dw, db, dx]

    inputs = [torch.randn(2, 3, 6, 6), torch.randn(4, 3, 3, 3), torch.randn(2, 4, 6, 6)]
    split = split_backward(traced(backward, *inputs), 2, {"w_1"}, {"w_1"})
    assert split.waiting == (0, 1)
    assert split.kept_inputs == (0, 1, 2)
    (in_b,), (in_w,) = (named(part, aten.convolution_backward.default) for part in (split.b, split.w))
    assert in_b.args[-1] == [True, False, False]
    assert in_w.args[-1] == [False, True, True]
    (_, _, dx), late = run(split, inputs, 3)
    expected = backward(*inputs)
    assert dx is not None
    torch.testing.assert_close([*late, dx], expected)


def test_nodes_are_classified() -> None:
    def function(x: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
        largest = torch.addmm(b, x, w).max(1)
        dropped = torch.dropout(x.t(), 0.5, train=True)
        return [largest.values, dropped, torch.rand_like(x), w.exp() @ w.t(), x.sum().clone(), torch.empty(0, 2) @ w]

    graph = traced(function, torch.randn(BATCH, IN), torch.randn(IN, OUT), torch.randn(OUT))
    nodes = {node.name: node for node in graph.graph.nodes}
    assert [node.name for node in inputs_of(graph)] == ["x_1", "w_1", "b_1"]
    assert num_results(graph) == 6
    assert [node.name for node in factors(nodes["addmm"])] == ["x_1", "w_1"]
    assert [node.name for node in factors(nodes["mm"])] == ["exp", "t_1"]
    assert {name for name, node in nodes.items() if flops(node)} == {"addmm", "mm", "mm_1"}
    assert [flops(nodes[name]) for name in ("addmm", "mm", "mm_1")] == [2 * BATCH * IN * OUT, 2 * IN * OUT * IN, 1]
    assert [name for name, node in nodes.items() if is_view(node)] == ["t", "getitem", "t_1"][::2]
    assert {name for name in nodes if is_random(nodes[name])} >= {"rand_like"}
    assert not is_pointwise(nodes["rand_like"])
    assert {name for name, node in nodes.items() if is_cheap(node)} >= {"t", "getitem", "exp", "sum_1", "clone"}
    assert not any(is_cheap(nodes[name]) for name in ("addmm", "mm", "max_1", "x_1"))
    assert names_derived_from(graph, {"w_1"}) == {"w_1", "exp", "t_1", "mm"}
    assert (num_bytes(nodes["x_1"]), num_bytes(nodes["mm_1"]), num_bytes(nodes["max_1"])) == (BATCH * IN * 4, 1, 0)
    assert {node.name for node in ancestors([nodes["mm"], None])} == {"mm", "exp", "t_1", "w_1"}
    assert {node.name for node in ancestors([nodes["mm"]], {nodes["exp"], nodes["t_1"]})} == {"mm", "exp", "t_1"}
    part = extract(graph, [nodes["exp"], nodes["t_1"]], [nodes["mm"], None])
    assert [node.name for node in part.graph.nodes] == ["exp", "t_1", "mm", "output"]


def test_attention_draws_only_with_dropout() -> None:
    attention = aten._scaled_dot_product_flash_attention.default
    assert torch.Tag.nondeterministic_seeded in attention.tags

    def draws(*args: Any, **kwargs: Any) -> bool:
        graph = fx.Graph()
        q = graph.placeholder("q")
        return is_random(graph.call_function(attention, (q, q, q, *args), kwargs))

    assert [draws(), draws(0.0), draws(dropout_p=0.0)] == [False] * 3
    assert [draws(0.5), draws(dropout_p=0.5)] == [True] * 2


def with_several_cotangents(x: Tensor, w: Tensor, tangents_0: Tensor, tangents_1: Tensor, tangents_2: Tensor) -> list[Tensor]:
    added = tangents_0 + tangents_1
    joined = torch.cat([tangents_1, tangents_2])
    return [x.t() @ added, joined @ w, torch.tanh(tangents_0), tangents_1 * tangents_2]


def test_missing_cotangents_are_none_are_left_out_of_sums_and_are_zeros_elsewhere() -> None:
    inputs = [torch.randn(*size) for size in ((BATCH, IN), (OUT, IN), (BATCH, OUT), (BATCH, OUT), (BATCH, OUT))]
    backward = traced(with_several_cotangents, *inputs)
    zeros = torch.zeros(BATCH, OUT)
    graph, positions = without_cotangents(backward, [3])
    assert positions == [0, 1, 2, 4]
    of_sum, joined, alone, product = graph(*[inputs[i] for i in positions])
    assert torch.equal(of_sum, inputs[0].t() @ inputs[2])
    assert torch.equal(joined, torch.cat([zeros, inputs[4]]) @ inputs[1])
    assert torch.equal(alone, torch.tanh(inputs[2]))
    assert torch.equal(product, zeros)
    assert len(named(graph, aten.full.default)) == 1
    (made,) = named(graph, aten.full.default)
    assert made.meta["val"].shape == (BATCH, OUT)
    graph, positions = without_cotangents(backward, [2, 3])
    assert positions == [1, 4]
    of_sum, joined, alone, product = graph(*[inputs[i] for i in positions])
    assert of_sum is None
    assert alone is None
    assert torch.equal(joined, torch.cat([zeros, inputs[4]]) @ inputs[1])
    assert torch.equal(product, zeros)


def by_rows(x: Tensor, w: Tensor) -> list[Tensor]:
    y = x.view(x.shape[0] * x.shape[1], x.shape[2]) @ w
    return [y.view(x.shape[0], x.shape[1], w.shape[1])[:, : x.shape[1] - 1]]


def test_a_graph_of_two_lengths_serves_a_third() -> None:
    w = torch.randn(3, 4)
    given = [[torch.randn(*size), w] for size in ((2, 5, 3), (3, 8, 3), (6, 11, 3))]
    graphs = [traced(by_rows, *inputs) for inputs in given]
    sized = [SizedGraph.from_graph(graph, inputs) for graph, inputs in zip(graphs, given, strict=True)]
    assert sized[0].kind == sized[1].kind == sized[2].kind
    general = General([each.sizes for each in sized[:2]])
    symbols = general.symbols_of(sized[2].sizes)
    assert symbols is not None
    both = with_symbols(graphs[0], given[0], general)
    assert len(inputs_of(both)) == general.num_symbols + 2
    assert torch.equal(both(*symbols, *given[2])[0], by_rows(*given[2])[0])


def test_graphs_of_other_operations_and_constants_are_of_another_kind() -> None:
    x = torch.randn(2, 3)

    def kind(function: Callable[..., Any], *inputs: Any) -> Any:
        return SizedGraph.from_graph(traced(function, *inputs), inputs).kind

    doubled = kind(lambda x: [x * 2.0], x)
    assert doubled == kind(lambda x: [x * 2.0], torch.randn(4, 5))
    others = [
        kind(lambda x: [x * 3.0], x),
        kind(lambda x: [x + 2.0], x),
        kind(lambda x: [x * 2.0], x.double()),
        kind(lambda x: [x * 2.0], x[0]),
        kind(lambda x: [x * 2.0, x], x),
    ]
    assert len({doubled, *others}) == 6

    def with_constant(constant: Tensor) -> Any:
        graph = fx.Graph()
        graph.output((graph.call_function(aten.mul.Tensor, (graph.placeholder("x"), graph.get_attr("c"))),))
        return SizedGraph.from_graph(fx.GraphModule({"c": constant}, graph), [x]).kind

    small, large = torch.ones(4096), torch.ones(4097)
    assert with_constant(small) == with_constant(small.clone()) != with_constant(2 * small)
    assert with_constant(large) == with_constant(large) != with_constant(large.clone())
    lazy = torch.tensor([1j]).conj()  # its values are copied, as those of a constant on an accelerator are
    with FakeTensorMode():
        assert with_constant(lazy) == with_constant(lazy)


@pytest.mark.skipif(not HAS_GROUPED_PRODUCTS, reason="this torch has no grouped products")
def test_grouped_products_have_the_shapes_flops_and_gradients_of_single_ones() -> None:
    ends = torch.tensor([2, 5], dtype=torch.int32)
    x, w = torch.randn(5, 8, requires_grad=True), torch.randn(2, 8, 16, requires_grad=True)
    y = grouped_product(x, w, ends)
    dy = torch.randn(5, 16)
    gradients = torch.autograd.grad(y, (x, w), dy)
    expected = torch.cat([x[:2] @ w[0], x[2:] @ w[1]])
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, (x, w), dy))
    (of_x,) = torch.autograd.grad(grouped_product(x, w.detach(), ends), x, dy)
    torch.testing.assert_close(of_x, gradients[0])
    (of_w,) = torch.autograd.grad(grouped_product(x.detach(), w, ends), w, dy)
    torch.testing.assert_close(of_w, gradients[1])
    with FakeTensorMode():
        fake_ends = torch.empty(3, dtype=torch.int32)
        assert grouped_product(torch.empty(7, 2), torch.empty(3, 2, 4), fake_ends).shape == (7, 4)
        assert grouped_product(torch.empty(2, 7), torch.empty(7, 4), fake_ends).shape == (3, 2, 4)
    assert grouped_product_flops(torch.empty(7, 2), torch.empty(3, 2, 4)) == 2 * 7 * 2 * 4
    assert grouped_product_flops(torch.empty(2, 7), torch.empty(7, 4)) == 2 * 7 * 2 * 4
    assert grouped_product_flops(torch.empty(3, 7, 2), torch.empty(3, 2, 4)) == 3 * 2 * 7 * 2 * 4


def test_flops_of_weights_are_those_of_products_with_other_tensors() -> None:
    w, v, x = torch.randn(IN, OUT), torch.randn(OUT, IN), torch.randn(BATCH, IN)

    def counted(call: Callable[[], object]) -> tuple[int, bool]:
        with WeightFlops([w, v]) as counter:
            call()
        return counter.total, counter.is_complete

    one = 2 * BATCH * IN * OUT
    assert counted(lambda: x @ w) == (one, True)
    assert counted(lambda: x @ w @ v) == (2 * one, True)
    assert counted(lambda: x @ x.t()) == (0, True)
    assert counted(lambda: w @ v) == (0, True)
    assert counted(lambda: x @ (w @ v)) == (2 * BATCH * IN * IN, True)
    assert counted(lambda: x @ w.exp().t().t()) == (one, True)
    assert counted(lambda: x @ nn.Parameter(torch.randn(IN, OUT))) == (one, True)
    assert counted(lambda: x @ nn.Parameter(torch.randn(IN, OUT), requires_grad=False)) == (0, True)
    assert counted(lambda: nn.functional.bilinear(x, x, w.view(2, IN, IN))) == (0, False)
    assert flops_of(lambda: x @ w @ v) == 2 * one


def test_a_graph_takes_tensors_without_a_history_outside_of_parameters() -> None:
    class Place:
        path = "table"

        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

    module = nn.Linear(2, 2)
    leaf = torch.ones(2, requires_grad=True)
    given = [module.weight, torch.ones(2), torch.ones(2, device="meta"), leaf, leaf * 2, (leaf * 2).detach()]
    found = [len(TensorsOfModule(module, [Place(tensor)]).tensors) - 2 for tensor in given]  # type: ignore[list-item]
    assert found == [0, 1, 0, 1, 0, 1]
    assert TensorsOfModule(module).counts == (2, 2)


def test_what_is_compiled_or_hooked_is_not_traced() -> None:
    refuse_hooks(nn.Sequential(nn.Linear(2, 2)), ())
    compiled = nn.Linear(2, 2)
    compiled._compiled_call_impl = compiled.forward  # as `compiled.compile()` sets it
    wrapped = torch.compile(nn.Linear(2, 2), backend="eager")
    forward, backward = nn.Linear(2, 2), nn.Linear(2, 2)
    forward.register_forward_hook(lambda *_: None)
    backward.register_full_backward_hook(lambda *_: None)
    for part in (compiled, wrapped, forward, backward):
        module = nn.Sequential(nn.Linear(2, 2))
        module.add_module("part", part)
        with raises(zb.InputError, "part"):
            refuse_hooks(module, ())
    with raises(zb.InputError, "0.weight"):
        refuse_hooks(nn.Sequential(nn.Linear(2, 2)), ["0.weight"])


def test_parameters_with_hooks_and_with_living_uses_are_named() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    assert hooked_parameters(module) == []
    module[0].bias.register_hook(lambda gradient: gradient)
    alive = module[1].weight * 2
    module[2].weight.register_post_accumulate_grad_hook(lambda _: None)
    assert hooked_parameters(module) == ["0.bias", "1.weight", "2.weight"]
    del alive


def joint_of_layer(x: Tensor, w: Tensor, tangents: Tensor) -> list[Tensor]:
    """A layer with dropout of its own: its output, and the gradients of both inputs."""
    kept = torch.rand_like(x) < 0.5
    values, indices = torch.tanh(x @ w).max(1)
    y = x * kept + values[:, None]
    of_h = torch.zeros(x.shape[0], w.shape[1]).scatter(1, indices[:, None], tangents.sum(1, keepdim=True) * (1 - values * values)[:, None])
    return [y, tangents * kept + of_h @ w.t(), x.t() @ of_h]


CHECKPOINT: Any = (object(), object())
FORWARD = ("rand_like", "lt", "mm", "tanh", "max_1", "getitem", "getitem_1", "mul", "unsqueeze", "add")


@pytest.mark.parametrize(
    ("in_checkpoint", "policies", "redraw", "saved"),
    [
        ((), (), True, ["x_1", "w_1", "lt", "getitem", "getitem_1"]),
        (("mm", "tanh", "max_1"), (), True, ["x_1", "w_1", "lt", "getitem"]),
        (("mm", "tanh", "max_1"), ("mm",), True, ["x_1", "w_1", "lt", "mm", "getitem"]),
        (("rand_like", "lt", "mul"), (), False, ["x_1", "w_1", "rand_like", "getitem", "getitem_1"]),
        (("rand_like", "lt", "mul"), (), True, ["x_1", "w_1", "kept state", "getitem", "getitem_1"]),
        (FORWARD, (), True, ["x_1", "w_1", "kept state"]),
    ],
)
def test_a_joint_graph_is_cut_where_its_forward_ends_and_checkpoints_are_recomputed(
    in_checkpoint: tuple[str, ...], policies: tuple[str, ...], redraw: bool, saved: list[str]
) -> None:
    x, w, dy = torch.randn(BATCH, IN), torch.randn(IN, OUT), torch.randn(BATCH, IN)
    joint = traced(joint_of_layer, x, w, dy)
    names = {node.name for node in joint.graph.nodes}
    assert set(FORWARD) <= names
    for node in joint.graph.nodes:
        if node.name in policies:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    nodes = ForwardNodes(set(FORWARD), dict.fromkeys(in_checkpoint, CHECKPOINT))
    torch.manual_seed(0)
    expected = joint_of_layer(x, w, dy)
    forward, backward = forward_and_backward(joint, 1, nodes, redraw=redraw)
    torch.manual_seed(0)
    y, *kept = forward(x, w)
    torch.manual_seed(1)
    gradients = backward(*kept, dy)
    torch.testing.assert_close([y, *gradients], expected, rtol=0, atol=0)
    found = [node.name for node in results_of(forward)[1:] if node is not None]
    assert [name if name in names else "kept state" for name in found] == saved
    assert not any(node.meta.get("recompute") for node in backward.graph.nodes) or not in_checkpoint


def test_a_forward_has_all_that_its_results_need_and_draws_what_is_unused() -> None:
    def joint(x: Tensor, tangents: Tensor) -> list[Tensor]:
        torch.rand_like(x)
        return [torch.tanh(x).exp(), tangents * x]

    graph = traced(joint, torch.randn(2), torch.randn(2))
    if not named(graph, aten.rand_like.default):  # traces may drop what nothing uses
        with graph.graph.inserting_before(next(iter(named(graph, aten.tanh.default)))):
            graph.graph.call_function(aten.rand_like.default, (inputs_of(graph)[0],))
    (draw,) = named(graph, aten.rand_like.default)
    forward, backward = forward_and_backward(graph, 1, ForwardNodes({draw.name}, {}), redraw=True)
    assert len(named(forward, aten.rand_like.default)) == 1
    assert [node.name for node in inputs_of(forward)] == ["x_1"]
    assert [node.name for node in inputs_of(backward)] == ["x_1", "tangents_1"]
    torch.manual_seed(0)
    forward(torch.ones(2))
    after = torch.rand(1)
    torch.manual_seed(0)
    torch.rand(2)
    assert torch.equal(after, torch.rand(1))


def test_a_backward_that_draws_random_numbers_is_refused() -> None:
    graph = traced(lambda x, tangents: [x.exp(), tangents * torch.rand_like(x)], torch.randn(2), torch.randn(2))
    with raises(zb.InputError, operation="aten.rand_like.default"):
        forward_and_backward(graph, 1, ForwardNodes({"exp"}, {}), redraw=True)
