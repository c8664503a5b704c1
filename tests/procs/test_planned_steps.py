"""Steps planned for their microbatches match one device, and are never slower than ordering the microbatches only."""

from __future__ import annotations

import threading
from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from tests.device import DEVICE
from tests.procs.meshes import init_device_mesh
from tests.procs.models import build, loss_fn
from tests.procs.ranks import Ranks
from tests.procs.test_mesh import divided, undivided, whole
from tests.procs.test_order_by import oracle, order_of, packed, tokens_in, worst_gradient
from tests.refusals import states
from zerobubble.runtime.executor.program_cache import MOST_PLANNED
from zerobubble.runtime.step.ordering import THREAD, MicrobatchOrdering
from zerobubble.schedules import with_recompute
from zerobubble.simulation import peak_memory

LENGTHS = [3, 12, 2, 9, 5, 12, 1, 7]
BATCHES = [LENGTHS, LENGTHS[::-1], [1, 20, 3, 16, 2, 18, 4, 9]]


@pytest.fixture(scope="module", autouse=True)
def _compiled_search() -> None:
    """Compiles the search once, here, rather than on a rank for which others wait."""
    MicrobatchOrdering("tokens", zb.make("1f1b", 2, 4), None, None)


def plan_ahead(pipe: zb.Pipeline, inputs: list[Tensor]) -> None:
    """`order_ahead`, until the search on its thread has ended by itself."""
    pipe.order_ahead(inputs)
    for thread in threading.enumerate():
        if thread.name == THREAD:
            thread.join()


def passes_of(schedule: zb.Schedule) -> list[list[tuple[str, int]]]:
    """The rows without the microbatches, which an order alone leaves as they are."""
    return [[(str(op.kind), op.stage) for op in row] for row in schedule.rows]


def steps(group: Any, name: Any, split: str = "deferred") -> list[tuple[str, str]]:
    """Steps that are planned ahead, one that comes back, and one that is not: the texts of what each played, without and with plans."""
    found = []
    batches = [*enumerate(BATCHES), (0, BATCHES[0])]
    options: dict[str, Any] = {"group": group, "loss_weight": tokens_in, "order_by": "tokens", "split": split}
    with zb.Pipeline(build, name, 8, loss_fn, **options) as ordered, zb.Pipeline(build, name, 8, loss_fn, **options) as pipe:
        stages = [build(s, pipe.schedule.num_stages) for s in range(pipe.schedule.num_stages)]
        for seed, lengths in batches:
            inputs, targets = packed(lengths, seed)
            ordered.step(inputs, targets)
            plan_ahead(pipe, inputs)
            loss = pipe.step(inputs, targets)
            expected, each = oracle(stages, inputs, targets)
            assert pipe.losses is not None
            assert abs(loss - expected).item() <= 1e-12
            assert (pipe.losses - each).abs().max().item() <= 1e-12
            assert worst_gradient(pipe, stages) <= 1e-12
            assert ordered.played is not None
            assert pipe.played is not None
            found.append((ordered.played.to_text(), pipe.played.to_text()))
            assert [[span.op for span in row] for row in pipe.timeline().rows] == [list(row) for row in pipe.played.rows]
        never_seen = packed(LENGTHS[1:] + LENGTHS[:1], 7)
        for each_pipe in (ordered, pipe):
            each_pipe.step(*never_seen)
        assert ordered.played == pipe.played
    return found


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("schedule", "split"),
    [
        (zb.make("1f1b", 2, 8), "whole"),
        (zb.make("zb-h1", 4, 8), "deferred"),
        (zb.make("zb-v", 3, 8), "graph"),
        (zb.make("interleaved-1f1b", 2, 8), "deferred"),
        (with_recompute(zb.make("zb-h1", 3, 8)), "deferred"),
        (with_recompute(zb.make("1f1b", 3, 8), stages=[0]), "deferred"),
    ],
    ids=lambda given: given.name if isinstance(given, zb.Schedule) else given,
)
def test_planned_steps_have_the_numbers_of_one_device(world: Ranks, schedule: zb.Schedule, split: str) -> None:
    results = world.run(steps, schedule, split, ranks=schedule.num_ranks)
    assert all(theirs == results[0] for theirs in results)
    costs = zb.Costs.uniform(schedule.num_stages).with_recompute(zb.costs.FULL)
    planned = 0
    for lengths, texts in zip([*BATCHES, BATCHES[0]], results[0], strict=True):
        ordered, played = map(zb.Schedule.from_text, texts)
        priced = replace(costs, shares=tuple(length / fmean(lengths) for length in lengths))
        alone, found = zb.simulate(ordered, priced), zb.simulate(played, priced)
        assert found.span <= alone.span
        assert found.makespan <= alone.makespan
        assert all(held <= most for held, most in zip(peak_memory(played, priced), peak_memory(ordered, priced), strict=True))
        assert {(op.kind, op.stage) for row in played.rows for op in row} == {(op.kind, op.stage) for row in ordered.rows for op in row}
        if passes_of(played) != passes_of(schedule):
            planned += 1
            assert found.span < alone.span
    assert planned > 0
    assert results[0][0] == results[0][-1]


