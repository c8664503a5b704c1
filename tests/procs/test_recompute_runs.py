"""Recomputed forwards leave the same gradients, losses, buffers and random numbers, bit for bit, as forwards that run once.

A planned schedule with R has the gradients of one device and holds the predicted bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from operator import truediv
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerobubble as zb
from tests.device import DEVICE
from tests.procs.models import Block, batch, build, loss_fn
from tests.procs.ranks import Ranks
from tests.procs.test_gradients import worst_errors
from zerobubble.costs import Level
from zerobubble.schedules import with_recompute

CASES = [("1f1b", 3, 5), ("zb-h1", 2, 4), ("zb-v", 2, 6), ("dualpipe", 2, 4), ("gpipe", 4, 4)]


def train(group: Any, name: str, microbatches: int) -> dict[str, float]:
    return worst_errors(group, with_recompute(zb.make(name, group.size(), microbatches)), steps=2)


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "ranks", "microbatches"), CASES)
def test_recomputed_schedules_train_with_the_numbers_of_one_device(world: Ranks, name: str, ranks: int, microbatches: int) -> None:
    for errors in world.run(train, name, microbatches, ranks=ranks):
        assert max(errors.values()) <= 1e-12


class Everything(nn.Module):
    """A stage with dropout, running statistics, an added loss, a skip from the first stage to the last, and a tied weight at both ends."""

    def __init__(self, stage: int, num_stages: int) -> None:
        super().__init__()
        torch.manual_seed(stage)
        self.stage, self.last = stage, num_stages - 1
        self.tok = nn.Embedding(11, 6) if stage == 0 else None
        self.head = nn.Linear(6, 11, bias=False) if stage == self.last else None
        self.block = Block(6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        if self.tok is not None:
            x = self.tok(x)
            zb.nn.stash("skip", x)
        x = self.drop(self.block(x))
        x = self.norm(x.flatten(0, 1)).view_as(x)
        zb.nn.add_loss("size", x.square().mean() * 0.01)
        if self.head is None:
            return x
        return self.head(x + zb.nn.pop("skip"))


def leave(group: Any, schedule: zb.Schedule) -> tuple[list[Tensor], dict[str, float], int]:
    """All tensors that two steps leave on this rank, what was added to the loss, and how often `loss_fn` was heard of."""
    heard: list[int] = []
    torch.manual_seed(7)
    tied = [[(0, "tok.weight"), (schedule.num_stages - 1, "head.weight")]]
    with zb.Pipeline(
        Everything, schedule, schedule.num_microbatches, loss_fn, group=group, tied=tied, on_loss=lambda j, _: heard.append(j)
    ) as pipe:
        losses = [pipe.step(*batch(schedule.num_microbatches, seed=step)).detach() for step in range(2)]
        parts = [part for module in pipe.modules.values() for part in (*(p.grad for p in module.parameters()), *module.buffers())]
        added = {name: value.item() for name, value in pipe.added_losses.items()}
    return [*losses, *(part.detach().clone() for part in parts if part is not None), torch.get_rng_state()], added, len(heard)


def twice(group: Any, name: str, microbatches: int) -> tuple[bool, bool, int, int]:
    plain = zb.make(name, group.size(), microbatches)
    before, added_before, heard_before = leave(group, plain)
    after, added, heard = leave(group, with_recompute(plain))
    same = [torch.equal(one, other) for one, other in zip(before, after, strict=True)]
    return all(same), added == added_before != {}, heard_before, heard


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "ranks", "microbatches"), [("gpipe", 2, 3), ("zb-h1", 3, 4), ("zb-v", 2, 4)])
def test_random_numbers_and_changed_buffers_count_once(world: Ranks, name: str, ranks: int, microbatches: int) -> None:
    for same, added, heard_before, heard in world.run(twice, name, microbatches, ranks=ranks):
        assert same
        assert added
        assert heard == heard_before


class Counted(nn.Module):
    """A stage that counts its forwards, with an object that R does not put back; that of rank 0 is frozen."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        torch.manual_seed(stage)
        self.body = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
        self.body.requires_grad_(stage > 0)
        self.call = mock.Mock()

    def forward(self, x: Tensor) -> Tensor:
        self.call()
        return self.body(x)


