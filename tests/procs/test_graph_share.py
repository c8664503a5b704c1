"""A graph stage's report on its split: the share of the weight gradients' FLOPs in W."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import zerobubble as zb
from benchmarks.split_matrix.kinds import D, Recurrent, checkpointed, forcing, half_frozen, lin
from tests.device import cpu_only
from tests.procs.versions import needs_checkpoints_in_graphs
from tests.refusals import raises
from zerobubble.runtime.split.report import SplitReport
from zerobubble.runtime.stage.stage import make_stage

pytestmark = pytest.mark.in_process

weight_norm = nn.utils.parametrizations.weight_norm


def report(module: nn.Module, *, first: bool = False) -> SplitReport:
    stage = make_stage("graph", module, 1)
    (y,) = stage.forward(0, (torch.randn(4, 5, D, requires_grad=not first),))
    stage.backward(0, (torch.ones_like(y),))
    return stage.splitter.report()


@pytest.mark.sweep
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize(
    ("build", "share"),
    [
        (lambda: nn.Sequential(weight_norm(lin()), lin()), 1.0),
        (lambda: nn.Sequential(lin().requires_grad_(False), lin()), 1.0),
        pytest.param(lambda: checkpointed(nn.Sequential(lin(), nn.Tanh(), lin())), 1.0, marks=needs_checkpoints_in_graphs),
        pytest.param(lambda: Recurrent(nn.GRU), 1.0, marks=cpu_only("a graph cannot contain the recurrent layers of cuDNN")),
        (forcing, 1.0),
        (half_frozen, None),
        (lambda: nn.LayerNorm(D), None),
    ],
    ids=["weight norm", "frozen", "checkpoint", "gru", "a gradient in the forward", "bias alone", "norm alone"],
)
def test_the_share_is_that_of_products_which_wait(build: Callable[[], nn.Module], share: float | None, first: bool) -> None:
    assert report(build(), first=first).share == share


def test_a_product_whose_weight_is_normed_waits_with_its_parameters() -> None:
    for first in (False, True):
        assert report(nn.Sequential(weight_norm(lin()), lin()), first=first).in_b == ()


@cpu_only("oneDNN is for CPUs")
def test_a_recurrent_layer_of_one_dnn_is_refused() -> None:
    stage = make_stage("graph", Recurrent(nn.LSTM), 1)
    with raises(zb.InputError, "oneDNN", "layer", "graph"):
        stage.forward(0, (torch.randn(4, 5, D),))
