"""Stages that average or shard their own parameters, and stages whose parameters change after construction.

Parameters that FSDP2 manages wait for W.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerobubble as zb
from tests.device import DEVICE
from tests.procs.models import batch, build, gradient_error, loss_fn, one_device
from tests.procs.ranks import Ranks, alone
from tests.procs.test_peers import OUT_OF_ORDER
from tests.procs.versions import needs_fsdp2_on_cpu
from tests.refusals import states
from tests.thinned import every


def sharded(group: Any, name: str) -> float:
    """Two pipelines of two ranks, each stage sharded over the same ranks of both: the largest error of gradients."""
    from torch.distributed.fsdp import fully_shard

    from tests.procs.meshes import init_device_mesh

    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("data", "pipe"))
    data, pipes = mesh["data"], mesh["pipe"]
    replica = data.get_local_rank()
    worst = 0.0
    with zb.Pipeline(lambda s, n: fully_shard(build(s, n), mesh=data), name, 4, loss_fn, group=pipes.get_group()) as pipe:
        stages = [build(s, pipe.schedule.num_stages) for s in range(pipe.schedule.num_stages)]
        for step in range(2):
            pipe.step(*batch(4, seed=2 * step + replica))
            for other in range(2):
                one_device(stages, 4, *batch(4, seed=2 * step + other))
        for stage, module in pipe.modules.items():
            for mine, theirs in zip(module.parameters(), stages[stage].parameters(), strict=True):
                worst = max(worst, (mine.grad.full_tensor() - theirs.grad / 2).abs().max().item())
    return worst


@pytest.mark.sweep
@needs_fsdp2_on_cpu
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v"])
def test_fsdp2_trains_with_the_numbers_of_one_device(world: Ranks, name: str) -> None:
    assert max(world.run(sharded, name, ranks=4)) <= 1e-13


def replicated(module: nn.Module, group: Any) -> nn.Module:
    from torch.distributed._composable import replicate

    return replicate(module, process_group=group)


def fsdp1(module: nn.Module, group: Any) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(module, process_group=group, device_id=DEVICE)


WRAPPERS = {"module under replicate()": replicated, "FullyShardedDataParallel": fsdp1}


def wrapped(group: Any, kind: str) -> str:
    with pytest.raises(zb.InputError) as caught:
        zb.Pipeline(lambda s, n: nn.Sequential(WRAPPERS[kind](build(s, n), alone())), "1f1b", 4, loss_fn, group=group)
    return str(caught.value)


@pytest.mark.parametrize("kind", WRAPPERS)
def test_what_averages_within_a_step_is_refused(world: Ranks, kind: str) -> None:
    for text in world.run(wrapped, kind, ranks=4):
        for stage in range(4):
            states(text, f"rank {stage}", f"stage {stage}", kind.split()[-1])
        states(text, "group", "average")


class Growing(nn.Module):
    """Gets a parameter after its first step, with a gradient that is a view of what the Linear before it needs for W."""

    def __init__(self, stage: int, num_stages: int) -> None:
        super().__init__()
        self.inner = build(stage, num_stages)
        torch.manual_seed(stage)
        self.linear = nn.Linear(6, 6).double() if stage < num_stages - 1 else None
        self.extra: nn.Parameter | None = None

    def grow(self) -> None:
        self.extra = nn.Parameter(torch.ones(10, 6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        if self.linear is not None:
            y = self.linear(y)
        return y if self.extra is None or self.linear is None else y + self.extra.view(2, 5, 6)


def grown(group: Any) -> float:
    """The largest error of gradients in an order where two B of the grown stage run before the W of the first."""
    with zb.Pipeline(Growing, zb.Schedule.from_text(OUT_OF_ORDER), 4, loss_fn, group=group) as pipe:
        stages = [Growing(s, pipe.schedule.num_stages) for s in range(pipe.schedule.num_stages)]
        for step in range(3):
            pipe.step(*batch(4, seed=step))
            one_device(stages, 4, *batch(4, seed=step))
            if step == 0:
                for module in [*stages, *pipe.modules.values()]:
                    module.grow()
        return gradient_error(pipe, stages)


def test_parameters_may_come_between_steps(world: Ranks) -> None:
    assert max(world.run(grown, ranks=2)) <= 1e-13


def grown_copy(group: Any) -> str:
    with zb.Pipeline(Growing, "chimera", 4, loss_fn, group=group) as pipe:
        pipe.step(*batch(4))
        for module in pipe.modules.values():
            module.grow()
        with pytest.raises(zb.InputError) as caught:
            pipe.step(*batch(4))
        return str(caught.value)


def test_but_not_into_a_stage_that_has_copies(world: Ranks) -> None:
    for text in world.run(grown_copy, ranks=2):
        states(text, "parameters", "extra")


class Raw(nn.Module):
    """A stage with its own matrix after a block that has a matrix and a Linear."""

    def __init__(self, stage: int, num_stages: int) -> None:
        super().__init__()
        torch.manual_seed(stage)
        self.table = nn.Embedding(11, 6).double() if stage == 0 else nn.Identity()
        self.block = Product()
        self.matrix = nn.Parameter(torch.randn(6, 6).double() / 3)
        self.head = nn.Linear(6, 11).double() if stage == num_stages - 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.block(self.table(x)) @ self.matrix)
        return y


class Product(nn.Module):
    """Two weights used in the two ways that the split knows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6).double()
        self.matrix = nn.Parameter(torch.randn(6, 6).double() / 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + torch.tanh(self.linear(x)) @ self.matrix
        return y


def sharded_in_part(group: Any, name: str, parts: str, syncs_late: bool) -> tuple[float, list[zb.SplitReport]]:
    """Two pipelines of two ranks whose stages FSDP2 shards over both, whole or their blocks alone: the largest error of gradients."""
    from torch.distributed.fsdp import fully_shard

    from tests.procs.meshes import init_device_mesh

    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("data", "pipe"))
    data, pipes = mesh["data"], mesh["pipe"]
    replica = data.get_local_rank()

    def shard(stage: int, num_stages: int) -> nn.Module:
        module = Raw(stage, num_stages)
        fully_shard(module.block, mesh=data)
        return fully_shard(module, mesh=data) if parts == "stage" else module

    with zb.Pipeline(shard, name, 4, loss_fn, group=pipes.get_group()) as pipe:
        message = pipe.describe(*batch(4))
        stages = [Raw(s, pipe.schedule.num_stages) for s in range(pipe.schedule.num_stages)]
        sharded = [part for module in pipe.modules.values() for part in module.modules() if hasattr(part, "reshard")]
        for step in range(2):
            for part in sharded if syncs_late else ():
                part.set_requires_gradient_sync(step == 1)
                part.set_reshard_after_backward(step == 1)
            pipe.step(*batch(4, seed=2 * step + replica))
            for other in range(2):
                one_device(stages, 4, *batch(4, seed=2 * step + other))
        worst = 0.0
        for stage, module in pipe.modules.items():
            for mine, theirs in zip(module.parameters(), stages[stage].parameters(), strict=True):
                found: Any = mine.grad
                if hasattr(found, "full_tensor"):
                    found = found.full_tensor()
                else:  # parameters that FSDP2 does not manage are not reduced over replicas
                    dist.all_reduce(found, group=data.get_group())
                    found = found / 2
                worst = max(worst, ((found - theirs.grad / 2).norm() / theirs.grad.norm()).item())
        return worst, list(message)