def frozen_below(group: Any, recompute: Any) -> tuple[int, int, int]:
    """Forwards that the stage of this rank runs in a step, the most bytes that it holds, and those that a profile says its F keeps."""
    with zb.Pipeline(
        lambda stage, _: Counted(stage),
        with_recompute(zb.make("gpipe", 2, 4)),
        4,
        nn.functional.mse_loss,
        group=group,
        recompute=recompute,
    ) as pipe:
        x = torch.randn(8, 16)
        (module,) = pipe.modules.values()
        pipe.step(x, x)
        before = module.call.call_count
        pipe.metering = True
        pipe.step(x, x)
        calls = module.call.call_count - before
        peak = pipe.timeline().ranks[group.rank()].peak_bytes
        return calls, peak, pipe.profile(x, x, steps=1).column("held_input")[group.rank()]


@pytest.mark.parametrize("recompute", [None, {"perceptron": ["body"]}])
def test_a_frozen_stage_that_no_gradient_reaches_keeps_no_input_and_runs_once(world: Ranks, recompute: Any) -> None:
    frozen, trained = world.run(frozen_below, recompute, ranks=2)
    assert frozen == (4, 0, 0)
    assert trained[0] == (8 if recompute is None else 4)
    assert trained[1] > 0


class Checkpointed(nn.Module):
    """A stage that itself computes its own parts again, with dropout."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        torch.manual_seed(stage)
        self.body = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.Dropout(0.2))

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.body, x, use_reentrant=False)


def train_in_half_precision(group: Any, stage: Callable[[int], nn.Module], schedule: zb.Schedule, **options: Any) -> list[Tensor]:
    """The losses and weights after steps under autocast, whose norms are clipped without a barrier."""
    torch.manual_seed(group.rank())
    data = torch.Generator().manual_seed(0)
    with zb.Pipeline(lambda index, _: stage(index), schedule, 4, nn.functional.mse_loss, group=group, **options) as pipe:
        optimizer = zb.PostValidation(torch.optim.AdamW(pipe.parameters(), lr=1e-2), pipe, max_norm=0.05, undo="copy")
        losses = []
        for _ in range(4):
            x, y = torch.randn(2, 8, 16, generator=data)
            with torch.autocast(DEVICE.type, torch.bfloat16):
                losses.append(pipe.step(x, y).detach().clone())
            optimizer.step()
            optimizer.zero_grad()
        optimizer.settle()
        return [*losses, *(parameter.detach().clone() for parameter in pipe.parameters())]


def with_and_without(group: Any, name: str) -> bool:
    plain = zb.make(name, group.size(), 4)
    pairs = zip(*(train_in_half_precision(group, Checkpointed, schedule) for schedule in (plain, with_recompute(plain))), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_autocast_checkpoints_inside_and_an_optimizer_without_a_barrier_change_nothing(world: Ranks, name: str) -> None:
    assert all(world.run(with_and_without, name, ranks=2))


class Picking(nn.Module):
    """Matrices and rows picked by numbers, whose products autograd saves the numbers for; `wrapped` runs the forward."""

    def __init__(self, stage: int, wrapped: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(stage)
        self.stack = nn.Parameter(torch.randn(4, 6, 6, dtype=torch.float64) / 3)
        self.inner = _Picked(self.stack)
        self.wrapped = wrapped

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.wrapped(self.inner, x)
        return y


class _Picked(nn.Module):
    def __init__(self, stack: nn.Parameter) -> None:
        super().__init__()
        self.stack = stack

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.tensor([1, 0])
        return x + torch.bmm(x, self.stack[rows]) + x[rows] @ (2 * self.stack[3])


def checkpointed(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    y: Tensor = checkpoint(call, x, use_reentrant=False)
    return y


WRAPPED: dict[str, Callable[..., Any]] = {"plain": lambda call, *args: call(*args), "checkpoint": checkpointed}


def picked(group: Any, wrapped: str, again: bool) -> list[Tensor]:
    """The loss and the gradients of a step."""
    schedule = zb.make("zb-h1", 2, 4)
    data = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 8, 5, 6, generator=data, dtype=torch.float64)
    with zb.Pipeline(
        lambda stage, _: Picking(stage, WRAPPED[wrapped]),
        with_recompute(schedule) if again else schedule,
        4,
        nn.functional.mse_loss,
        group=group,
    ) as pipe:
        loss = pipe.step(x, y)
        return [loss, *(parameter.grad.clone() for parameter in pipe.parameters() if parameter.grad is not None)]


def picked_in_all_ways(group: Any) -> list[float]:
    plain, *others = [picked(group, *way) for way in (("plain", False), ("plain", True), ("checkpoint", False), ("checkpoint", True))]
    return [max((one - other).abs().max().item() for one, other in zip(plain, each, strict=True)) for each in others]


@pytest.mark.long
def test_numbers_that_pick_matrices_are_not_asked_back_from_autograd(world: Ranks) -> None:
    """What packs what autograd saves, R or a checkpoint, is not called within the forward."""
    for errors in world.run(picked_in_all_ways, ranks=2):
        assert max(errors) <= 1e-12


def measure(group: Any, name: str, microbatches: int) -> list[tuple[int, int, int]]:
    """By rank: the peak that a profile predicts, the one of a step, and the one without R."""
    x = torch.randn(2 * microbatches, 8, 32)

    def blocks(stage: int, num_stages: int) -> nn.Module:
        torch.manual_seed(stage)
        return nn.Sequential(*[Block(32) for _ in range(3)])

    peaks = []
    plain = zb.make(name, group.size(), microbatches)
    for schedule in (with_recompute(plain), plain):
        with zb.Pipeline(blocks, schedule, microbatches, nn.functional.mse_loss, group=group) as pipe:
            costs = pipe.profile(x, x, steps=1)
            pipe.metering = True
            pipe.step(x, x)
            peaks.append((zb.simulation.peak_memory(schedule, costs), [figures.peak_bytes or 0 for figures in pipe.timeline().ranks]))
    (predicted, held), (_, without) = peaks
    return list(zip(predicted, held, without, strict=True))


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "microbatches", "share"), [("gpipe", 6, 0.5), ("dualpipe", 4, 0.8)])
def test_the_bytes_held_are_those_predicted(world: Ranks, name: str, microbatches: int, share: float) -> None:
    """Within an overlapped step, too, in which one pass saves before the other has given back."""
    for rank, (predicted, held, without) in enumerate(world.run(measure, name, microbatches, ranks=2)[0]):
        assert abs(predicted / held - 1) <= 0.05, (rank, predicted, held)
        assert held < share * without


def alike(stage: int, num_stages: int) -> nn.Module:
    """Stages that hold the same, wherever they stand."""
    torch.manual_seed(stage)
    return nn.Sequential(*[Block(32) for _ in range(3)]).double()


def half_of_it(microbatches: int) -> Tensor:
    return torch.randn(2 * microbatches, 8, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def profiled(group: Any, microbatches: int) -> zb.Costs:
    """The costs of the stages with their bytes, measured in a schedule that computes every forward again."""
    x = half_of_it(microbatches)
    with zb.Pipeline(
        alike, with_recompute(zb.make("zb-v", group.size(), microbatches)), microbatches, nn.functional.mse_loss, group=group
    ) as pipe:
        return pipe.profile(x, x, steps=1)


def play_plan(group: Any, plan: dict[str, Any]) -> tuple[float, int]:
    """The largest relative error of this rank's gradients against one device, and the most bytes that it held."""
    solved = zb.planning.Plan.from_dict(plan)
    m, stages = solved.problem.num_microbatches, solved.problem.placement.num_stages
    x = half_of_it(m)
    whole = nn.Sequential(*[alike(stage, stages) for stage in range(stages)])
    for part in x.chunk(m):
        (nn.functional.mse_loss(whole(part), part) / m).backward()
    with zb.Pipeline(alike, solved, m, nn.functional.mse_loss, group=group) as pipe:
        pipe.metering = True
        pipe.step(x, x)
        pairs = [
            (mine.grad, theirs.grad)
            for index, module in pipe.modules.items()
            for mine, theirs in zip(module.parameters(), whole[index].parameters(), strict=True)
        ]
        worst = max(((mine - theirs).norm() / theirs.norm()).item() for mine, theirs in pairs)  # type: ignore[operator, union-attr]
        return worst, pipe.timeline().ranks[pipe.rank].peak_bytes or 0


