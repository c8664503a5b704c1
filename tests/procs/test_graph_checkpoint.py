"""Checkpoints inside a graph stage: the graph forgets what they forget, and computes it again in B.

That gradients and random numbers are autograd's is seen for every kind of checkpoint in `test_graph_split.py`.

They hold the same bytes as in eager mode.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerobubble as zb
from benchmarks.split.run import Block
from benchmarks.split_matrix.kinds import KINDS, Way, checkpointed, selective
from benchmarks.split_matrix.ways import Plain, difference, train
from tests.device import cpu_only
from tests.procs.test_graph_split import Graph, products
from tests.procs.versions import needs_branches_in_graphs, needs_checkpoints_in_graphs
from tests.refusals import raises
from zerobubble.runtime.measure.memory_meter import Meter
from zerobubble.runtime.split.tracing.recompute import _saved_tensors_hooks, recording_checkpoints
from zerobubble.runtime.stage.stage import Stage, make_stage

pytestmark = pytest.mark.in_process

WIDTH = 64
STATE = torch.get_rng_state().nbytes


def two(wrap: Callable[[nn.Module], nn.Module], make: Callable[[], nn.Module] = lambda: Block(WIDTH)) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*[wrap(make()) for _ in range(2)])


def with_dropout() -> nn.Module:
    return nn.Sequential(Block(WIDTH), nn.Dropout(0.3), nn.Linear(WIDTH, WIDTH))


def mixed() -> nn.Module:
    """Checkpoints between Linears, one of them ending in a function whose result its own backward needs."""
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), checkpointed(Block(WIDTH)), nn.Linear(WIDTH, WIDTH), nn.Tanh(), checkpointed(nn.Linear(WIDTH, WIDTH))
    )


def held(stage: Stage, x: Tensor) -> tuple[int, int]:
    """Bytes between F and B, and between B and W."""
    stage.begin(Meter(stage.module.parameters()))
    assert stage.meter is not None
    (y,) = stage.forward(0, (x,))
    after_forward = stage.meter.bytes
    stage.backward(0, (torch.ones_like(y),))
    between = stage.meter.bytes
    return after_forward, between


@pytest.mark.sweep
@needs_checkpoints_in_graphs
@pytest.mark.parametrize(
    ("build", "states"),
    [
        (two(checkpointed), 0),
        (two(lambda block: checkpointed(checkpointed(block))), 0),
        pytest.param(two(checkpointed, with_dropout), 2, marks=cpu_only("a GPU keeps random states of another size")),
        (mixed, 0),
    ],
)
def test_a_graph_holds_what_eager_checkpoints_hold(build: Callable[[], nn.Module], states: int) -> None:
    module, x = build(), torch.randn(2, 8, WIDTH, requires_grad=True)
    eager, _ = held(make_stage("whole", module, 1), x)
    graph, between = held(make_stage("graph", module, 1), x)
    assert graph == eager + states * STATE  # which eager mode keeps, too, where the meter does not see it
    linears = [part for part in module.modules() if isinstance(part, nn.Linear)]
    assert between <= x[..., 0].numel() * 4 * sum(linear.in_features + linear.out_features for linear in linears)


@needs_checkpoints_in_graphs
def test_a_selective_checkpoint_keeps_what_its_policy_saves_and_someone_needs() -> None:
    x = torch.randn(2, 8, WIDTH, requires_grad=True)
    stage = make_stage("graph", selective(Block(WIDTH)), 1)
    stage.forward(0, (x,))
    assert stage.in_flight() == (1, x.nbytes * (1 + 3 + 1 + 4))  # the input, and products but the last
    whole = make_stage("graph", checkpointed(Block(WIDTH)), 1)
    whole.forward(0, (x,))
    assert whole.in_flight() == (1, x.nbytes)


@pytest.mark.long
@needs_checkpoints_in_graphs
def test_b_computes_the_products_of_a_checkpoint_again_but_for_the_last() -> None:
    stage = make_stage("graph", two(checkpointed)(), 1)
    held(stage, torch.randn(2, 8, WIDTH, requires_grad=True))
    assert stage.splitter.traces.last is not None
    assert stage.splitter.traces.last.split is not None
    assert (products(stage.splitter.traces.last.split.b), products(stage.splitter.traces.last.split.w)) == (8 + 2 * 3, 8)
    assert stage.splitter.report().share == 1.0


@needs_checkpoints_in_graphs
def test_a_checkpoint_that_changes_a_buffer_is_refused() -> None:
    stage = make_stage("graph", checkpointed(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))), 1)
    with raises(zb.InputError, "checkpoint", "buffer"):
        stage.forward(0, (torch.randn(3, 4, requires_grad=True),))


@needs_checkpoints_in_graphs
def test_hooks_on_saved_tensors_around_a_checkpoint_are_refused() -> None:
    def offloaded(m: Way, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
            y: Tensor = checkpoint(m.linear, x, use_reentrant=False)
        return y

    stage = make_stage("graph", Way(offloaded, linear=nn.Linear(4, 4)), 1)
    with raises(zb.InputError, "hooks", "saved", "offloading"):
        stage.forward(0, (torch.randn(3, 4, requires_grad=True),))


def test_a_torch_that_cannot_show_hooks_apart_refuses_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zerobubble.runtime.split.tracing.recompute.CAN_SEE_HOOKS", False)
    stage = make_stage("graph", checkpointed(nn.Linear(4, 4)), 1)
    with raises(zb.InputError, "torch 2.8", "checkpoints"):
        stage.forward(0, (torch.randn(3, 4, requires_grad=True),))


def branching(m: Way, x: Tensor) -> Tensor:
    (y,) = torch.ops.higher_order.cond(x.sum() > 100, lambda x: (x.sin(),), lambda x: (x.cos(),), (m.linear(x),))
    return y


@needs_branches_in_graphs
@pytest.mark.parametrize("wrap", [lambda module: module, pytest.param(checkpointed, marks=needs_checkpoints_in_graphs)])
def test_a_branch_is_traced_as_an_operation(wrap: Callable[[nn.Module], nn.Module]) -> None:
    module, x = Way(branching, linear=nn.Linear(4, 4)), torch.randn(3, 4, requires_grad=True)
    stage = make_stage("graph", wrap(module), 1)
    (y,) = stage.forward(0, (x,))
    (mine,) = stage.backward(0, (torch.ones_like(y),))
    (theirs,) = torch.autograd.grad(module.linear(x).cos().sum(), x)
    assert torch.equal(mine, theirs)


@needs_checkpoints_in_graphs
@pytest.mark.parametrize("name", ["dropout", "checkpoint with dropout"])
def test_dropout_draws_in_a_graph_what_it_draws_under_autograd(name: str) -> None:
    kind = KINDS[name]
    assert difference(train(kind.build, kind.takes, Graph), train(kind.build, kind.takes, Plain)) == 0


@needs_checkpoints_in_graphs
def test_a_change_by_the_last_operation_of_a_checkpoint_is_refused() -> None:
    buffer, x = torch.zeros(2), torch.ones(2, requires_grad=True)

    def change(x: Tensor) -> Tensor:
        y = x * 2
        buffer.add_(1)
        return y

    with raises(zb.InputError, "checkpoint", "buffer"), recording_checkpoints([buffer]):
        checkpoint(change, x, use_reentrant=False)


@needs_checkpoints_in_graphs
def test_hooks_on_saved_tensors_are_listed_from_outside_and_stay() -> None:
    pairs = [(lambda tensor, number=number: (number, tensor), lambda kept: kept[1]) for number in range(3)]
    with ExitStack() as stack:
        for pair in pairs:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*pair))
        assert _saved_tensors_hooks() == pairs
        assert _saved_tensors_hooks() == pairs
    assert _saved_tensors_hooks() == []
