"""Random numbers of stages: no two passes share them, they depend only on what a pass computes, and the user's generators stay in step."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerobubble as zb
from tests.device import DEVICE
from tests.procs.meshes import init_device_mesh
from tests.procs.models import batch, build, loss_fn
from tests.procs.ranks import Ranks
from zerobubble.schedules import with_recompute

STAGES = 4
MICROBATCHES = 4
Masks = dict[tuple[int, int, int], list[float]]
"""What was drawn, by stage, microbatch of the whole batch and how often the forward had run before."""


class NoiseInBackward(torch.autograd.Function):
    """Changes nothing, and adds random numbers to the gradient, as stochastic rounding does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient + 0.01 * torch.rand_like(gradient)


def record(drawn: Masks, stage: int, microbatch: int, numbers: list[float]) -> None:
    drawn[stage, microbatch, sum(known[:2] == (stage, microbatch) for known in drawn)] = numbers


class Noisy(nn.Module):
    """A stage whose input has the microbatch number in the first column; it records the numbers drawn in forward."""

    def __init__(self, stage: int, drawn: Masks) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3, bias=False).double()
        nn.init.eye_(self.inner.weight)
        self.stage = stage
        self.record = Mock(side_effect=partial(record, drawn))  # R restores what a forward changes in other objects

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand(3)
        self.record(self.stage, int(x[0, 0]), noise.tolist())
        return torch.cat([x[:, :1], NoiseInBackward.apply(self.inner(x)[:, 1:] * noise[1:])], dim=1)


def numbered(first: int, count: int) -> Tensor:
    """Microbatches of one sample, with their numbers in the batch."""
    numbers = torch.arange(first, first + count, dtype=torch.float64)
    return torch.stack([numbers, numbers + 1, numbers + 2], dim=1)


def drawn(group: Any, name: str, replicas: int, again: bool = False) -> tuple[Masks, list[Tensor], dict[int, list[Tensor]]]:
    """The numbers drawn in two steps, the losses and each stage's gradients, on `replicas` that share the microbatches."""
    torch.manual_seed(5)
    masks: Masks = {}
    count, num_ranks = MICROBATCHES // replicas, dist.get_world_size(group) // replicas
    mesh = init_device_mesh(DEVICE.type, (replicas, num_ranks), mesh_dim_names=("dp", "pp")) if replicas > 1 else None
    where: dict[str, Any] = {"group": group} if mesh is None else {"mesh": mesh}
    schedule = zb.make(name, num_ranks, count, stages_per_rank=STAGES // num_ranks)
    with zb.Pipeline(
        lambda stage, _: Noisy(stage, masks), with_recompute(schedule) if again else schedule, count, nn.functional.mse_loss, **where
    ) as pipe:
        losses = [pipe.step(x, x).detach() for x in [numbered(0 if mesh is None else count * mesh.get_local_rank("dp"), count)] * 2]
        gradients = {stage: [p.grad for p in module.parameters() if p.grad is not None] for stage, module in pipe.modules.items()}
    return masks, losses, gradients


def together(world: Ranks, ranks: int, *args: Any) -> tuple[Masks, list[Tensor], dict[int, list[Tensor]]]:
    results = world.run(drawn, *args, ranks=ranks)
    masks = {key: numbers for theirs, *_ in results for key, numbers in theirs.items()}
    return masks, results[0][1], {stage: of_stage for *_, theirs in results for stage, of_stage in theirs.items()}


def worst(one: dict[int, list[Tensor]], other: dict[int, list[Tensor]]) -> float:
    return max((a - b).abs().max().item() for stage in one for a, b in zip(one[stage], other[stage], strict=True))


@pytest.mark.long
def test_masks_are_those_of_one_rank_under_every_schedule_and_no_two_are_alike(world: Ranks) -> None:
    masks, losses, gradients = together(world, 1, "interleaved-1f1b", 1)
    assert len(masks) == STAGES * MICROBATCHES * 2
    assert len({tuple(numbers) for numbers in masks.values()}) == len(masks)
    for ranks, name, replicas in ((2, "zb-v", 1), (4, "1f1b", 1), (4, "zb-v", 2)):
        others, their_losses, their_gradients = together(world, ranks, name, replicas)
        assert others == masks
        assert torch.allclose(torch.stack(losses), torch.stack(their_losses), rtol=1e-12)
        assert worst(gradients, their_gradients) <= 1e-12


def test_a_recomputed_forward_draws_what_the_first_one_drew(world: Ranks) -> None:
    masks, losses, gradients = together(world, 2, "zb-v", 1)
    twice, their_losses, their_gradients = together(world, 2, "zb-v", 1, True)
    assert len(twice) > len(masks)
    assert {(stage, j, *numbers) for (stage, j, _), numbers in twice.items()} == {(stage, j, *n) for (stage, j, _), n in masks.items()}
    assert torch.equal(torch.stack(losses), torch.stack(their_losses))
    assert worst(gradients, their_gradients) == 0


class Dropping(nn.Module):
    """A stage that drops in training and, as some models do, in evaluation."""

    def __init__(self, stage: int, num_stages: int) -> None:
        super().__init__()
        self.inner = build(stage, num_stages)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.inner(x), 0.3, training=True)


