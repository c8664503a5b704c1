"""Pipelines with replicas, made from a mesh: gradients, losses and norms match one device with the whole batch.

Gradients are summed in buckets as parameters complete within W, and recorded. A parameter of two stages of a rank is summed once. Includes
stages divided by FSDP2 and tensor parallelism. If a rank dies, all replicas raise.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zerobubble as zb
from tests.device import DEVICE
from tests.procs.meshes import init_device_mesh
from tests.procs.models import batch, build, loss_fn
from tests.procs.ranks import Ranks
from tests.procs.versions import needs_fsdp2_on_cpu
from tests.refusals import raises, states
from tests.thinned import every
from zerobubble.fit import fit_costs
from zerobubble.runtime.hooks import replicas
from zerobubble.runtime.hooks.replicas import Replicas

MICROBATCHES = 4


def ignoring(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over the tokens that count."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def tokens(targets: Tensor) -> Tensor:
    return (targets != -100).sum()


def test_a_bucket_is_filled_to_its_last_byte() -> None:
    parameters = [nn.Parameter(torch.empty(size)) for size in (1, 1, 2, 3, 1)]
    assert [len(bucket) for bucket in replicas._buckets(parameters, None, most=8)] == [2, 1, 1, 1]


def share(replica: int, seed: int, *, uneven: bool) -> tuple[Tensor, Tensor]:
    """A replica's share of the batch; where uneven, replicas have other numbers of tokens that count, some microbatches few or none."""
    inputs, targets = batch(MICROBATCHES, seed=10 * seed + replica)
    if uneven:
        targets = targets.clone()
        targets[: 2 + 3 * replica, replica:] = -100
    return inputs, targets


def whole_batch(seed: int, *, uneven: bool) -> tuple[Tensor, Tensor]:
    shares = [share(replica, seed, uneven=uneven) for replica in range(2)]
    inputs, targets = (torch.cat(parts) for parts in zip(*shares, strict=True))
    return inputs, targets


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm().clamp(min=1e-300)).item()


def paired(pipe: zb.Pipeline, modules: Sequence[nn.Module]) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """The parameters of this rank's stages, each with that of `modules`, the stages of one device."""
    pairs = (zip(module.parameters(), modules[stage].parameters(), strict=True) for stage, module in pipe.modules.items())
    return [pair for pairs_of_stage in pairs for pair in pairs_of_stage]


def worst_gradient(pipe: zb.Pipeline, modules: Sequence[nn.Module]) -> float:
    """The worst relative difference between the gradients of this rank's stages and those of one device."""
    return max(relative(whole(ours.grad), whole(theirs.grad)) for ours, theirs in paired(pipe, modules))


def oracle(num_stages: int, steps: int, max_norm: float, *, uneven: bool) -> tuple[list[nn.Module], list[float], float]:
    """One device: two steps into one sum of gradients, their losses, and the norm of the sum."""
    modules = [build(stage, num_stages) for stage in range(num_stages)]
    losses = []
    for seed in range(steps):
        inputs, targets = whole_batch(seed, uneven=uneven)
        loss = ignoring(nn.Sequential(*modules)(inputs), targets)
        loss.backward()
        losses.append(loss.item())
    norm = nn.utils.clip_grad_norm_(nn.ModuleList(modules).parameters(), max_norm)
    return modules, losses, norm.item()


def two_replicas(group: dist.ProcessGroup, schedule: str, names: tuple[str, str], transport: str, uneven: bool) -> float:
    """Two steps whose gradients are summed, then clipping; the worst relative difference from one device.

    In zb-v the replicas cut their shares into other numbers of microbatches.
    """
    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=names)
    replica = mesh.get_local_rank("dp")

    def other_values(stage: int, num_stages: int) -> nn.Module:
        module = build(stage, num_stages)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter += replica  # the first replica's count
        return module

    count = MICROBATCHES // 2 if schedule == "zb-v" and replica else MICROBATCHES
    with zb.Pipeline(
        other_values, schedule, MICROBATCHES, ignoring, loss_weight=tokens if uneven else None, mesh=mesh, transport=transport
    ) as pipe:
        losses = [pipe.step(*share(replica, seed, uneven=uneven), num_microbatches=count).item() for seed in range(2)]
        norm = pipe.clip_grad_norm_(0.1).item()
        modules, expected, expected_norm = oracle(pipe.schedule.num_stages, 2, 0.1, uneven=uneven)
        evaluated, _ = pipe.eval_step(*share(replica, 1, uneven=uneven))
        assert evaluated is not None
        found = [abs(loss / theirs - 1) for loss, theirs in zip([*losses, evaluated.item()], [*expected, expected[1]], strict=True)]
        return max(*found, abs(norm / expected_norm - 1), worst_gradient(pipe, modules))


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("schedule", "names", "transport", "uneven"),
    [
        ("1f1b", ("dp", "pp"), "auto", False),
        ("zb-h1", ("pp", "dp"), "gloo", True),
        ("zb-v", ("dp", "pp"), "auto", True),
        ("dualpipe", ("pp", "dp"), "auto", True),
    ],
)
def test_replicas_train_as_one_device(world: Ranks, schedule: str, names: tuple[str, str], transport: str, uneven: bool) -> None:
    assert max(world.run(two_replicas, schedule, names, transport, uneven, ranks=4)) < 1e-12


