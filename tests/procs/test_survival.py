"""Training continues without a lost rank: losses and parameters still match one device, and no process restarts.

Covers a kill of any rank at any moment of a step: losses, parameters, gradient sums and checkpoints are those of one device.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter

import zerobubble as zb
from tests.device import DEVICE, cpu_only
from tests.procs.meshes import init_device_mesh
from tests.procs.models import Block, batch, build, loss_fn
from tests.procs.ranks import Ranks
from tests.refusals import Stated, states
from zerobubble.runtime.survival.survivors import StepTimes
from zerobubble.testing import checked_device

pytestmark = pytest.mark.ranks_wait

M, STEPS, MAX_NORM = 4, 6, 0.5


class End(NamedTuple):
    """Which rank is killed in which step, at which `moment`; `schedule` is played, and messages go over the `transport`."""

    rank: int
    step: int
    moment: str
    schedule: str = "zb-h1"
    transport: str = "auto"
    ranks: tuple[int, int] = (2, 2)

    def __str__(self) -> str:
        return f"{self.ranks[0]}x{self.ranks[1]}-{self.schedule}-rank {self.rank} in {self.moment} of step {self.step}-{self.transport}"


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Killing:
    """Ends this process at the moment of `end`, when it is rank `end.rank`."""

    def __init__(self, end: End, pipe: zb.Pipeline) -> None:
        self._end = end
        self._step = -1
        self._num_forwards = 0
        for module in pipe.modules.values():
            module.register_forward_hook(self._in_forward)

    def at(self, step: int, moment: str) -> None:
        self._step = step
        if dist.get_rank() == self._end.rank and (step, moment) == (self._end.step, self._end.moment):
            kill()

    def _in_forward(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        if dist.get_rank() == self._end.rank and self._step == self._end.step:
            self._num_forwards += 1
            if self._end.moment == "forward" and self._num_forwards == 3:
                kill()
            if self._end.moment == "backward" and output.requires_grad:
                output.register_hook(lambda gradient: kill())


def share(replica: int, replicas: int, step: int) -> tuple[Tensor, Tensor]:
    inputs, targets = batch(M * replicas, seed=step)
    return inputs.chunk(replicas)[replica], targets.chunk(replicas)[replica]


def train(group: dist.ProcessGroup, end: End) -> tuple[list[float], float, str]:
    """The losses of all steps, the worst difference of a parameter from one device's, and the name of the last schedule."""
    replicas = end.ranks[0]
    mesh = init_device_mesh(DEVICE.type, end.ranks, mesh_dim_names=("dp", "pp"))
    pipe = zb.Pipeline(build, end.schedule, M, loss_fn, mesh=mesh, transport=end.transport, survive=True, timeout=60.0)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    killing = Killing(end, pipe)
    losses = []
    for step in range(STEPS):
        killing.at(step, "before")
        losses.append(pipe.step(*share(mesh.get_local_rank("dp"), replicas, step)).item())
        killing.at(step, "after")
        pipe.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    evaluated, _ = pipe.eval_step(*share(mesh.get_local_rank("dp"), replicas, 0))
    assert evaluated is not None
    stages, _ = one_device(pipe.schedule.num_stages, replicas)
    differences = [
        (ours - theirs).abs().max().item()
        for stage, module in pipe.modules.items()
        for ours, theirs in zip(module.parameters(), stages[stage].parameters(), strict=True)
    ]
    return [*losses, evaluated.item()], max(differences), pipe.schedule.name


def one_device(num_stages: int, replicas: int) -> tuple[list[nn.Module], list[float]]:
    """The oracle: stages after training, and the losses."""
    stages = [build(stage, num_stages) for stage in range(num_stages)]
    model = nn.Sequential(*stages)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        inputs, targets = batch(M * replicas, seed=step)
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        inputs, targets = batch(M * replicas, seed=0)
        losses.append(loss_fn(model(inputs), targets).item())
    return stages, losses