@pytest.mark.long
def test_a_planned_schedule_runs_in_the_memory_that_it_was_planned_for(world: Ranks) -> None:
    """The level of the plan is that of the stages that keep most: the first one's input is the user's and costs nothing."""
    measured: zb.Costs = world.run(profiled, 6, ranks=2)[0]
    kept = max(map(truediv, measured.column("held_input"), measured.held_after_f))
    even = ((10_000_000,) * 4,) * 3
    costs = replace(measured, forward=even[0], backward=even[1], weight=even[2], comm=(0,) * 3, further=(), placement=zb.Placement.vee(2))
    room = zb.Limits(tuple(round(1.2 * sum(costs.held_after_f[s] for s in (r, 3 - r))) for r in range(2)))
    found = zb.plan(costs, 6, room, recompute="auto", levels=[Level("full", 1.0, kept)], evaluations=5000)
    again = sum(op.kind is zb.Kind.R for row in found.schedule.rows for op in row)
    assert 0 < again < 24
    for rank, (worst, held) in enumerate(world.run(play_plan, found.to_dict(), ranks=2)):
        assert worst <= 1e-12
        predicted = zb.simulation.peak_memory(found.schedule, measured)[rank]
        assert abs(predicted / held - 1) <= 0.05, (rank, predicted, held, measured)
        assert held <= found.peaks[rank] <= room.memory[rank], (rank, held, found.peaks, room)