def with_a_masked_replica(group: dist.ProcessGroup, dimension: str, schedule: str, transport: str) -> float:
    """A step and an evaluation in which no token of the first replica counts; the worst relative difference from one device."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=(dimension, "pp"))
    inputs, targets = whole_batch(0, uneven=False)
    targets[: len(targets) // 2] = -100
    replica = mesh.get_local_rank(dimension)
    mine = [part.chunk(2)[replica] for part in (inputs, targets)]

    def sharded(stage: int, num_stages: int) -> nn.Module:
        module = build(stage, num_stages)
        return fully_shard(module, mesh=mesh[dimension]) if dimension == "dp_shard" else module

    with zb.Pipeline(sharded, schedule, MICROBATCHES, ignoring, loss_weight=tokens, mesh=mesh, transport=transport) as pipe:
        modules = [build(stage, pipe.schedule.num_stages) for stage in range(pipe.schedule.num_stages)]
        expected = ignoring(nn.Sequential(*modules)(inputs), targets)
        expected.backward()
        evaluated, _ = pipe.eval_step(*mine)
        assert evaluated is not None
        found = [relative(loss, expected.detach()) for loss in (pipe.step(*mine), evaluated)]
        found.append(worst_gradient(pipe, modules))
        targets[:] = -100
        with raises(zb.PipelineError, "all 0"):
            pipe.eval_step(*mine)
    return max(found)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("dimension", "schedule", "transport"),
    [
        ("dp", "zb-v", "auto"),
        ("cp", "1f1b", "gloo"),
        ("dp_replicate", "chimera", "auto"),
        pytest.param("dp_shard", "zb-h1", "auto", marks=needs_fsdp2_on_cpu),
    ],
)
def test_a_replica_may_have_no_token_that_counts(world: Ranks, dimension: str, schedule: str, transport: str) -> None:
    assert max(world.run(with_a_masked_replica, dimension, schedule, transport, ranks=4)) < 1e-12


def with_short_shares(group: dist.ProcessGroup, short: tuple[int, ...], scale: str) -> tuple[str, str, bool]:
    """What a step raises for which these replicas are given too few samples, its type, and whether the pipeline goes on."""
    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("dp", "pp"))
    replica = mesh.get_local_rank("dp")
    inputs, targets = share(replica, 0, uneven=False)
    samples = 3 if replica in short else len(inputs)
    pipe = zb.Pipeline(build, "zb-h1", MICROBATCHES, ignoring, mesh=mesh, scale=scale)
    with pytest.raises(zb.ZeroBubbleError) as caught:
        pipe.step(inputs[:samples], targets[:samples])
    goes_on = isinstance(caught.value, zb.InputError) and pipe.step(inputs, targets).item() > 0
    if goes_on:
        pipe.close()
    return str(caught.value), type(caught.value).__name__, goes_on


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("short", "scale", "kind"), [((0, 1), "loss", "InputError"), ((0,), "loss", "PipelineError"), ((1,), "gradients", "PipelineError")]
)
def test_replicas_refuse_short_shares_together(world: Ranks, short: tuple[int, ...], scale: str, kind: str) -> None:
    for text, found, goes_on in world.run(with_short_shares, short, scale, ranks=4):
        states(text, 3, 4, "microbatches")
        assert found == kind
        assert goes_on == (kind == "InputError")


def in_small_buckets(group: dist.ProcessGroup, schedule: str) -> tuple[float, zb.Timeline, list[list[int]]]:
    """Gradients summed a few numbers at a time: the worst relative difference, the timeline, and the stages of each rank by last W."""
    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("dp", "pp"))
    replica = mesh.get_local_rank("dp")
    with zb.Pipeline(build, schedule, MICROBATCHES, ignoring, mesh=mesh, bucket_bytes=256) as pipe:
        pipe.step(*share(replica, 0, uneven=False))
        timeline = pipe.timeline()
        modules, _, _ = oracle(pipe.schedule.num_stages, 1, 1e9, uneven=False)
        worst = worst_gradient(pipe, modules)
        ends = [list(dict.fromkeys(op.stage for op in reversed(row) if op.kind is not zb.Kind.F))[::-1] for row in pipe.schedule.rows]
    return worst, timeline, ends


@pytest.mark.parametrize("schedule", every(2, ["zb-v", "zb-h1"]))
def test_sums_are_made_in_buckets_as_stages_end_and_recorded(world: Ranks, schedule: str) -> None:
    for worst, timeline, ends in world.run(in_small_buckets, schedule, ranks=4):
        assert worst < 1e-12
        for rank, row in enumerate(timeline.reductions):
            assert list(dict.fromkeys(one.stage for one in row)) == ends[rank]
            assert len(row) > 2 * len(ends[rank])
            assert all(before.end <= after.start for before, after in pairwise(row))
            for one in row:  # not before the first of the last W's, within which the first parameters of the stage are complete
                stage = [span for span in timeline.rows[rank] if span.op.stage == one.stage]
                assert one.start > max(span.end for span in stage if span.op.kind is not zb.Kind.W)
        costs = fit_costs(timeline)
        assert min(costs.reduce) > 0
        found = zb.diff(zb.make(schedule, 2, MICROBATCHES), costs, timeline)
        assert all(account.total == timeline.makespan for account in found.accounts)


class _Scaled(torch.autograd.Function):
    """`x * weight`, whose weight gradient waits for W and then goes through `note`."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor, note: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(weight, x)
        ctx.deferral = zb.nn.deferral(weight)
        ctx.note = note
        return x * weight

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor, None]:
        weight, x = ctx.saved_tensors
        return ctx.deferral(ctx, lambda x, dy: ctx.note((x * dy).sum(0)), x, dy), dy * weight, None