def alongside(group: Any) -> tuple[list[bool], int]:
    """Whether each step was planned where the next batch is planned while a step runs, and how many programs are kept for them."""
    planned = []
    batches = [packed([1 + (7 * j + 5 * k) % 23 for j in range(8)], k) for k in range(20)]
    with zb.Pipeline(build, "zb-h1", 8, loss_fn, group=group, order_by="tokens") as pipe:
        for now, upcoming in zip(batches, [*batches[1:], batches[0]], strict=True):
            before = [thread for thread in threading.enumerate() if thread.name == THREAD]
            pipe.order_ahead(upcoming[0])
            running = [thread for thread in threading.enumerate() if thread.name == THREAD and thread not in before]
            pipe.step(*now)
            for thread in running:
                thread.join()
            assert pipe.played is not None
            planned.append(passes_of(pipe.played) != passes_of(pipe.schedule))
        assert pipe.schedule == zb.make("zb-h1", group.size(), 8)
        kept = len(pipe._steps.programs._planned)
        inputs, targets = batches[0]
        loss, _ = pipe.eval_step(inputs, targets)
        assert loss is not None
    return planned, kept


@pytest.mark.long
def test_a_step_does_not_end_the_search_for_the_next_one(world: Ranks) -> None:
    results = world.run(alongside, ranks=4)
    assert all(theirs == results[0] for theirs in results)
    planned, kept = results[0]
    assert not planned[0]
    assert sum(planned) > MOST_PLANNED
    assert kept == MOST_PLANNED


def without_a_barrier(group: Any) -> tuple[float, int]:
    """The worst parameter after planned steps that are clipped and validated when the next has begun; how many steps were planned."""
    planned = 0
    with zb.Pipeline(build, "zb-h1", 8, loss_fn, group=group, loss_weight=tokens_in, order_by="tokens") as pipe:
        stages = [build(s, pipe.schedule.num_stages) for s in range(pipe.schedule.num_stages)]
        one_device = torch.optim.SGD(nn.ModuleList(stages).parameters(), lr=0.1)
        optimizer = zb.PostValidation(torch.optim.SGD(pipe.parameters(), lr=0.1), pipe, max_norm=0.1)
        for seed, lengths in enumerate([*BATCHES, BATCHES[0]]):
            inputs, targets = packed(lengths, seed % 3)
            oracle(stages, inputs, targets)
            nn.utils.clip_grad_norm_(nn.ModuleList(stages).parameters(), 0.1)
            one_device.step()
            one_device.zero_grad()
            plan_ahead(pipe, inputs)
            pipe.step(inputs, targets)
            optimizer.step()
            optimizer.zero_grad()
            assert pipe.played is not None
            planned += passes_of(pipe.played) != passes_of(pipe.schedule)
        optimizer.settle()
        pairs = [pair for s, module in pipe.modules.items() for pair in zip(module.parameters(), stages[s].parameters(), strict=True)]
        return max((mine - theirs).abs().max().item() for mine, theirs in pairs), planned