def judge(end: End, job: Callable[..., Any] = train) -> None:
    size = end.ranks[0] * end.ranks[1]
    world = Ranks(size)
    try:
        outcomes = world.outcomes(job, end, ranks=size)
    finally:
        world.kill()
    assert outcomes.pop(end.rank) == ("gone", "SIGKILL")
    assert all(state == "ok" for state, _ in outcomes), outcomes
    stages_per_rank = 2 if end.schedule == "zb-v" else 1
    _, expected = one_device(stages_per_rank * end.ranks[1], end.ranks[0])
    for losses, difference, schedule in (result for _, result in outcomes):
        assert max(abs(loss / theirs - 1) for loss, theirs in zip(losses, expected, strict=True)) < 1e-11
        assert difference < 1e-10
        assert schedule == "rerouted"


@pytest.mark.long
@pytest.mark.parametrize("end", [pytest.param(End(0, 3, "after"), marks=pytest.mark.long), End(1, 2, "backward", "zb-v", "gloo")], ids=str)
def test_losses_stay_those_of_one_device_when_a_rank_is_killed(end: End) -> None:
    judge(end)


def train_checked(group: dist.ProcessGroup, end: End) -> tuple[list[float], float, str]:
    """As `train`, on a device that checks the order of its streams: also in the step that is lost, and in those of the survivors."""
    with checked_device(continues=True) as device:
        result = train(group, end)
        waits, errors = device.waits.seen, [error.fields for error in device.errors]
    assert waits
    assert errors == []
    return result


@pytest.mark.long
@cpu_only("the CPU takes the part of an accelerator")
@pytest.mark.parametrize(
    "end", [End(1, 2, "backward", "zb-v"), End(3, 2, "forward"), End(0, 2, "before", "1f1b"), End(2, 3, "after", transport="gloo")], ids=str
)
def test_streams_stay_ordered_when_a_rank_is_killed(end: End) -> None:
    judge(end, train_checked)


@pytest.mark.long
@pytest.mark.parametrize(
    "end",
    [
        End(3, 2, "forward"),
        *(End(rank, 2, moment, ranks=(2, 4)) for rank in (1, 7) for moment in ("before", "forward", "backward", "after")),
        *(End(rank, 2, "backward", schedule, ranks=(3, 2)) for rank in (2, 5) for schedule in ("1f1b", "zb-v", "dualpipe")),
    ],
    ids=str,
)
def test_losses_stay_on_larger_meshes(end: End) -> None:
    judge(end)


def test_step_times_are_reported_once_enough_are_known() -> None:
    """The median of those before, and that of those since but for the first, which made its programs."""
    times = StepTimes()
    for seconds in (9.0, 0.02, 0.02, 0.01, 0.02, 0.03):
        times.add(seconds)
    times.rank_lost()
    seen = []
    for seconds in (7.0, 0.03, 0.04, 0.03, 0.03, 0.09, 0.03):
        times.add(seconds)
        seen.append(times.slowdown())
    assert seen == [*[None] * 5, "measured, steps take 1.50 times as long: 30 ms, and 20 ms before", None]


def accumulate(group: dist.ProcessGroup) -> float:
    """A rank is killed in the second of two steps whose gradients are added up; the worst difference from one device."""
    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("dp", "pp"))
    pipe = zb.Pipeline(build, "zb-h1", M, loss_fn, mesh=mesh, survive=True, timeout=60.0)
    killing = Killing(End(2, 1, "backward"), pipe)
    model = nn.Sequential(*(build(stage, 2) for stage in range(2)))
    for step in range(2):
        killing.at(step, "before")
        pipe.step(*share(mesh.get_local_rank("dp"), 2, step))
        inputs, targets = batch(2 * M, seed=step)
        loss_fn(model(inputs), targets).backward()
    return max(
        (ours.grad - theirs.grad).abs().max().item()
        for stage, module in pipe.modules.items()
        for ours, theirs in zip(module.parameters(), model[stage].parameters(), strict=True)
        if ours.grad is not None and theirs.grad is not None
    )


