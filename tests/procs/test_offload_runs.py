"""Offload of saved activations to host memory during training leaves every value unchanged, bit for bit.

Holds in every split, and in the predicted bytes. Tensors that others hold stay. A pass waits for its copy, however long that takes.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import zerobubble as zb
from tests.device import DEVICE, cpu_only
from tests.procs.meshes import init_device_mesh
from tests.procs.models import Block, batch, loss_fn
from tests.procs.programs import programs_of, run_forked
from tests.procs.ranks import Ranks
from tests.procs.test_gradients import worst_errors
from tests.procs.test_recompute_runs import Checkpointed, Everything, train_in_half_precision
from tests.procs.versions import needs_fsdp2_on_cpu
from tests.pure.problems import schedules
from tests.refusals import states
from tests.thinned import every
from zerobubble.offload import HostLink, Offload, RankOffloads
from zerobubble.offload.copies import copies_of
from zerobubble.rules import recomputed
from zerobubble.runtime.stage import saved_tensors
from zerobubble.runtime.stage.copy_lane import DeviceLane, HostLane
from zerobubble.timeline import Copying

WIDTH = 32


def everything(schedule: zb.Schedule, seed: int = 0) -> list[RankOffloads]:
    """All that can go and is not computed again, some of it early and some late."""
    draw = random.Random(seed)
    plans = []
    for steps in schedule.steps:
        again = recomputed(op for step in steps for op in step)
        where = {op: number for number, step in enumerate(steps) for op in step}
        chosen = []
        for op, made in where.items():
            users = [number for other, number in where.items() if other.kind in ("B", "BW") and other[1:] == op[1:]]
            if op.kind == zb.Kind.F and op[1:] not in again and users[0] - made > 1:
                freed = draw.randint(made + 1, users[0] - 1)
                chosen.append(Offload(op.stage, op.microbatch, made, freed, draw.randint(freed + 1, users[0]), users[0]))
        plans.append(RankOffloads(tuple(chosen), 0, 0, 0, 0))
    return plans


def blocks(stage: int, num_stages: int) -> nn.Module:
    torch.manual_seed(stage)
    return nn.Sequential(*[Block(WIDTH) for _ in range(2)])


def leave(group: Any, schedule: Any, m: int, **options: Any) -> tuple[list[Tensor], zb.Timeline]:
    """What two steps leave on this rank, parameters and gradients, and the metered timeline of the last one."""
    data = torch.Generator().manual_seed(0)
    with zb.Pipeline(blocks, schedule, m, nn.functional.mse_loss, group=group, **options) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        pipe.metering = True
        left = []
        for _ in range(2):
            optimizer.zero_grad()
            x = torch.randn(2 * m, 8, WIDTH, generator=data)
            left.append(pipe.step(x, x).detach())
            optimizer.step()
        for parameter in pipe.parameters():
            left += [parameter.detach().clone(), parameter.grad.clone()]  # type: ignore[union-attr]
        return left, pipe.timeline()


def equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def with_and_without(group: Any, schedule: zb.Schedule, split: str) -> tuple[bool, bool]:
    """Whether all numbers are the same, and every copy was made, in the order of the lane and none before the one before it ended."""
    plans = everything(schedule)
    m = schedule.num_microbatches
    plain, _ = leave(group, schedule, m, split=split)
    moved, timeline = leave(
        group, schedule, m, split=split, offload=plans, link=HostLink(to_host=1e9, from_host=1e9) if DEVICE.type == "cpu" else None
    )
    made = []
    for plan, copies in zip(plans, timeline.copies, strict=True):
        named, wanted = ([(one.copying, one.stage, one.microbatch) for one in row] for row in (copies, copies_of(plan.offloads)))
        made.append(named == wanted and all(one.end <= after.start for one, after in pairwise(copies)))
    return equal(plain, moved), all(made)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "split"),
    [
        ("1f1b", 3, 5, "deferred"),
        ("zb-v", 2, 5, "deferred"),
        ("zb-h1", 2, 4, "whole"),
        ("zb-h1", 2, 4, "graph"),
        pytest.param("zb-h1", 2, 4, "compiled", marks=pytest.mark.long),
        pytest.param("zb-h1", 4, 6, "deferred", marks=pytest.mark.long),
        pytest.param("gis", 4, 6, "deferred", marks=pytest.mark.long),
        pytest.param("interleaved-1f1b", 2, 4, "deferred", marks=pytest.mark.long),
        pytest.param("dualpipe", 2, 4, "deferred", marks=pytest.mark.long),
    ],
)
def test_offload_changes_no_result(world: Ranks, name: str, ranks: int, microbatches: int, split: str) -> None:
    schedule = zb.make(name, ranks, microbatches)
    assert world.run(with_and_without, schedule, split, ranks=ranks) == [(True, True)] * ranks


def waits_for_copies(group: Any, schedule: zb.Schedule) -> tuple[int, int, int]:
    """Counts of copies that no step overlaps, that end after the step before the waiting one, and after the start of the waiting one."""
    plans, link = everything(schedule), HostLink(to_host=1e9, from_host=1e9, latency=20_000_000)
    _, run = leave(group, schedule, schedule.num_microbatches, offload=plans, link=link)
    alone = held = early = 0
    for plan, row, copies in zip(plans, run.rows, run.copies, strict=True):
        ends = {copy[:3]: copy.end for copy in copies}
        assert all(copy.duration >= link.latency for copy in copies)
        for one in plan.offloads:
            alone += (one.freed == one.made + 1) + (one.back == one.needed)
            assert (row[one.made].op[1:], row[one.needed].op[1:]) == (one[:2], one[:2])
            for way, step in ((Copying.TO_HOST, one.freed), (Copying.FROM_HOST, one.needed)):
                end = ends[way, one.stage, one.microbatch]
                held += row[step - 1].end < end
                early += row[step].start < end
    return alone, held, early


@cpu_only("pace is for rehearsals on CPUs")
def test_a_pass_waits_for_a_paced_copy_that_it_needs(world: Ranks) -> None:
    found = world.run(waits_for_copies, zb.make("1f1b", 2, 4), ranks=2)
    assert found[0] == found[1]
    alone, held, early = found[0]
    assert 0 < alone <= held  # a copy that no step overlaps is waited for, on any machine
    assert not early


def measured(group: Any, schedule: zb.Schedule) -> zb.Costs:
    """The bytes of the stages as measured, with times that are everywhere the same."""
    m = schedule.num_microbatches
    x = torch.randn(2 * m, 8, WIDTH)
    with zb.Pipeline(blocks, schedule, m, nn.functional.mse_loss, group=group) as pipe:
        costs = pipe.profile(x, x, steps=1)
    ms = (10_000_000,) * schedule.num_stages
    return replace(costs, forward=ms, backward=ms, weight=ms, comm=(0,) * (schedule.num_stages - 1))


def predict_and_hold(group: Any, schedule: zb.Schedule) -> list[tuple[int, int, int, int]]:
    """By rank: the peak without offloads, the one predicted with them, the one metered, and the bytes planned to move."""
    microbatches = schedule.num_microbatches
    costs = measured(group, schedule)
    x = torch.randn(2 * microbatches, 8, WIDTH)
    without = zb.simulation.peak_memory(schedule, costs)
    limits = zb.Limits(tuple(round(0.75 * held) if rank == 0 else held for rank, held in enumerate(without)))
    link = HostLink(to_host=1e9, from_host=1e9)
    plans = zb.offload.plan_offloads(schedule, costs, limits, link, evaluations=20, rounds=0)
    predicted = zb.offload.play_offloads(schedule, costs, plans, link)
    peaks = [rank.peak_bytes or 0 for rank in predicted.ranks]
    with zb.Pipeline(blocks, schedule, microbatches, nn.functional.mse_loss, group=group, offload=plans) as pipe:
        pipe.metering = True
        pipe.step(x, x)
        metered = [rank.peak_bytes or 0 for rank in pipe.timeline().ranks]
        assert [rank.activations for rank in pipe.memory_forecast(costs)] == peaks
    return list(zip(without, peaks, metered, [plan.bytes for plan in plans], strict=True))


@pytest.mark.long
@pytest.mark.parametrize(("name", "ranks"), every(3, [("zb-v", 2), ("zb-h1", 3), ("1f1b", 4)]))
def test_the_device_holds_what_is_predicted(world: Ranks, name: str, ranks: int) -> None:
    found = world.run(predict_and_hold, zb.make(name, ranks, 6), ranks=ranks)[0]
    for without, predicted, metered, _ in found:
        assert abs(predicted / metered - 1) <= 0.05, found
        assert metered <= without
    without, _, metered, moved = found[0]
    assert moved
    assert metered <= 0.76 * without


@pytest.mark.long
def test_some_microbatches_go_to_the_host_and_others_are_computed_again(world: Ranks) -> None:
    schedule = zb.schedules.with_recompute(zb.make("1f1b", 3, 6), microbatches=[1, 4])
    assert world.run(with_and_without, schedule, "deferred", ranks=3) == [(True, True)] * 3
    found = world.run(predict_and_hold, schedule, ranks=3)[0]
    without, _, metered, moved = found[0]
    assert moved
    assert metered <= 0.76 * without
    assert all(abs(message / held - 1) <= 0.05 for _, message, held, _ in found), found


@contextmanager
def moving_small_ones() -> Iterator[list[int]]:
    """Inside, nothing is too small to move; the bytes of every copy are listed."""
    sizes: list[int] = []
    kind: Any = HostLane if DEVICE.type == "cpu" else DeviceLane
    copy = kind.copy

    def counted(lane: Any, copying: Any, pairs: Any) -> Any:
        sizes.append(sum(source.nbytes for _, source in pairs))
        return copy(lane, copying, pairs)

    with mock.patch.object(saved_tensors, "SMALLEST_BYTES", 1), mock.patch.object(kind, "copy", counted):
        yield sizes


def leave_everything(group: Any, schedule: zb.Schedule, **options: Any) -> list[Tensor]:
    """All tensors that two steps of stages with dropout, running statistics, a skip and a tied weight leave on this rank."""
    tied = [[(0, "tok.weight"), (schedule.num_stages - 1, "head.weight")]]
    torch.manual_seed(7)
    with zb.Pipeline(Everything, schedule, schedule.num_microbatches, loss_fn, group=group, tied=tied, **options) as pipe:
        losses = [pipe.step(*batch(schedule.num_microbatches, seed=step)).detach() for step in range(2)]
        parts = [part for module in pipe.modules.values() for part in (*(p.grad for p in module.parameters()), *module.buffers())]
        evaluated = pipe.eval_step(*batch(schedule.num_microbatches))[0]
    return [*losses, evaluated, *(part.detach().clone() for part in parts if part is not None), torch.get_rng_state()]


def random_stages(group: Any, name: str) -> bool:
    schedule = zb.make(name, group.size(), 4)
    plain, plans = leave_everything(group, schedule), everything(schedule)
    with moving_small_ones() as sizes:
        same = equal(plain, leave_everything(group, schedule, offload=plans))
    return same and all(sizes) and len(sizes) == 2 * 2 * len(plans[group.rank()].offloads)


@pytest.mark.long
@pytest.mark.parametrize("name", every(2, ["zb-v", "zb-h1"]))
def test_offload_keeps_dropout_statistics_skips_and_tied_weights(world: Ranks, name: str) -> None:
    assert all(world.run(random_stages, name, ranks=2))


class PartlyCheckpointed(Checkpointed):
    """A stage that computes some of its parts again itself, and keeps what others gave."""

    def __init__(self, stage: int) -> None:
        super().__init__(stage)
        self.first = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.first(x).tanh().square())


def half_precision(group: Any, name: str) -> bool:
    schedule = zb.make(name, group.size(), 4)
    plain, plans = train_in_half_precision(group, PartlyCheckpointed, schedule), everything(schedule)
    with moving_small_ones() as sizes:
        same = equal(plain, train_in_half_precision(group, PartlyCheckpointed, schedule, offload=plans))
    return same and all(sizes) and len(sizes) >= 2 * 4 * len(plans[group.rank()].offloads)  # more where a step starts over


@pytest.mark.long
@pytest.mark.parametrize("name", every(2, ["zb-v", "1f1b"]))
def test_autocast_checkpoints_and_steps_that_start_over_change_nothing(world: Ranks, name: str) -> None:
    assert all(world.run(half_precision, name, ranks=2))


class Fails(nn.Module):
    """A stage whose third backward pass fails."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x).tanh()
        y.register_hook(self.fail)
        return y * 2

    def fail(self, _: Tensor) -> None:
        self.count += 1
        if self.count == 3:
            raise ArithmeticError("the third backward pass fails")