class Patient(nn.Module):
    """Goes on with the gradient of its last weight only when that of the first has become a sum over replicas."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (nn.Parameter(torch.ones(4, dtype=torch.float64)) for _ in range(2))
        self.local: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Scaled.apply(self.last, _Scaled.apply(self.first, x, self.note), self.wait)  # type: ignore[no-untyped-call]
        return y

    def note(self, gradient: Tensor) -> Tensor:
        self.local.append(gradient.clone())
        return gradient

    def wait(self, gradient: Tensor) -> Tensor:
        until = time.monotonic() + 60
        while len(self.local) == MICROBATCHES and torch.equal(whole(self.first.grad), sum(self.local[1:], self.local[0])):
            if time.monotonic() > until:
                raise TimeoutError(f"the first gradient is still this rank's own, {self.first.grad}")
            time.sleep(0.001)
        return gradient


def summed_within_w(group: dist.ProcessGroup) -> int:
    """How many gradients of its first weight a rank has computed in a step in which it waits for their sum."""
    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("dp", "pp"))
    inputs = torch.rand(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(mesh.get_local_rank("dp")))
    with zb.Pipeline(lambda s, n: Patient(), "zb-h2", MICROBATCHES, nn.functional.mse_loss, mesh=mesh, bucket_bytes=32) as pipe:
        pipe.step(inputs, torch.zeros_like(inputs))
        (module,) = pipe.modules.values()
        assert isinstance(module, Patient)
        return len(module.local)


def test_sums_are_made_while_the_last_w_of_their_stage_runs(world: Ranks) -> None:
    assert world.run(summed_within_w, ranks=4) == [MICROBATCHES] * 4


def with_and_without_buckets_in_the_tail(group: dist.ProcessGroup, schedule: str) -> bool:
    """Whether gradients have the same bits."""
    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("dp", "pp"))
    found: list[list[Tensor]] = []
    for early in (True, False):
        with (
            zb.Pipeline(build, schedule, MICROBATCHES, ignoring, mesh=mesh, bucket_bytes=256) as pipe,
            pytest.MonkeyPatch.context() as patch,
        ):
            patch.setattr(Replicas, "takes_gradients_early", early)
            pipe.step(*share(mesh.get_local_rank("dp"), 0, uneven=False))
            found.append([whole(parameter.grad) for parameter in pipe.parameters()])
    return all(map(torch.equal, *found))


@pytest.mark.long
@pytest.mark.parametrize("schedule", every(2, ["zb-v", "zb-h1"]))
def test_gradients_that_leave_within_w_keep_their_bits(world: Ranks, schedule: str) -> None:
    assert all(world.run(with_and_without_buckets_in_the_tail, schedule, ranks=4))


def along_one_rank(group: dist.ProcessGroup, dimension: str) -> tuple[int, float]:
    """How often a sum over replicas was made where a mesh has one replica, and the worst relative difference from one device."""
    mesh = init_device_mesh(DEVICE.type, (4, 1), mesh_dim_names=("pp", dimension))

    def make(stage: int, num_stages: int) -> nn.Module:
        module = build(stage, num_stages)
        if dimension == "dp_shard":
            from torch.distributed.fsdp import fully_shard

            fully_shard(module, mesh=mesh[dimension])
        return module

    sums = []
    with zb.Pipeline(make, "zb-h1", MICROBATCHES, ignoring, mesh=mesh) as pipe, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Replicas, "on_step_begin", lambda *args: sums.append(args))
        inputs, targets = share(0, 0, uneven=False)
        loss = pipe.step(inputs, targets)
        modules = [build(stage, pipe.schedule.num_stages) for stage in range(pipe.schedule.num_stages)]
        expected = ignoring(nn.Sequential(*modules)(inputs), targets)
        expected.backward()
        return len(sums), max(abs(loss.item() / expected.item() - 1), worst_gradient(pipe, modules))


@pytest.mark.parametrize("dimension", ["dp", pytest.param("dp_shard", marks=needs_fsdp2_on_cpu)])
def test_a_dimension_of_one_rank_costs_no_sum(world: Ranks, dimension: str) -> None:
    for sums, worst in world.run(along_one_rank, dimension, ranks=4):
        assert sums == 0
        assert worst < 1e-12


def undivided(stage: int, num_stages: int) -> nn.Module:
    """A stage as one device has it; torch takes no in-place operation behind a divided layer."""
    module = build(stage, num_stages)
    module.get_submodule("1" if stage == 0 else "0").act = nn.ReLU()
    return module


def divided(mesh: DeviceMesh) -> Callable[[int, int], nn.Module]:
    """Makes stages whose feed-forward part the ranks along "tp" share, where there are any."""

    def make(stage: int, num_stages: int) -> nn.Module:
        module = undivided(stage, num_stages)
        if "tp" not in (mesh.mesh_dim_names or ()):
            return module
        block = "1" if stage == 0 else "0"
        return parallelize_module(module, mesh["tp"], {f"{block}.up": ColwiseParallel(), f"{block}.down": RowwiseParallel()})

    return make


def worst_of_a_step(
    pipe: zb.Pipeline, mine: Sequence[Tensor], everything: Sequence[Tensor], loss_fn: Callable[[Tensor, Tensor], Tensor]
) -> float:
    """The worst relative difference of the loss, the norm and the clipped gradients of a step over `mine` from one device's."""
    loss, norm = pipe.step(*mine).item(), pipe.clip_grad_norm_(0.1).item()
    modules = [undivided(stage, pipe.schedule.num_stages) for stage in range(pipe.schedule.num_stages)]
    inputs, targets = everything
    expected = loss_fn(nn.Sequential(*modules)(inputs), targets)
    expected.backward()
    expected_norm = nn.utils.clip_grad_norm_(nn.ModuleList(modules).parameters(), 0.1).item()
    return max(abs(loss / expected.item() - 1), abs(norm / expected_norm - 1), worst_gradient(pipe, modules))