def dropped(group: dist.ProcessGroup, kills: bool) -> list[float]:
    """The losses of steps with dropout, in the second of which a rank is killed."""
    torch.manual_seed(5)
    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("dp", "pp"))
    pipe = zb.Pipeline(
        lambda stage, num_stages: nn.Sequential(build(stage, num_stages), nn.Dropout(0.3)), "zb-h1", M, loss_fn, mesh=mesh, survive=True
    )
    killing = Killing(End(2, 1 if kills else -1, "backward"), pipe)
    losses = []
    for step in range(3):
        killing.at(step, "before")
        losses.append(pipe.step(*share(mesh.get_local_rank("dp"), 2, step)).item())
    return losses


@pytest.mark.long
def test_surviving_ranks_draw_the_same_random_numbers(world: Ranks) -> None:
    expected = world.run(dropped, False, ranks=4)[0]
    others = Ranks(4)
    try:
        outcomes = others.outcomes(dropped, True, ranks=4)
    finally:
        others.kill()
    assert outcomes.pop(2) == ("gone", "SIGKILL")
    for state, losses in outcomes:
        assert state == "ok", losses
        assert losses == pytest.approx(expected, rel=1e-11)


@pytest.mark.long
def test_gradients_of_earlier_steps_stay_and_those_of_the_broken_one_do_not() -> None:
    world = Ranks(4)
    try:
        outcomes = world.outcomes(accumulate, ranks=4)
    finally:
        world.kill()
    assert outcomes.pop(2) == ("gone", "SIGKILL")
    assert all(state == "ok" and difference < 1e-11 for state, difference in outcomes), outcomes