def fail(group: Any) -> str:
    schedule = zb.make("1f1b", group.size(), 6)
    x = torch.ones(12, 8, WIDTH)
    stages = [nn.Linear(WIDTH, WIDTH), Fails()]
    with (
        pytest.raises(zb.PipelineError) as caught,
        zb.Pipeline(lambda stage, _: stages[stage], schedule, 6, nn.functional.mse_loss, group=group, offload=everything(schedule)) as pipe,
    ):
        pipe.step(x, x)
    return str(caught.value)


def test_a_failure_between_copies_is_one_error(world: Ranks) -> None:
    for result in world.run(fail, ranks=2):
        assert "rank 1" in result
        states(result, "backward", "third")


def refused(group: Any, wrong: str) -> str:
    schedule = zb.make("1f1b", 2, 4)
    plans = everything(schedule)
    options: dict[str, Any] = {"offload": plans}
    if wrong == "auto":
        schedule = "auto"
    elif wrong == "other steps":
        schedule = zb.make("gpipe", 2, 4)
    elif wrong == "recompute":
        schedule = zb.schedules.with_recompute(schedule)
    elif wrong == "too few":
        options["offload"] = plans[:1]
    elif wrong == "link alone":
        options = {"link": HostLink(1e9, 1e9)}
    elif wrong == "differ" and group.rank():
        options = {}
    with pytest.raises(zb.InputError) as caught:
        zb.Pipeline(blocks, schedule, 4, nn.functional.mse_loss, group=group, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("auto", "'auto' excludes offload"),
        ("other steps", "cannot run with these offloads: rank 0 offloads the values of 0F0"),
        ("recompute", "either offload or recompute"),
        ("too few", "has 2 ranks, but offloads are given for 1"),
        ("link alone", "link is for the copies of offloads: give offload, or leave link out"),
        ("differ", "offload"),
    ],
)
def test_what_cannot_be_played_is_refused_on_every_rank(world: Ranks, wrong: str, message: str) -> None:
    for text in world.run(refused, wrong, ranks=2):
        assert message in text


