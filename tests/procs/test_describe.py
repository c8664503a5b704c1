"""`describe` reports the same on every rank: how a stage splits, the share of W, and what stayed in B and why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from benchmarks.split_matrix.kinds import Way, parameter
from tests.procs.models import batch, build, loss_fn
from tests.procs.ranks import Ranks
from tests.refusals import states
from zerobubble.runtime.split.report import InB, SplitReport
from zerobubble.runtime.stage.stage import make_stage


def describe(group: Any, name: str) -> tuple[list[zb.nn.SplitReport], str, bool]:
    with zb.Pipeline(build, name, 4, loss_fn, group=group) as pipe:
        message = pipe.describe(*batch(4))
        return list(message), str(message), all(p.grad is None for p in pipe.parameters())


def describe_on_one_rank(group: Any) -> str:
    with zb.Pipeline(build, "1f1b", 2, loss_fn, group=group) as pipe:
        if pipe.rank:
            return ""
        with pytest.raises(zb.PipelineError) as caught:
            pipe.describe(*batch(2))
    return str(caught.value)


def test_a_method_that_only_one_rank_calls_is_named(world: Ranks) -> None:
    states(world.run(describe_on_one_rank, ranks=2)[0], "rank 1", "`describe`")


class Forward(nn.Module):
    """Differentiates in forward mode, whose zeros have no memory."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y, tangent = torch.func.jvp(lambda z: self.linear(z).tanh(), (x,), (torch.ones_like(x),))
        return x + y + tangent


def measured(group: Any) -> tuple[float, float]:
    x = torch.ones(4, 4)
    with zb.Pipeline(lambda stage, _: Forward(), "zb-h1", 2, nn.functional.mse_loss, group=group) as pipe:
        pipe.metering = True
        pipe.step(x, x)
        costs = pipe.profile(x, x, steps=1)
        return costs.held_after_f[pipe.rank], len(pipe.describe(x, x))


def test_forward_mode_differentiation_is_measured(world: Ranks) -> None:
    for held, num_reports in world.run(measured, ranks=2):
        assert held > 0
        assert num_reports == 2


def test_the_text_of_a_report_has_a_line_for_each_reason() -> None:
    vectors = tuple(InB(f"{n}.bias", "a reason of its own", "Linear" if n % 2 else "LayerNorm") for n in range(49))
    blocks = tuple(InB(f"blocks.{n}.conv", "gradients of Conv cannot be deferred") for n in range(6))
    report = SplitReport(0, "deferred", 0.99999, (*vectors, *blocks))
    lines = str(report).splitlines()
    assert len(lines) == 3
    assert "100" not in lines[0]
    states(lines[1], 49, "LayerNorm", "Linear")
    states(lines[2], 6, "blocks.0.conv", "blocks.5.conv", "Conv")
    states(str(SplitReport(0, "deferred", 1.0, ())), "100.0")


def test_every_rank_describes_every_stage(world: Ranks) -> None:
    (reports, text, untouched), *others = world.run(describe, "zb-h1", ranks=2)
    assert others == [(reports, text, True)]
    assert untouched
    assert [(r.stage, r.way, r.share) for r in reports] == [(s, "deferred", 1.0) for s in range(2)]
    kept = {each.parameter: each.vector_of for each in reports[0].in_b}
    assert kept["1.norm.weight"] == "LayerNorm"
    assert not [name for name in kept if "up.weight" in name or name.startswith("0.weight")]
    states(text, "stage 0", "W", "99.9", "in B", "LayerNorm")


def test_describe_reports_a_schedule_without_w(world: Ranks) -> None:
    for reports, _, _ in world.run(describe, "1f1b", ranks=2):
        assert [(r.way, r.share) for r in reports] == [("whole", 0.0)] * 2
        for report in reports:
            states(str(report.in_b[0]), "every", "BW")


def test_the_share_is_that_of_flops() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y: Tensor = m.deferred(x) @ (2 * m.matrix).t()  # the weight of the product is computed, and its gradient stays in B
        return y

    module = Way(forward, deferred=nn.Linear(6, 6), matrix=parameter(18, 6))
    stage = make_stage("deferred", module, 0)
    stage.splitter.count()
    with stage.stepping():
        stage.forward(0, (torch.randn(5, 6, requires_grad=True),))
        stage.backward(0, (torch.ones(5, 18),))
        stage.weight(0)
    report = stage.splitter.report()
    assert report.share == 0.25
    assert [each.parameter for each in report.in_b] == ["matrix", "deferred.bias"]