def tensor_parallel(group: dist.ProcessGroup, schedule: str) -> tuple[float, list[float | None]]:
    """The worst relative difference of the loss, the norm and the clipped gradients of one step, and how much W of each stage waits."""
    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("pp", "tp"))
    given = batch(MICROBATCHES)
    with zb.Pipeline(divided(mesh), schedule, MICROBATCHES, loss_fn, mesh=mesh) as pipe:
        waits = [report.share for report in pipe.describe(*given)]
        worst = worst_of_a_step(pipe, given, given, loss_fn)
        for parameter in pipe.parameters():
            assert not isinstance(parameter, DTensor) or parameter.grad.placements == parameter.placements  # type: ignore[union-attr]
    return worst, waits


@pytest.mark.long
@pytest.mark.parametrize("schedule", every(2, ["zb-v", "1f1b"]))
def test_stages_divided_by_tensor_parallelism_train_as_one_device(world: Ranks, schedule: str) -> None:
    for worst, waits in world.run(tensor_parallel, schedule, ranks=4):
        assert worst < 1e-12
        assert schedule == "1f1b" or waits == [1.0] * len(waits)


def post_validated(group: dist.ProcessGroup, names: tuple[str, str]) -> float:
    """The worst relative difference of the parameters after steps without a barrier, some of which are clipped."""
    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=names)
    replica = mesh.get_local_rank("dp") if "dp" in names else None
    with zb.Pipeline(divided(mesh), "zb-h1", MICROBATCHES, loss_fn, mesh=mesh) as pipe:
        modules = [undivided(stage, 2) for stage in range(2)]
        one_device = torch.optim.AdamW(nn.ModuleList(modules).parameters(), lr=1e-2)
        optimizer = zb.PostValidation(torch.optim.AdamW(pipe.parameters(), lr=1e-2), pipe, max_norm=0.8)
        for seed in range(6):
            inputs, targets = whole_batch(seed, uneven=False)
            loss_fn(nn.Sequential(*modules)(inputs), targets).backward()
            nn.utils.clip_grad_norm_(nn.ModuleList(modules).parameters(), 0.8)
            one_device.step()
            one_device.zero_grad()
            pipe.step(*(whole_batch(seed, uneven=False) if replica is None else share(replica, seed, uneven=False)))
            optimizer.step()
            optimizer.zero_grad()
        optimizer.settle()
        return max(relative(whole(ours), theirs) for ours, theirs in paired(pipe, modules))