def other_numbers(group: Any) -> tuple[str, float, float]:
    """The error of a step with another number of microbatches, and the losses of the evaluation and the step after it."""
    schedule = zb.make("zb-h1", 2, 4)
    x = torch.ones(8, 8, WIDTH)
    with zb.Pipeline(blocks, schedule, 4, nn.functional.mse_loss, group=group, offload=everything(schedule)) as pipe:
        with pytest.raises(zb.InputError) as caught:
            pipe.step(x, x, num_microbatches=2)
        evaluated = pipe.eval_step(x, x)[0]
        assert evaluated is not None
        return str(caught.value), evaluated.item(), pipe.step(x, x).item()


def test_another_number_of_microbatches_trains_without_offload_alone(world: Ranks) -> None:
    for result, evaluated, trained in world.run(other_numbers, ranks=2):
        states(result, 4, 2, "microbatches")
        assert evaluated == pytest.approx(trained, rel=1e-6)


def play_plan(group: Any, found: zb.planning.Plan) -> tuple[bool, list[int]]:
    """Whether a plan with offload leaves what its schedule does without, from its file, too, and the peaks that are metered."""
    plain, _ = leave(group, found.schedule, 8)
    moved, timeline = leave(group, found, 8)
    saved, _ = leave(group, zb.io.loads(zb.io.dumps(found)), 8)
    return equal(plain, moved) and equal(plain, saved), [rank.peak_bytes or 0 for rank in timeline.ranks]