def report_of(module: nn.Module, x: Tensor, split: str = "deferred") -> zb.SplitReport:
    stage = make_stage(split, module, 0)
    stage.splitter.count()
    with stage.stepping():
        (y,) = stage.forward(0, (x,))
        stage.backward(0, (torch.ones_like(y),))
        stage.weight(0)
    return stage.splitter.report()


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="this torch has no grouped products")
def test_the_share_counts_grouped_products() -> None:
    grouped = hasattr(nn.functional, "grouped_mm")
    product = nn.functional.grouped_mm if grouped else torch._grouped_mm

    def by_rows(m: Any, x: Tensor) -> Tensor:
        return product(m.first(x), m.w, offs=torch.tensor([4, 10], dtype=torch.int32, device=x.device))

    def by_batches(m: Any, x: Tensor) -> Tensor:  # nothing is known to defer
        return product(m.first(x).view(2, 5, 16), m.w)

    def share(forward: Any) -> zb.SplitReport:
        weight = nn.Parameter(torch.randn(2, 16, 8, dtype=torch.bfloat16))
        return report_of(Way(forward, first=nn.Linear(8, 16).bfloat16(), w=weight), torch.randn(10, 8, dtype=torch.bfloat16))

    assert share(by_rows).share == 1.0
    late = share(by_batches)
    assert late.share == 0.5
    states(str(late.in_b), "Way", "zerobubble.nn.deferral")


def test_a_matrix_in_b_is_no_vector() -> None:
    report = report_of(
        Way(lambda m, x: m.first(x) @ m.w.exp(), first=nn.Linear(8, 16), w=nn.Parameter(torch.randn(16, 8))), torch.randn(10, 8)
    )
    (matrix,) = [each for each in report.in_b if each.parameter == "w"]
    assert not matrix.vector_of
    states(matrix.reason, "Way", "zerobubble.nn.deferral")


def test_a_graph_says_which_gradients_come_with_the_input_s_and_which_cost_too_much_to_defer() -> None:
    module = Way(
        lambda m, x: m.scale * m.linear(torch.tanh(x + m.added)),
        added=parameter(50, 8),
        linear=nn.Linear(8, 8, bias=False),
        scale=parameter(1, 8),
    )
    reasons = {each.parameter: each.reason for each in report_of(module, torch.randn(50, 8, requires_grad=True), "graph").in_b}
    assert reasons.keys() == {"added", "scale"}
    states(reasons["added"], "input")
    states(reasons["scale"], "bytes")


def test_a_share_that_cannot_be_counted_is_not_claimed() -> None:
    bilinear = Way(lambda m, x: m.bilinear(m.first(x), x), first=nn.Linear(6, 6), bilinear=nn.Bilinear(6, 6, 6))
    report = report_of(bilinear, torch.randn(5, 6))
    assert report.share is None
    assert [each.parameter for each in report.in_b] == ["first.bias", "bilinear.weight", "bilinear.bias"]


@pytest.mark.parametrize(("split", "completes"), [("deferred", True), ("graph", False), ("whole", False)])
def test_the_last_w_s_complete_parameters_one_by_one_if_they_are_deferred(split: str, completes: bool) -> None:
    assert make_stage(split, nn.Linear(8, 8), 0).completes_by_parameter is completes


def test_a_backward_within_the_forward_leaves_its_gradient_at_once() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        m.linear(x.detach()).square().sum().backward()
        y: Tensor = m.linear(x)
        return y

    module, x = Way(forward, linear=nn.Linear(4, 4, bias=False)), torch.randn(2, 4)
    weight = module.linear.weight
    stage = make_stage("deferred", module, 0)
    with stage.stepping():
        (y,) = stage.forward(0, (x,))
        assert weight.grad is not None
        within = weight.grad.clone()
        stage.backward(0, (torch.ones_like(y),))
        assert torch.equal(weight.grad, within)
        stage.weight(0)
    torch.testing.assert_close(weight.grad - within, torch.ones(4, 2) @ x)