@pytest.mark.long
@pytest.mark.parametrize("names", [("dp", "pp"), pytest.param(("pp", "tp"), marks=pytest.mark.long)])
def test_an_optimizer_without_a_barrier_steps_as_on_one_device(world: Ranks, names: tuple[str, str]) -> None:
    assert max(world.run(post_validated, names, ranks=4)) < 1e-11


def scaled(group: dist.ProcessGroup, waits: bool) -> tuple[float, float, float]:
    """The worst relative difference of the parameters, after steps with a scaler of which one overflows on one rank, and both scales."""
    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("pp", "tp"))
    scaler, other = (torch.amp.GradScaler(DEVICE.type, init_scale=64.0, growth_interval=2) for _ in range(2))
    with zb.Pipeline(divided(mesh), "zb-h1", MICROBATCHES, loss_fn, mesh=mesh) as pipe:
        modules = [undivided(stage, 2) for stage in range(2)]
        theirs = torch.optim.AdamW(nn.ModuleList(modules).parameters(), lr=1e-2)
        inner = torch.optim.AdamW(pipe.parameters(), lr=1e-2, foreach=False)
        validated = None if waits else zb.PostValidation(inner, pipe, max_norm=0.8, scaler=scaler)
        for seed in range(4):
            inputs, targets = batch(MICROBATCHES, seed=seed)
            other.scale(loss_fn(nn.Sequential(*modules)(inputs), targets)).backward()
            pipe.step(inputs, targets, scaler=scaler)
            if seed == 2:
                next(modules[0].parameters()).grad.fill_(torch.inf)  # type: ignore[union-attr]
                if dist.get_rank() == 1:
                    next(one for one in pipe.parameters() if isinstance(one, DTensor)).grad.to_local().fill_(torch.inf)  # type: ignore[union-attr]
            other.unscale_(theirs)
            nn.utils.clip_grad_norm_(nn.ModuleList(modules).parameters(), 0.8)
            other.step(theirs)
            other.update()
            theirs.zero_grad()
            if validated is None:
                pipe.unscale_(scaler, inner)
                pipe.clip_grad_norm_(0.8)
                scaler.step(inner)
                scaler.update()
            else:
                validated.step()
            inner.zero_grad()
        if validated is not None:
            validated.settle()
        return max(relative(whole(ours), its) for ours, its in paired(pipe, modules)), scaler.get_scale(), other.get_scale()


@pytest.mark.long
@pytest.mark.sweep
@pytest.mark.parametrize("waits", [True, False])
def test_a_scaler_sees_gradients_that_tensor_parallelism_divides(world: Ranks, waits: bool) -> None:
    for error, scale, expected in world.run(scaled, waits, ranks=4):
        assert error < 1e-12
        assert scale == expected


def tied_replicas(group: dist.ProcessGroup, schedule: str) -> float:
    """The embedding is the head, gradients of two steps are summed; the worst relative difference."""

    def tied_build(stage: int, num_stages: int) -> nn.Module:
        torch.manual_seed(stage)
        if stage == 0:
            return nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 6)).double()
        return nn.Linear(6, 11, bias=False).double() if stage == num_stages - 1 else nn.Linear(6, 6).double()

    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("dp", "pp"))
    last = 2 * (schedule == "zb-v") + 1
    groups = [[(0, "0.weight"), (last, "weight")]]
    with zb.Pipeline(tied_build, schedule, MICROBATCHES, loss_fn, mesh=mesh, tied=groups) as pipe:
        for seed in range(2):
            pipe.step(*share(mesh.get_local_rank("dp"), seed, uneven=False))
        modules = [tied_build(stage, last + 1) for stage in range(last + 1)]
        modules[last].weight = modules[0][0].weight  # type: ignore[index, assignment]
        for seed in range(2):
            inputs, targets = whole_batch(seed, uneven=False)
            loss_fn(nn.Sequential(*modules)(inputs), targets).backward()
        return worst_gradient(pipe, modules)