class AsksForGradients(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x).tanh()
        (slope,) = torch.autograd.grad(y.sum(), self.layer.weight, create_graph=True)
        return y + slope.sum()


class ChangesItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if not x.requires_grad:
            x += 1
        return self.layer(x)


def refused(group: Any, stage_type: Any, split: str) -> str:
    schedule = with_recompute(zb.make("gpipe", 2, 2))
    with (
        pytest.raises((zb.InputError, zb.PipelineError)) as caught,
        zb.Pipeline(lambda s, n: stage_type(), schedule, 2, nn.functional.mse_loss, group=group, split=split) as pipe,
    ):
        pipe.step(torch.ones(4, 4), torch.ones(4, 4))
    return str(caught.value)


@pytest.mark.parametrize(
    ("stage_type", "split", "message"),
    [
        (AsksForGradients, "deferred", "computes gradients within its own forward, which has saved no tensors"),
        (ChangesItsInput, "deferred", "stage 0 changed its input in place, a (2, 4) torch.float32, so that"),
        (AsksForGradients, "graph", "split='graph' traces stage"),
    ],
)
def test_what_cannot_be_computed_again_is_refused_on_every_rank(world: Ranks, stage_type: Any, split: str, message: str) -> None:
    for text in world.run(refused, stage_type, split, ranks=2):
        assert message in text


def evaluate(group: Any) -> tuple[float, float]:
    with zb.Pipeline(build, with_recompute(zb.make("1f1b", 2, 4)), 4, loss_fn, group=group) as pipe:
        inputs, targets = batch(4)
        return pipe.step(inputs, targets).item(), pipe.eval_step(inputs, targets)[0].item()


def test_evaluation_computes_nothing_again(world: Ranks) -> None:
    for trained, evaluated in world.run(evaluate, ranks=2):
        assert evaluated == pytest.approx(trained, rel=1e-12)