@pytest.mark.long
def test_a_plan_with_offload_is_given_as_the_schedule(world: Ranks) -> None:
    costs = world.run(measured, zb.make("zb-v", 2, 8), ranks=2)[0]
    room = zb.Limits(tuple(round(1.9 * sum(costs.held_after_f[s] for s in (rank, 3 - rank))) for rank in range(2)))
    found = zb.plan(costs, 8, room, host=HostLink(to_host=1e9, from_host=1e9), placements=zb.Placement.vee(2), seconds=0)
    assert any(rank.offloads for rank in found.offloads)
    for same, metered in world.run(play_plan, found, ranks=2):
        assert same
        for rank, held in zip(found.timeline.ranks, metered, strict=True):
            assert abs((rank.peak_bytes or 0) / held - 1) <= 0.05
            assert held <= room.memory[rank.rank]


def on_a_mesh(group: Any, dimension: str, name: str) -> bool:
    """Whether replicas, or stages that FSDP2 divides, leave what they leave without offload, though something was moved."""
    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("pp", dimension))
    schedule = zb.make(name, 2, 4)
    x = torch.randn(8, 8, WIDTH, generator=torch.Generator().manual_seed(mesh.get_local_rank(dimension)))
    left = []

    def make(stage: int, num_stages: int) -> nn.Module:
        module = blocks(stage, num_stages)
        return fully_shard(module, mesh=mesh[dimension]) if dimension == "dp_shard" else module

    for plans in (None, everything(schedule)):
        with (
            moving_small_ones() as sizes,
            zb.Pipeline(make, schedule, 4, nn.functional.mse_loss, mesh=mesh, offload=plans) as pipe,
        ):
            losses = [pipe.step(x, x).detach() for _ in range(2)]
            gradients = [parameter.grad for parameter in pipe.parameters()]
            left.append([*losses, *(g.to_local() if isinstance(g, DTensor) else g for g in gradients)])
            assert bool(sizes) is (plans is not None and bool(plans[pipe.rank].offloads))
    return equal(*left)