def one_tensor_in_two_stages(group: dist.ProcessGroup) -> float:
    """The embedding is the head, one tensor in both stages of the first rank; the worst relative difference."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(11, 6).double())

    def make(stage: int, num_stages: int) -> nn.Module:
        torch.manual_seed(stage)
        layer = nn.Embedding(11, 6) if stage == 0 else nn.Linear(6, 11, bias=False) if stage == num_stages - 1 else nn.Linear(6, 6)
        if stage in (0, num_stages - 1):
            layer.weight = weight
        return layer.double()

    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("dp", "pp"))
    with zb.Pipeline(make, "zb-v", MICROBATCHES, loss_fn, mesh=mesh) as pipe:
        pipe.step(*share(mesh.get_local_rank("dp"), 0, uneven=False))
        found = [
            parameter.grad.clone() for module in pipe.modules.values() for parameter in module.parameters() if parameter.grad is not None
        ]
        stages = list(pipe.modules)
    weight.grad = None
    modules = [make(stage, 4) for stage in range(4)]
    inputs, targets = whole_batch(0, uneven=False)
    loss_fn(nn.Sequential(*modules)(inputs), targets).backward()
    expected = [parameter.grad for stage in stages for parameter in modules[stage].parameters()]
    return max(relative(ours, theirs) for ours, theirs in zip(found, expected, strict=True) if theirs is not None)


def test_one_tensor_in_two_stages_of_a_rank_is_summed_once(world: Ranks) -> None:
    assert max(world.run(one_tensor_in_two_stages, ranks=4)) < 1e-12


@pytest.mark.long
@pytest.mark.parametrize("schedule", every(2, ["zb-v", "zb-h1"]))
def test_tied_parameters_are_summed_over_stages_and_replicas(world: Ranks, schedule: str) -> None:
    assert max(world.run(tied_replicas, schedule, ranks=4)) < 1e-12


def killed(group: dist.ProcessGroup, victim: int) -> Any:
    """The error that is raised when rank `victim` is killed in the second step, and the seconds until then."""
    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("dp", "pp"))
    pipe = zb.Pipeline(build, "zb-h1", MICROBATCHES, loss_fn, mesh=mesh, timeout=100.0)
    given = share(mesh.get_local_rank("dp"), 0, uneven=False)
    pipe.step(*given)
    if dist.get_rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(zb.PipelineError) as caught:
        pipe.step(*given)
    return str(caught.value), time.monotonic() - began


@pytest.mark.long
@pytest.mark.parametrize("victim", every(2, [3, 0]))
def test_the_death_of_a_rank_is_reported_to_all_replicas(world: Ranks, victim: int) -> None:
    outcomes = world.outcomes(killed, victim, ranks=4)
    assert outcomes.pop(victim) == ("gone", "SIGKILL")
    texts = {text for _, (text, _) in outcomes}
    assert len(texts) == 1, texts
    states(texts.pop(), f"rank {victim}", "process", "ended")
    assert max(seconds for _, (_, seconds) in outcomes) < 50.0


def refused(group: dist.ProcessGroup) -> list[str]:
    """The errors for wrong meshes."""
    seen = []
    for names, arguments in (
        (("replica", "stages"), {}),
        (("pp", "expert"), {}),
        (("dp", "pp"), {"group": group}),
        (("dp", "pp"), {"bucket_bytes": 0}),
        (("dp", "pp"), {"bucket_bytes": 1 << 20 if dist.get_rank() else 1 << 10}),
    ):
        mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=names)
        with pytest.raises(zb.InputError) as caught:
            zb.Pipeline(build, "1f1b", MICROBATCHES, loss_fn, mesh=mesh, **arguments)  # type: ignore[arg-type]
        seen.append(str(caught.value))
    for given in ("dp", init_device_mesh(DEVICE.type, (2, 2))):
        with pytest.raises(zb.InputError) as caught:
            zb.Pipeline(build, "1f1b", MICROBATCHES, loss_fn, mesh=given)  # type: ignore[arg-type]
        seen.append(str(caught.value))
    return seen


@pytest.mark.long
def test_a_wrong_mesh_is_refused_on_every_rank(world: Ranks) -> None:
    first, *others = world.run(refused, ranks=4)
    assert all(message == first for message in others)
    states(first[0], "pp", "stages")
    states(first[1], "expert", "Pipeline", "'dp_shard'", "'ep'")
    states(first[2], "Pipeline", "mesh")
    states(first[3], "bucket_bytes", 0)
    assert "bucket_bytes" in first[4]
    assert "1024" in first[4]
    states(first[5], "Pipeline", "mesh", "dp")
    states(first[6], "names", "dimensions")


def smaller_than_the_world(group: dist.ProcessGroup) -> str:
    """The error on a rank outside a mesh of two of the four ranks, or the loss of the two that train."""
    mesh = DeviceMesh("cpu", [[1], [3]], mesh_dim_names=("pp", "dp"))
    if dist.get_rank() in (1, 3):
        with zb.Pipeline(build, "1f1b", MICROBATCHES, loss_fn, mesh=mesh) as pipe:
            return f"{pipe.step(*share(0, 0, uneven=False)).item():.3f}"
    with pytest.raises(zb.InputError) as caught:
        zb.Pipeline(build, "1f1b", MICROBATCHES, loss_fn, mesh=mesh)
    return str(caught.value)


def test_ranks_outside_of_the_mesh_are_reported(world: Ranks) -> None:
    first, loss, third, same = world.run(smaller_than_the_world, ranks=4)
    states(first, "rank 0", "Pipeline")
    assert third == first.replace("rank 0", "rank 2")
    assert loss == same


def wrapped_in_ddp(group: dist.ProcessGroup) -> str:
    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("dp", "pp"))
    replicas = mesh["dp"].get_group()
    with pytest.raises(zb.InputError) as caught:
        zb.Pipeline(
            lambda s, n: nn.parallel.DistributedDataParallel(build(s, n), process_group=replicas), "1f1b", MICROBATCHES, loss_fn, mesh=mesh
        )
    return str(caught.value)


def test_ddp_around_the_stages_of_replicas_is_refused(world: Ranks) -> None:
    results = set(world.run(wrapped_in_ddp, ranks=4))
    assert len(results) == 1
    assert "stage 0 holds a DistributedDataParallel" in results.pop()


def wrong_on_a_mesh(group: dist.ProcessGroup, folder: str) -> list[str]:
    """The errors on ranks 2 and 3, the second replica, for unsuitable arguments; those of the first replica are right where it matters."""
    seen = []

    def refused(call: Callable[[], object]) -> None:
        with pytest.raises(zb.InputError) as caught:
            call()
        seen.append(str(caught.value))

    with pytest.raises(RuntimeError, match="bigger than default world size 4"):
        init_device_mesh(DEVICE.type, (2, 3), mesh_dim_names=("dp", "pp"))
    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("dp", "pp"))
    replica = mesh.get_local_rank("dp")
    refused(lambda: zb.Pipeline(build, zb.make("1f1b", 4, MICROBATCHES), MICROBATCHES, loss_fn, mesh=mesh))
    with zb.Pipeline(build, "1f1b", MICROBATCHES, loss_fn, mesh=mesh) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters())
        if replica:
            refused(lambda: zb.PostValidation(optimizer, pipe, undo="log"))  # type: ignore[arg-type]
            refused(lambda: zb.PostValidation(optimizer, pipe, max_norm=1.0 + dist.get_rank()))
        zb.save(folder, pipe)
    with zb.Pipeline(lambda s, n: build(s, n, width=8), "1f1b", MICROBATCHES, loss_fn, mesh=mesh) as pipe:
        refused(lambda: zb.load(folder, pipe))
    return seen


@pytest.mark.long
def test_what_does_not_fit_the_mesh_is_reported_by_the_ranks_of_the_mesh(world: Ranks, tmp_path: Path) -> None:
    *first, (plan, undo, norms, model) = world.run(wrong_on_a_mesh, str(tmp_path / "checkpoint"), ranks=4)
    states(plan, "1f1b", 4, 2, "pp")
    states(undo, "undo", "copy", "arithmetic", "log")
    states(norms, "rank 2", 3.0, "rank 3", 4.0)
    states(model, "checkpoint", "model")
    assert [message[-1] for message in first] == [model] * 3


def other_calls(group: dist.ProcessGroup) -> str:
    """The error when the second replica's ranks, 2 and 3, play different numbers of microbatches."""
    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("dp", "pp"))
    pipe = zb.Pipeline(build, "1f1b", MICROBATCHES, loss_fn, mesh=mesh)
    with pytest.raises((zb.InputError, zb.PipelineError)) as caught:
        pipe.step(*share(mesh.get_local_rank("dp"), 0, uneven=False), num_microbatches=2 if dist.get_rank() == 3 else MICROBATCHES)
    return str(caught.value)