class Scaled(nn.Module):
    """A stage that multiplies what it is given by `factor`, and the first by the `weight` of each sample, too."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: Tensor, factor: float) -> Tensor:
        return factor * self.stage(x)


class Weighted(Scaled):
    """The first stage, which takes a name that the others do not."""

    def forward(self, x: Tensor, factor: float, weight: Tensor | None = None) -> Tensor:
        assert weight is not None
        return factor * weight[:, None, None] * self.stage(x)


def named(group: dist.ProcessGroup) -> tuple[list[float], str]:
    """Losses with named arguments, compared with one device, when a rank is killed in the second step; and the error for a wrong name."""
    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("dp", "pp"))
    stages = [Scaled(build(stage, 2)) if stage else Weighted(build(stage, 2)) for stage in range(2)]
    pipe = zb.Pipeline(lambda stage, num_stages: stages[stage], "zb-h1", M, loss_fn, mesh=mesh, survive=True, timeout=60.0)
    killing, replica, differences = Killing(End(2, 1, "forward"), pipe), mesh.get_local_rank("dp"), []
    for step in range(3):
        killing.at(step, "before")
        weight = 1 + torch.rand(4 * M, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        loss = pipe.step(*share(replica, 2, step), kwargs={"factor": 1.5, "weight": weight.chunk(2)[replica]}).item()
        inputs, targets = batch(2 * M, seed=step)
        with torch.no_grad():
            expected = loss_fn(1.5 * build(1, 2)(1.5 * weight[:, None, None] * build(0, 2)(inputs)), targets).item()
        differences.append(loss - expected)
    with pytest.raises(zb.PipelineError) as caught:
        pipe.step(*share(replica, 2, 0), kwargs={"factor": 1.5, "weigth": 1})
    return differences, str(caught.value)


@pytest.mark.long
def test_named_arguments_are_lent_too() -> None:
    world = Ranks(4)
    try:
        outcomes = world.outcomes(named, ranks=4)
    finally:
        world.kill()
    assert outcomes.pop(2) == ("gone", "SIGKILL")
    assert all(state == "ok" for state, _ in outcomes), outcomes
    for differences, message in (result for _, result in outcomes):
        assert max(map(abs, differences)) < 1e-11, differences
        states(message, "weigth", "weight")


def whole_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Embedding(11, 6), *(Block(6) for _ in range(4)), nn.Linear(6, 11)).double()


def save_on(group: dist.ProcessGroup, path: str) -> tuple[list[float], list[float], str]:
    """A rank is killed while it writes its part of a checkpoint, which those that are left write again; the losses after it, twice."""
    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("dp", "pp"))
    model = zb.split(whole_model(), example=torch.zeros(2, 5, dtype=torch.long))
    pipe = zb.Pipeline(model, "zb-h1", M, loss_fn, mesh=mesh, survive=True, timeout=60.0)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)

    def train_on(steps: range) -> list[float]:
        losses = []
        for step in steps:
            losses.append(pipe.step(*share(mesh.get_local_rank("dp"), 2, step)).item())
            pipe.clip_grad_norm_(MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
        return losses

    train_on(range(2))
    if dist.get_rank() == 3:
        FileSystemWriter.write_data = lambda *given: kill()
    zb.save(path, pipe, optimizer)
    train_on(range(2, 4))
    zb.save(path, pipe, optimizer, wait=False).wait()
    first = train_on(range(4, STEPS))
    zb.load(path, pipe, optimizer)
    return first, train_on(range(4, STEPS)), pipe.schedule.name


@pytest.mark.long
def test_checkpoints_of_those_that_are_left_go_on_to_the_bit_and_on_one_device(tmp_path: Path) -> None:
    world, path = Ranks(4), str(tmp_path / "saved")
    try:
        outcomes = world.outcomes(save_on, path, ranks=4)
    finally:
        world.kill()
    assert outcomes.pop(3) == ("gone", "SIGKILL")
    assert all(state == "ok" for state, _ in outcomes), outcomes
    alone = whole_model()
    optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    zb.load(path, alone, optimizer)
    expected = []
    for step in range(4, STEPS):
        inputs, targets = batch(2 * M, seed=step)
        loss = loss_fn(alone(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(alone.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    for first, again, schedule in (result for _, result in outcomes):
        assert schedule == "rerouted"
        assert first == again
        assert max(abs(loss / theirs - 1) for loss, theirs in zip(first, expected, strict=True)) < 1e-11
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def close_after(group: dist.ProcessGroup) -> str:
    """A rank is killed after the last step, when others have gone on to close the pipeline."""
    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("dp", "pp"))
    with zb.Pipeline(build, "zb-h1", M, loss_fn, mesh=mesh, survive=True, timeout=60.0) as pipe:
        pipe.step(*share(mesh.get_local_rank("dp"), 2, 0))
        if dist.get_rank() == 3:
            kill()
    return pipe.schedule.name


@pytest.mark.long
def test_those_that_are_left_close_together() -> None:
    world = Ranks(4)
    try:
        outcomes = world.outcomes(close_after, ranks=4)
    finally:
        world.kill()
    assert outcomes == [("ok", "rerouted")] * 3 + [("gone", "SIGKILL")], outcomes


def lose_two(group: dist.ProcessGroup, second: int) -> tuple[int | None, str]:
    """Ranks 1 and `second` are killed, one after another: what the others hear."""
    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("dp", "pp"))
    pipe = zb.Pipeline(build, "zb-h1", M, loss_fn, mesh=mesh, survive=True, timeout=60.0)

    def train_on() -> None:
        for step in range(4):
            if dist.get_rank() == {1: 1, 2: second}.get(step):
                kill()
            pipe.step(*share(mesh.get_local_rank("dp"), 2, step))

    with pytest.raises(zb.PipelineError) as caught:
        train_on()
    return caught.value.rank, str(caught.value)


def lose_two_at_once(group: dist.ProcessGroup) -> int:
    """Ranks 1 and 2 get SIGTERM in the same step, as when a scheduler reclaims two machines."""
    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("dp", "pp"))
    pipe = zb.Pipeline(build, "zb-h1", M, loss_fn, mesh=mesh, survive=True, timeout=600.0)
    for step in range(3):
        if step == 1 and dist.get_rank() in (1, 2):
            os.kill(os.getpid(), signal.SIGTERM)
        pipe.step(*share(mesh.get_local_rank("dp"), 2, step))
    return pipe.schedule.num_ranks


@pytest.mark.long
def test_two_that_go_at_once_are_not_waited_for() -> None:
    world = Ranks(4)
    try:
        outcomes = world.outcomes(lose_two_at_once, ranks=4)
    finally:
        world.kill()
    assert outcomes == [("ok", 2), ("gone", "SIGTERM"), ("gone", "SIGTERM"), ("ok", 2)], outcomes


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("second", "lost"),
    [(3, ("ranks 1 and 3", "stage 1")), (0, ("ranks 0 and 1", "replica"))],
    ids=["both holders of a stage", "a whole replica"],
)
def test_where_too_many_are_gone_the_error_names_what_is_lost(second: int, lost: Stated) -> None:
    world = Ranks(4)
    try:
        outcomes = world.outcomes(lose_two, second, ranks=4)
    finally:
        world.kill()
    assert {rank for rank, (state, _) in enumerate(outcomes) if state == "gone"} == {1, second}
    for rank, message in (outcome for state, outcome in outcomes if state == "ok"):
        assert rank is not None
        states(message, "process", "ended", *lost)


def refused(group: dist.ProcessGroup) -> list[str]:
    """The errors for pipelines that cannot survive, and for calls that could not be repeated."""
    seen = []
    alone = init_device_mesh(DEVICE.type, (1, 2), mesh_dim_names=("dp", "pp"))
    both = init_device_mesh(DEVICE.type, (2, 1), mesh_dim_names=("dp", "pp"))
    sharded = init_device_mesh(DEVICE.type, (1, 2, 1), mesh_dim_names=("dp_shard", "dp", "pp"))
    hooked = {"mesh": both, "hooks": [zb.hooks.Telemetry(print)]}
    planning = {"mesh": both, "schedule": "auto"}
    for arguments in ({"group": group}, {"mesh": alone}, {"mesh": sharded}, hooked, planning, {**planning, "schedule": zb.Auto()}):
        given: dict[str, Any] = {"schedule": "1f1b", **arguments}
        with pytest.raises(zb.InputError) as caught:
            zb.Pipeline(build, num_microbatches=M, loss_fn=loss_fn, survive=True, **given)
        seen.append(str(caught.value))
    inputs, targets = batch(M)
    pipe = zb.Pipeline(build, "1f1b", M, loss_fn, survive=True, mesh=both)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    for attach in (lambda: pipe.attach(zb.hooks.Telemetry(print)), lambda: zb.PostValidation(optimizer, pipe)):
        with pytest.raises(zb.InputError) as caught:
            attach()
        seen.append(str(caught.value))
    with pytest.raises(zb.PipelineError) as failed:
        pipe.step(inputs if dist.get_rank() else None, targets)
    return [*seen, str(failed.value)]


@pytest.mark.long
def test_what_cannot_survive_is_refused_on_every_rank() -> None:
    world = Ranks(2)  # of its own, for meshes of two ranks put the numbers of later groups out
    try:
        first, second = world.run(refused, ranks=2)
    finally:
        world.kill()
    assert first == second
    needs = "survive needs replicas that hold the same stages: give a mesh with a dimension 'dp' of at least 2 ranks, or leave it out"
    assert needs in first[0]
    assert needs in first[1]
    states(first[2], "dp_shard", "stages", "ranks")
    states(first[3], "hooks", "excludes")
    assert all("survive excludes 'auto'" in message for message in first[4:6])
    for message in first[6:8]:
        states(message, "survive", "hooks")
    states(first[8], "rank", "targets")
