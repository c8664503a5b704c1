"""Overlapped steps and copies of a stage: what a user's overlap function may do, and what keeps two copies one model."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import zerobubble as zb
from tests.procs.models import batch, build, loss_fn
from tests.procs.ranks import Ranks
from tests.procs.test_gradients import worst_errors
from tests.refusals import states
from zerobubble.cli import main
from zerobubble.runtime.executor.overrides import Overlapped


def in_two_threads(first: Overlapped, second: Overlapped) -> None:
    thread = threading.Thread(target=second.run)
    thread.start()
    first.run()
    thread.join()


def train(group: Any, name: str, microbatches: int) -> tuple[float, list[str]]:
    """The largest relative error of loss and gradients, and the steps that went through the overlap function."""
    met: list[str] = []

    def overlap(first: Overlapped, second: Overlapped) -> None:
        met.append(f"{first.op}&{second.op}")
        assert isinstance(first.module, nn.Module)
        in_two_threads(first, second)

    return max(worst_errors(group, zb.make(name, group.size(), microbatches), 1, overlap=overlap).values()), met


@pytest.mark.parametrize(("name", "ranks", "microbatches"), [("dualpipe", 4, 8), ("dualpipe", 2, 6), ("dualpipe-v", 3, 8)])
def test_an_overlap_function_runs_every_pair_on_its_own_threads(world: Ranks, name: str, ranks: int, microbatches: int) -> None:
    steps = zb.make(name, ranks, microbatches).steps
    for rank, (worst, met) in enumerate(world.run(train, name, microbatches, ranks=ranks)):
        assert worst <= 1e-12
        assert met == ["&".join(map(str, step)) for step in steps[rank] if len(step) == 2]


def planned_pairs() -> zb.planning.Plan:
    """A plan of overlapped pairs: F with BW takes 18 of 26 ms."""
    costs = zb.Costs.from_ms([10.0] * 4, [10.0] * 4, [6.0] * 4, hidden=[8.0] * 4)
    limits = zb.Limits((6 * costs.held_after_f[0],) * 2)
    return zb.plan(costs, 8, limits, placements=zb.Placement.vee(2), evaluations=4_000)


def train_planned(group: Any, plan: zb.planning.Plan) -> tuple[float, list[str], zb.Timeline]:
    """The largest relative error of loss and gradients, the pairs that the overlap function ran, and the timeline."""
    met: list[str] = []

    def overlap(first: Overlapped, second: Overlapped) -> None:
        met.append(f"{first.op}&{second.op}")
        in_two_threads(first, second)

    worst = max(worst_errors(group, plan.schedule, 1, overlap=overlap).values())
    with zb.Pipeline(build, plan, 8, loss_fn, group=group, overlap=overlap) as pipe:
        pipe.step(*batch(8))
        return worst, met, pipe.timeline()


@pytest.mark.long
def test_a_planned_pair_runs_through_the_overlap_function_and_is_drawn(world: Ranks, tmp_path: Path) -> None:
    plan = planned_pairs()
    pairs = [[step for step in row if len(step) == 2] for row in plan.schedule.steps]
    assert all(pairs), "a plan in which pairs save time has some on each rank"
    for rank, (worst, met, timeline) in enumerate(world.run(train_planned, plan, ranks=2)):
        assert worst <= 1e-12
        assert met[: len(pairs[rank])] == ["&".join(map(str, step)) for step in pairs[rank]]
        spans = {span.op: span for _, span in timeline.spans()}
        for first, second in pairs[rank]:
            assert (spans[first].start, spans[first].end) == (spans[second].start, spans[second].end)
    output = CliRunner().invoke(main, ["show", save(plan, tmp_path), "--svg", str(tmp_path / "pairs.svg")])
    assert output.exit_code == 0, output.output
    drawn = (tmp_path / "pairs.svg").read_text()
    assert all(f"{op.kind}{op.microbatch} of stage {op.stage};" in drawn for pair in pairs[0] for op in pair)


def save(plan: zb.planning.Plan, folder: Path) -> str:
    """The plan in a file."""
    path = folder / "plan.json"
    zb.io.save_plan(plan, path)
    return str(path)


def forget_one(group: Any) -> str:
    pipe = zb.Pipeline(build, "dualpipe-v", 4, loss_fn, group=group, overlap=lambda first, second: first.run())
    with pytest.raises(zb.PipelineError) as caught:
        pipe.step(*batch(4))
    return str(caught.value)


def test_an_overlap_function_that_leaves_a_pass_is_reported(world: Ranks) -> None:
    for message in world.run(forget_one, ranks=2):
        states(message, "function", "overlap")


def measured(group: Any) -> zb.Timeline:
    with zb.Pipeline(build, "dualpipe", 4, loss_fn, group=group) as pipe:
        pipe.step(*batch(4))
        return pipe.timeline()


def test_overlapped_passes_are_measured_as_one_step(world: Ranks) -> None:
    timeline = world.run(measured, ranks=2)[0]
    schedule = zb.make("dualpipe", 2, 4)
    spans = {span.op: span for _, span in timeline.spans()}
    assert schedule.overlaps
    for first, second in schedule.overlaps:
        assert (spans[first].start, spans[first].end) == (spans[second].start, spans[second].end)
    assert zb.fit.fit_costs(timeline).num_stages == 2


def rank_seeded(stage: int, num_stages: int) -> nn.Module:
    module = build(stage, num_stages)
    noise = torch.Generator().manual_seed(torch.distributed.get_rank())
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.rand(parameter.shape, generator=noise))
    module.register_buffer("seen", torch.tensor([float(torch.distributed.get_rank())]))
    return module


def learn(group: Any, name: str, microbatches: int) -> tuple[dict[int, dict[str, torch.Tensor]], list[float], torch.Tensor | None]:
    with zb.Pipeline(rank_seeded, name, microbatches, loss_fn, group=group) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
        losses = []
        for step in range(3):
            losses.append(pipe.step(*batch(microbatches, seed=step)).item())
            optimizer.step()
            optimizer.zero_grad()
        loss, outputs = pipe.eval_step(*batch(microbatches))
        losses.append(loss.item())
        return {s: m.state_dict() for s, m in pipe.modules.items()}, losses, outputs


@pytest.mark.long
@pytest.mark.parametrize(("name", "ranks", "microbatches"), [("chimera", 4, 6), ("dualpipe", 4, 8)])
def test_copies_start_equal_and_stay_equal_to_the_bit(world: Ranks, name: str, ranks: int, microbatches: int) -> None:
    results = world.run(learn, name, microbatches, ranks=ranks)
    assert len({tuple(losses) for _, losses, _ in results}) == 1
    for stage in range(ranks):
        one, other = (results[route[stage]][0][stage] for route in zb.make(name, ranks, microbatches).placement.routes)
        assert one["seen"] == stage  # the buffer of the first route's rank
        assert all(torch.equal(one[name], other[name]) for name in one)
    outputs = [outputs for _, _, outputs in results]
    assert [shape.shape[0] if shape is not None else None for shape in outputs] == [None] * (ranks - 1) + [2 * microbatches]


def wider_on_rank_0(stage: int, num_stages: int) -> nn.Module:
    return build(stage, num_stages, width=8 if torch.distributed.get_rank() == 0 else 6)


def open_unequal(group: Any) -> str:
    with pytest.raises(zb.InputError) as caught:
        zb.Pipeline(wider_on_rank_0, "chimera", 4, loss_fn, group=group)
    return str(caught.value)


def test_copies_of_different_shape_are_refused_everywhere(world: Ranks) -> None:
    for message in world.run(open_unequal, ranks=4):
        states(message, "stage 0", "ranks 0", 3, "parameters")


def sharing(group: Any, on_all: bool) -> list[list[float]]:
    torch.manual_seed(0)
    stages = [nn.Linear(3, 3, dtype=torch.float64) for _ in range(2)]
    if on_all or torch.distributed.get_rank() == 0:
        stages[1].weight = stages[0].weight
    with zb.Pipeline(stages, "chimera", 4, nn.functional.mse_loss, group=group) as pipe:
        x = torch.randn(8, 3, dtype=torch.float64)
        for _ in range(2):
            pipe.step(x, torch.sin(x))
    piped = [stages[0].weight.grad.flatten().tolist(), stages[1].bias.grad.tolist()]
    for stage in stages:
        stage.zero_grad()
    for _ in range(2):
        nn.functional.mse_loss(stages[1](stages[0](x)), torch.sin(x)).backward()
    return [*piped, stages[0].weight.grad.flatten().tolist(), stages[1].bias.grad.tolist()]


def test_a_parameter_that_two_copied_stages_share_is_summed_once(world: Ranks) -> None:
    for weight, bias, whole_weight, whole_bias in world.run(sharing, True, ranks=2):
        assert weight == pytest.approx(whole_weight, rel=1e-12, abs=1e-15)
        assert bias == pytest.approx(whole_bias, rel=1e-12, abs=1e-15)


def share_on_rank_0(group: Any) -> str:
    with pytest.raises(zb.InputError) as caught:
        sharing(group, on_all=False)
    return str(caught.value)


def test_copies_must_share_alike(world: Ranks) -> None:
    for message in world.run(share_on_rank_0, ranks=2):
        states(message, "stage 1", "ranks 0", 1, "parameters")


def breaks_on_rank_1(stage: int, num_stages: int) -> nn.Module:
    if torch.distributed.get_rank() == 1:
        raise RuntimeError("no such checkpoint")
    return build(stage, num_stages)


def open_broken(group: Any) -> str:
    with pytest.raises(zb.InputError) as caught:
        zb.Pipeline(breaks_on_rank_1, "1f1b", 4, loss_fn, group=group)
    return str(caught.value)


def test_a_build_that_raises_is_reported_on_every_rank(world: Ranks) -> None:
    for message in world.run(open_broken, ranks=3):
        states(message, "rank 1", foreign="RuntimeError: no such checkpoint")