def test_planned_steps_can_start_over(world: Ranks) -> None:
    for worst, planned in world.run(without_a_barrier, ranks=3):
        assert worst <= 1e-12
        assert planned > 0


def in_replicas(group: Any) -> tuple[int, float, list[list[tuple[str, int]]]]:
    """A step of two replicas that plan for other microbatches: the replica, its worst gradient, its passes."""
    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("dp", "pp"))
    replica = mesh.get_local_rank("dp")
    with zb.Pipeline(build, "zb-h1", 8, loss_fn, mesh=mesh, loss_weight=tokens_in, order_by="tokens") as pipe:
        batches = [packed(lengths, seed) for seed, lengths in enumerate(BATCHES[::2])]
        plan_ahead(pipe, batches[replica][0])
        pipe.step(*batches[replica])
        stages = [build(s, 2) for s in range(2)]
        oracle(stages, *[[*one, *other] for one, other in zip(*batches, strict=True)])
        assert pipe.played is not None
        return replica, worst_gradient(pipe, stages), passes_of(pipe.played)


def test_replicas_plan_for_themselves(world: Ranks) -> None:
    rows: dict[int, Any] = {}
    for replica, worst, passes in world.run(in_replicas, ranks=4):
        assert worst <= 1e-12
        assert rows.setdefault(replica, passes) == passes


def in_lockstep(group: Any) -> list[tuple[float, bool, str]]:
    """Steps of stages divided by tensor parallelism, whose ranks first report the same costs, then different ones.

    Of each step the worst gradient, whether it was planned, and what it played.
    """
    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("pp", "tp"))
    power, found = [1], []

    def cost(tokens: Tensor) -> int:
        return tokens.shape[1] ** power[0]

    with zb.Pipeline(divided(mesh), "zb-h1", 8, loss_fn, mesh=mesh, loss_weight=tokens_in, order_by=cost) as pipe:
        stages = [undivided(s, 2) for s in range(2)]
        for batch, power[0] in enumerate((1, 1 + mesh.get_local_rank("tp"))):
            inputs, targets = packed([*BATCHES[2][:-1], 10 + batch])
            plan_ahead(pipe, inputs)
            pipe.step(inputs, targets)
            oracle(stages, inputs, targets)
            pairs = [pair for s, module in pipe.modules.items() for pair in zip(module.parameters(), stages[s].parameters(), strict=True)]
            worst = max((whole(mine.grad) - theirs.grad).abs().max().item() for mine, theirs in pairs)
            assert pipe.played is not None
            found.append((worst, passes_of(pipe.played) != passes_of(pipe.schedule), pipe.played.to_text()))
    return found


@pytest.mark.long
def test_pipelines_whose_stages_talk_to_each_other_play_one_plan_or_none(world: Ranks) -> None:
    results = world.run(in_lockstep, ranks=4)
    assert all(worst <= 1e-12 for theirs in results for worst, _, _ in theirs)
    assert all([each[1:] for each in theirs] == [each[1:] for each in results[0]] for theirs in results)
    assert [planned for _, planned, _ in results[0]] == [True, False]


class Failing(nn.Module):
    """A stage that fails in its sixth forward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        if self.count == 6:
            raise ValueError("out of luck")
        return self.inner(x)


def failing(group: Any) -> tuple[str, str]:
    """The error of a planned step in which a stage fails, and the microbatch that it has in the sixth place."""
    pipe = zb.Pipeline(lambda s, n: Failing(build(s, n)) if s == 1 else build(s, n), "zb-h1", 8, loss_fn, group=group, order_by="tokens")
    inputs, targets = packed(BATCHES[2])
    plan_ahead(pipe, inputs)
    with pytest.raises(zb.PipelineError) as caught:
        pipe.step(inputs, targets)
    assert pipe.played is not None
    assert passes_of(pipe.played) != passes_of(pipe.schedule)
    return str(caught.value), f"1F{order_of(pipe.played)[5]}"


def test_errors_name_the_pass_of_the_plan(world: Ranks) -> None:
    for text, failed in world.run(failing, ranks=2):
        assert f"'run {failed}'" in text
        states(text, foreign="out of luck")