@pytest.mark.long
@needs_fsdp2_on_cpu
@pytest.mark.parametrize("name", ["zb-h1", "zb-v"])
@pytest.mark.parametrize("dimension", ["dp", "dp_shard"])
def test_offload_changes_no_result_with_replicas_or_shards(world: Ranks, dimension: str, name: str) -> None:
    assert all(world.run(on_a_mesh, dimension, name, ranks=4))


def any_order(group: Any, schedule: zb.Schedule, seed: int) -> float:
    """The largest relative error of gradients against one device in an order that is legal, with offloads that are."""
    plans = everything(schedule, seed)
    with moving_small_ones() as sizes:
        worst = max(worst_errors(group, schedule, steps=1, offload=plans).values())
    assert all(sizes)
    return worst


@pytest.mark.long
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(schedules(), st.integers(0, 1 << 16))
def test_any_legal_order_trains_with_any_legal_offloads(world: Ranks, schedule: zb.Schedule, seed: int) -> None:
    for worst in world.run(any_order, schedule, seed, ranks=schedule.num_ranks):
        assert worst <= 1e-12


def order(group: Any) -> bool:
    """Whether microbatches of unequal size, put in order, have the losses and gradients that they have without offload."""
    schedule = zb.make("1f1b", 2, 4)
    inputs = [torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(length)) for length in (3, 9, 4, 8)]
    left = []
    for options in ({}, {"offload": everything(schedule)}):
        with zb.Pipeline(blocks, schedule, 4, nn.functional.mse_loss, group=group, order_by=lambda x: x.shape[1], **options) as pipe:
            loss = pipe.step(inputs, inputs)
            left.append([loss.detach(), *(parameter.grad for parameter in pipe.parameters())])
    return equal(*left)


@pytest.mark.long
def test_microbatches_in_another_order_change_nothing(world: Ranks) -> None:
    assert all(world.run(order, ranks=2))


@pytest.mark.long
def test_the_program_of_the_page_holds_what_it_predicts(tmp_path: Path) -> None:
    (program,) = [program for program in programs_of("docs/offload.md") if "torchrun" in program]
    printed = run_forked(program, tmp_path, 2)
    ranks = [tuple(map(int, found)) for found in re.findall(r"(\d+) bytes, with offload (\d+) predicted and (\d+) held", printed)]
    assert len(ranks) == 2
    for before, predicted, held in ranks:
        assert abs(predicted / held - 1) <= 0.05
        assert held <= before
    assert ranks[0][2] < 0.8 * ranks[0][0]
    assert int(re.findall(r"(\d+) copies", printed)[0]) > 0