@pytest.mark.sweep
@needs_fsdp2_on_cpu
@pytest.mark.parametrize(("name", "parts", "syncs_late"), every(5, product(["1f1b", "zb-h1", "zb-v"], ["stage", "block"], [False, True])))
def test_what_fsdp2_manages_waits_for_w(world: Ranks, name: str, parts: str, syncs_late: bool) -> None:
    for worst, result in world.run(sharded_in_part, name, parts, syncs_late, ranks=4):
        assert worst <= 1e-12
        for report in result if name != "1f1b" else ():
            assert report.share == 1.0
            assert all(each.vector_of for each in report.in_b)


def thawed(group: Any, schedule: str, split: str, frozen: tuple[int, ...]) -> float:
    """The largest error of gradients over steps between which these stages, of the first its table, are frozen and trained in turns."""
    worst = 0.0
    with zb.Pipeline(build, schedule, 4, loss_fn, group=group, split=split) as pipe:
        stages = [build(s, pipe.schedule.num_stages) for s in range(pipe.schedule.num_stages)]
        for step, trains in enumerate([False, True, False, True]):
            for index, module in [*enumerate(stages), *pipe.modules.items()]:
                part = module[0] if index == 0 else module
                part.requires_grad_(trains or index not in frozen)
                module.zero_grad()
            pipe.step(*batch(4, seed=step))
            one_device(stages, 4, *batch(4, seed=step))
            worst = max(worst, gradient_error(pipe, stages))
    return worst


WAYS = [("1f1b", "whole"), ("zb-h1", "deferred"), ("zb-v", "deferred"), ("zb-h1", "graph")]


@pytest.mark.sweep
@pytest.mark.parametrize(("frozen", "schedule", "split"), every(3, ((frozen, *way) for frozen in [(0,), (1,), (0, 1)] for way in WAYS)))
def test_parameters_may_be_frozen_between_steps(world: Ranks, schedule: str, split: str, frozen: tuple[int, ...]) -> None:
    assert max(world.run(thawed, schedule, split, frozen, ranks=2)) <= 1e-13