def user_states(group: Any) -> tuple[list[bool], list[float], list[float]]:
    """Whether calls leave the user's generator alone, and the losses of evaluations between steps, and of the steps without them."""
    moved, losses, evaluated = [], [], []
    for evaluates in (True, False):
        torch.manual_seed(5)
        with zb.Pipeline(Dropping, "1f1b", 2, loss_fn, group=group) as pipe:
            for step in range(2):
                before = torch.get_rng_state()
                losses.append(pipe.step(*batch(2, seed=step)).item())
                if evaluates:
                    evaluated += [pipe.eval_step(*batch(2))[0].item() for _ in range(2)]  # type: ignore[union-attr]
                moved.append(not torch.equal(before, torch.get_rng_state()))
    return moved, losses, evaluated


def test_calls_leave_the_users_generator_alone_and_evaluations_change_no_step(world: Ranks) -> None:
    for moved, losses, evaluated in world.run(user_states, ranks=2):
        assert not any(moved)
        assert losses[:2] == losses[2:]
        assert len(set(evaluated)) == 4


def in_ways(group: Any) -> list[list[float]]:
    """The losses of two steps with dropout in each split, the last of them after a state of before there was a seed in it."""
    found = []
    for split in ("whole", "deferred", "graph"):
        torch.manual_seed(5)
        with zb.Pipeline(
            lambda stage, n: nn.Sequential(build(stage, n), nn.Dropout(0.3)), "zb-h1", 2, loss_fn, group=group, split=split
        ) as pipe:
            losses = [pipe.step(*batch(2)).item()]
            state = pipe.step_state()
            if split == "graph":
                del state["draws_seed"]
            pipe.load_step_state(state)
            found.append([*losses, pipe.step(*batch(2)).item()])
    return found


@pytest.mark.long
def test_every_split_draws_the_same(world: Ranks) -> None:
    for whole, deferred, graph in world.run(in_ways, ranks=2):
        assert whole == pytest.approx(deferred, rel=1e-12)
        assert whole == pytest.approx(graph, rel=1e-12)
        assert whole[0] != whole[1]


def first_numbers(group: Any, name: str) -> tuple[dict[int, list[float]], list[float]]:
    """The weights of identical stages built under one seed on all ranks, and the user's next random numbers."""
    torch.manual_seed(5)
    schedule = zb.make(name, group.size(), 4, stages_per_rank=STAGES // group.size())
    with zb.Pipeline(lambda stage, _: nn.Linear(2, 2), schedule, 4, nn.functional.mse_loss, group=group) as pipe:
        weights = {stage: next(module.parameters()).flatten().tolist() for stage, module in pipe.modules.items()}
    return weights, torch.rand(3).tolist()


def test_stages_built_under_one_seed_start_with_numbers_of_their_own(world: Ranks) -> None:
    found = []
    for ranks, name in ((1, "interleaved-1f1b"), (2, "zb-v"), (4, "1f1b")):
        results = world.run(first_numbers, name, ranks=ranks)
        found += [({stage: numbers for weights, _ in results for stage, numbers in weights.items()}, drawn) for _, drawn in results]
    assert all(one == found[0] for one in found)
    assert len(set(map(tuple, found[0][0].values()))) == STAGES


def saved_and_resumed(group: Any, path: str, name: str, saves: bool) -> list[float]:
    """The losses of two steps behind the first, which another pipeline makes before."""
    torch.manual_seed(5 if saves else 6)
    per_rank = STAGES // dist.get_world_size(group)
    with zb.Pipeline(Dropping, zb.make(name, group.size(), 4, stages_per_rank=per_rank), 4, loss_fn, group=group) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        losses = []
        for step in range(3):
            if step == 1 and saves:
                zb.save(path, pipe, optimizer)
            if step == 0 and not saves:
                zb.load(path, pipe, optimizer)
                continue
            losses.append(pipe.step(*batch(4, seed=step)).item())
            optimizer.step()
            optimizer.zero_grad()
    return losses[-2:]


def test_other_ranks_go_on_with_the_masks_of_a_checkpoint(world: Ranks, tmp_path: Path) -> None:
    before = world.run(saved_and_resumed, str(tmp_path / "last"), "zb-v", True, ranks=2)[0]
    after = world.run(saved_and_resumed, str(tmp_path / "last"), "1f1b", False, ranks=4)[0]
    assert after == pytest.approx(before, rel=1e-12)