def test_errors_of_a_step_name_ranks_of_the_mesh(world: Ranks) -> None:
    for result in world.run(other_calls, ranks=4):
        states(result, "rank 2", 4, "rank 3", 2)


def sparse_gradients(group: dist.ProcessGroup) -> str:
    torch.manual_seed(0)
    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("pp", "dp"))
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 4), nn.Linear(4, 9))
    with zb.Pipeline(zb.split(model, example=torch.zeros(2, dtype=torch.long)), "zb-h1", 2, nn.functional.cross_entropy, mesh=mesh) as pipe:
        with pytest.raises((zb.InputError, zb.PipelineError)) as caught:
            [pipe.step(torch.arange(4), torch.arange(4)) for _ in range(2)]  # ranks without such a gradient may be done with the first
        return str(caught.value)


@pytest.mark.long
def test_a_sparse_gradient_that_replicas_cannot_sum_is_named(world: Ranks) -> None:
    for text in world.run(sparse_gradients, ranks=4):
        states(text, "0.weight", "stage 0", "sparse=False")


def fully_sharded(group: dist.ProcessGroup, schedule: str) -> float:
    """Stages of which FSDP2 divides the block and leaves the rest, with shares of other weight; the worst relative difference."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("pp", "dp_shard"))
    replica = mesh.get_local_rank("dp_shard")

    def make(stage: int, num_stages: int) -> nn.Module:
        module = build(stage, num_stages)
        fully_shard(module.get_submodule("1" if stage == 0 else "0"), mesh=mesh["dp_shard"])
        return module

    with zb.Pipeline(make, schedule, MICROBATCHES, ignoring, loss_weight=tokens, mesh=mesh) as pipe:
        losses = [pipe.step(*share(replica, seed, uneven=True)).item() for seed in range(2)]
        norm = pipe.clip_grad_norm_(0.1).item()
        modules, expected, expected_norm = oracle(pipe.schedule.num_stages, 2, 0.1, uneven=True)
        found = [abs(loss / theirs - 1) for loss, theirs in zip(losses, expected, strict=True)]
        return max(*found, abs(norm / expected_norm - 1), worst_gradient(pipe, modules))


@pytest.mark.sweep
@needs_fsdp2_on_cpu
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_fully_sharded_stages_train_as_one_device(world: Ranks, schedule: str) -> None:
    assert max(world.run(fully_sharded, schedule, ranks=4)) < 1e-12


def in_three_dimensions(group: dist.ProcessGroup, names: tuple[str, ...], schedule: str) -> float:
    """Stages divided by tensor parallelism over two replicas, or shards of FSDP2; the worst relative difference."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(DEVICE.type, (2, 2, 2), mesh_dim_names=names)
    data = next(name for name in names if name.startswith("dp"))
    make = divided(mesh)

    def built(stage: int, num_stages: int) -> nn.Module:
        module = make(stage, num_stages)
        if data == "dp_shard":
            fully_shard(module.get_submodule("1" if stage == 0 else "0"), mesh=mesh[data])
        return module

    with zb.Pipeline(built, schedule, MICROBATCHES, ignoring, loss_weight=tokens, mesh=mesh) as pipe:
        return worst_of_a_step(pipe, share(mesh.get_local_rank(data), 0, uneven=True), whole_batch(0, uneven=True), ignoring)


@needs_fsdp2_on_cpu
@pytest.mark.long
@pytest.mark.parametrize(
    ("names", "schedule"), [(("pp", "dp", "tp"), "zb-v"), (("dp", "pp", "tp"), "1f1b"), (("dp_shard", "pp", "tp"), "zb-h1")]
)
def test_eight_ranks_in_three_dimensions_train_as_one_device(names: tuple[str, ...], schedule: str) -> None:
    eight = Ranks(8)
    try:
        assert max(eight.run(in_three_dimensions, names, schedule, ranks=8)) < 1e-12
    finally:
        eight.kill()


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.tanh(self.up(x)))
        return y


def perceptron(stage: int, mesh: DeviceMesh | None = None) -> nn.Module:
    """A stage, whose matrices ranks share along "tp" of `mesh`."""
    torch.manual_seed(stage)
    made = Perceptron()
    return made if mesh is None else parallelize_module(made, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})


def shared_in_half_precision(group: dist.ProcessGroup) -> tuple[float, float, float]:
    """The gradients' distances under autocast from torch's tensor parallelism and from float64, and those of undivided stages."""
    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("pp", "tp"))
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))

    def gradients(modules: Sequence[nn.Module]) -> list[Tensor]:
        found = [parameter.grad for module in modules for parameter in module.parameters() if parameter.grad is not None]
        return [(one.full_tensor() if isinstance(one, DTensor) else one).double() for one in found]

    def alone(dtype: torch.dtype, mesh: DeviceMesh | None = None) -> list[Tensor]:
        stages = [perceptron(stage, mesh).to(dtype) for stage in range(2)]
        for part in x.to(dtype).chunk(2):
            with torch.autocast(DEVICE.type, torch.bfloat16, enabled=dtype is torch.float32):
                loss = nn.functional.mse_loss(nn.Sequential(*stages)(part), part.tanh()) / 2
            loss.backward()
        return gradients([stages[mine] for mine in pipe.modules])

    with zb.Pipeline(lambda stage, _: perceptron(stage, mesh), "zb-h1", 2, nn.functional.mse_loss, mesh=mesh) as pipe:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            pipe.step(x, x.tanh())
        ours, exact = gradients(list(pipe.modules.values())), alone(torch.float64)
        others = alone(torch.float32, mesh), exact
        off = [max(relative(one, other) for one, other in zip(ours, theirs, strict=True)) for theirs in others]
        whole = max(relative(one, other) for one, other in zip(alone(torch.float32), exact, strict=True))
    return off[0], off[1], whole


@pytest.mark.long
def test_tensor_parallelism_under_autocast_rounds_as_torch_s_own(world: Ranks) -> None:
    for off_torch, off_exact, whole in world.run(shared_in_half_precision, ranks=4):
        assert off_torch == 0
        assert off_exact <= 2 * whole
