"""Expert parallelism and context parallelism on a mesh match one device.

That includes saving and loading. Ranks in lockstep start the same steps, or all of them raise.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import zerobubble as zb
from tests.device import DEVICE
from tests.procs.experts import build_mixture
from tests.procs.meshes import init_device_mesh
from tests.procs.models import batch, loss_fn
from tests.procs.ranks import Ranks
from tests.refusals import states
from tests.thinned import every

MICROBATCHES = 4


def share_of(mesh: DeviceMesh, seed: int) -> tuple[Tensor, Tensor]:
    """This rank's share of a batch: each place along "dp" and "ep" has other data."""
    names = mesh.mesh_dim_names or ()
    places = [mesh.get_local_rank(name) * (2 if name == "dp" and "ep" in names else 1) for name in names if name != "pp"]
    return batch(MICROBATCHES, seed=10 * seed + sum(places))


def whole_batch(mesh: DeviceMesh, seed: int) -> tuple[Tensor, Tensor]:
    count = mesh.size() // mesh["pp"].size()
    inputs, targets = (
        torch.cat(parts) for parts in zip(*(batch(MICROBATCHES, seed=10 * seed + each) for each in range(count)), strict=True)
    )
    return inputs, targets


def mine_of(whole: Tensor, name: str, ours: nn.Parameter, mesh: DeviceMesh) -> Tensor:
    """The part of the one-device tensor that this rank holds."""
    local = ours.to_local() if isinstance(ours, DTensor) else ours
    if whole.shape == local.shape:
        return whole
    return whole.chunk(mesh["ep"].size())[mesh["ep"].get_local_rank()]


def differences(pipe: zb.Pipeline, modules: list[nn.Module], mesh: DeviceMesh, of: Any) -> list[float]:
    """The distance from one device of this rank's parameters, or of `of` applied to them."""
    found = []
    for stage, module in pipe.modules.items():
        whole = dict(modules[stage].named_parameters())
        for name, ours in module.named_parameters():
            theirs = of(whole[name])
            mine = of(ours)
            assert (mine is None) == (theirs is None), name
            if mine is None or theirs is None:
                continue
            mine = mine.to_local() if isinstance(mine, DTensor) else mine
            expected = mine_of(theirs, name, ours, mesh)
            found.append(((mine - expected).norm() / expected.norm().clamp(min=1e-9)).item())
    return found


def trained_with_experts(group: dist.ProcessGroup, sizes: tuple[int, ...], names: tuple[str, ...], schedule: str, form: str) -> float:
    """Two steps whose gradients are summed, and clipping; the worst relative difference from one device."""
    mesh = init_device_mesh(DEVICE.type, sizes, mesh_dim_names=names)
    with zb.Pipeline(lambda s, n: build_mixture(s, n, mesh["ep"], form), schedule, MICROBATCHES, loss_fn, mesh=mesh) as pipe:
        losses = [pipe.step(*share_of(mesh, seed)).item() for seed in range(2)]
        norm = pipe.clip_grad_norm_(0.1).item()
        modules = [build_mixture(stage, pipe.schedule.num_stages, None, form) for stage in range(pipe.schedule.num_stages)]
        expected = []
        for seed in range(2):
            inputs, targets = whole_batch(mesh, seed)
            loss = loss_fn(nn.Sequential(*modules)(inputs), targets)
            loss.backward()
            expected.append(loss.item())
        expected_norm = nn.utils.clip_grad_norm_(nn.ModuleList(modules).parameters(), 0.1).item()
        found = [abs(loss / theirs - 1) for loss, theirs in zip(losses, expected, strict=True)]
        found += [abs(norm / expected_norm - 1), *differences(pipe, modules, mesh, lambda parameter: parameter.grad)]
    return max(found)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("names", "schedule", "form"),
    [
        (("pp", "ep"), "zb-h1", "modules"),
        (("ep", "pp"), "zb-v", "stacked"),
        (("pp", "ep"), "1f1b", "divided"),
        (("dp", "ep", "pp"), "zb-h1", "divided"),
        (("ep", "dp", "pp"), "zb-h1", "modules"),
    ],
)
def test_experts_spread_over_ranks_train_as_one_device(world: Ranks, names: tuple[str, ...], schedule: str, form: str) -> None:
    sizes = (2, 2, 1)[: len(names)]
    assert max(world.run(trained_with_experts, sizes, names, schedule, form, ranks=4)) < 1e-12


@pytest.mark.long
@pytest.mark.parametrize(("schedule", "form"), [("zb-v", "modules"), ("zb-h1", "divided")])
def test_eight_ranks_with_replicas_and_experts_train_as_one_device(schedule: str, form: str) -> None:
    eight = Ranks(8)
    try:
        assert max(eight.run(trained_with_experts, (2, 2, 2), ("dp", "pp", "ep"), schedule, form, ranks=8)) < 1e-12
    finally:
        eight.kill()


class Gathered(torch.autograd.Function):
    """The parts of a sequence that all ranks hold, joined along dimension 1."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        parts = [torch.empty_like(part) for _ in range(mesh.size())]
        dist.all_gather(parts, part.contiguous(), group=mesh.get_group())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        total = gradient.contiguous()
        dist.all_reduce(total, group=ctx.mesh.get_group())
        return total.chunk(ctx.mesh.size(), 1)[ctx.mesh.get_local_rank()], None


class Attention(nn.Module):
    """Causal attention of one head, to the keys and values of the whole sequence."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        self.mesh = mesh
        self.qkv = nn.Linear(6, 18)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        first = 0
        if self.mesh is not None:
            first = self.mesh.get_local_rank() * x.shape[1]
            k, v = Gathered.apply(k, self.mesh), Gathered.apply(v, self.mesh)
        mask = torch.arange(k.shape[1]) <= torch.arange(first, first + x.shape[1])[:, None]
        return x + nn.functional.scaled_dot_product_attention(q, k, v, mask)


def build_attention(stage: int, num_stages: int, mesh: DeviceMesh | None) -> nn.Module:
    torch.manual_seed(stage)
    first = [nn.Embedding(11, 6)] if stage == 0 else []
    last = [nn.Linear(6, 11)] if stage == num_stages - 1 else []
    return nn.Sequential(*first, Attention(mesh), *last).double()


def sequences_in_parts(group: dist.ProcessGroup, schedule: str) -> float:
    """Each rank along "cp" has half of every sequence; the worst relative difference from one device."""
    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("pp", "cp"))
    inputs, targets = batch(MICROBATCHES, length=6)
    part = mesh.get_local_rank("cp")
    with zb.Pipeline(lambda s, n: build_attention(s, n, mesh["cp"]), schedule, MICROBATCHES, loss_fn, mesh=mesh) as pipe:
        loss = pipe.step(inputs.chunk(2, 1)[part], targets.chunk(2, 1)[part].contiguous()).item()
        norm = pipe.clip_grad_norm_(0.1).item()
        modules = [build_attention(stage, pipe.schedule.num_stages, None) for stage in range(pipe.schedule.num_stages)]
        expected = loss_fn(nn.Sequential(*modules)(inputs), targets.contiguous())
        expected.backward()
        expected_norm = nn.utils.clip_grad_norm_(nn.ModuleList(modules).parameters(), 0.1).item()
        found = [abs(loss / expected.item() - 1), abs(norm / expected_norm - 1)]
        found += differences(pipe, modules, mesh, lambda parameter: parameter.grad)
    return max(found)


def test_sequences_in_parts_train_as_whole_ones(world: Ranks) -> None:
    assert max(world.run(sequences_in_parts, "zb-h1", ranks=4)) < 1e-12


def refused(group: dist.ProcessGroup) -> list[str]:
    """The errors for stages that do not fit their mesh."""
    seen = []
    for form, schedule in (("unmarked", "1f1b"), ("modules", "auto"), ("other ranks", "1f1b"), ("along dp", "1f1b")):
        names = ("pp", "dp" if form == "along dp" else "ep")
        mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=names)

        def build(stage: int, num_stages: int, form: str = form, mesh: DeviceMesh = mesh, names: tuple[str, str] = names) -> nn.Module:
            if form == "unmarked":
                return nn.Linear(6, 6)
            module = build_mixture(stage, num_stages, mesh[names[1]], "modules")
            return zb.nn.mark_experts(module, mesh["pp"], dim=None) if form == "other ranks" else module

        with pytest.raises(zb.InputError) as caught:
            zb.Pipeline(build, schedule, MICROBATCHES, loss_fn, mesh=mesh)
        seen.append(str(caught.value))
    for make in (
        lambda: zb.nn.mark_experts(nn.Linear(6, 6), mesh),
        lambda: zb.nn.mark_experts(nn.Linear(6, 6), mesh["dp"], dim=1),
        lambda: zb.nn.mark_experts(nn.Linear(6, 6).weight, mesh["dp"]),  # type: ignore[type-var]
    ):
        with pytest.raises(zb.InputError) as caught:
            make()
        seen.append(str(caught.value))
    return seen


def test_stages_that_do_not_fit_their_mesh_are_refused(world: Ranks) -> None:
    first, *others = world.run(refused, ranks=4)
    assert all(message == first for message in others)
    states(first[0], "DTensors", "stage", "parameters")
    states(first[1], "auto", "ep")
    states(first[2], "pp", "ep")
    states(first[3], "dp", "parameters")
    states(first[4], "mark_experts", 2)
    states(first[5], "bias", "(6,)", 1)
    states(first[6], "mark_experts", "Module")


def other_steps(group: dist.ProcessGroup, dimension: str) -> str:
    """The error when ranks along a dimension of the mesh play different numbers of microbatches, or when only one refuses the call."""
    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("pp", dimension))
    place = mesh.get_local_rank(dimension)

    def build(stage: int, num_stages: int) -> nn.Module:
        return build_mixture(stage, num_stages, mesh["ep"] if dimension == "ep" else None, "modules")

    seen = []
    for count in (2, -1):
        pipe = zb.Pipeline(build, "1f1b", MICROBATCHES, loss_fn, mesh=mesh)
        with pytest.raises((zb.InputError, zb.PipelineError)) as caught:
            pipe.step(*batch(MICROBATCHES), num_microbatches=count if place else MICROBATCHES)
        seen.append(str(caught.value))
        pipe.close()
    return "\n".join(seen)


@pytest.mark.parametrize("dimension", every(2, ["ep", "dp_shard"]))
def test_pipelines_whose_stages_talk_to_each_other_begin_the_same_steps(world: Ranks, dimension: str) -> None:
    for result in world.run(other_steps, dimension, ranks=4):
        states(result, "ranks 0, 1", "stages")
        states(result, "rank 0", 4, 1, "rank 1", 2)
        states(result, "rank 1", "refuses")


def named_mixture(stages: Any, num_stages: int, mesh: DeviceMesh | None, form: str) -> nn.Module:
    """Some stages in one module, whose parts have the same names in any cut."""
    built = ((stage, build_mixture(stage, num_stages, mesh, form)) for stage in stages)
    return nn.Sequential(OrderedDict((f"{stage}_{name}", part) for stage, module in built for name, part in module.named_children()))


def whole_steps(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh, seeds: range) -> list[float]:
    losses = []
    for seed in seeds:
        inputs, targets = whole_batch(mesh, seed)
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.4)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def saved_and_loaded(group: dist.ProcessGroup, folder: str, form: str) -> tuple[float, list[tuple[float | None, str]]]:
    """Without a barrier before the optimizer: how far losses are from those of one device, and from those after loading, there and here.

    Then the report on the split of each stage: the share of W, and the full text.
    """
    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("pp", "ep"))

    def make(pipe_seeds: range, *, load: bool) -> tuple[list[float], Any]:
        def build(stage: int, num_stages: int) -> nn.Module:
            module = named_mixture([stage], num_stages, mesh["ep"], form)
            if load:  # so that loading has to restore the values
                for parameter in module.parameters():
                    nn.init.zeros_(parameter.to_local() if isinstance(parameter, DTensor) else parameter)
            return module

        with zb.Pipeline(build, "zb-h1", MICROBATCHES, loss_fn, mesh=mesh) as pipe:
            optimizer = zb.PostValidation(torch.optim.AdamW(pipe.parameters(), lr=1e-2), pipe, max_norm=0.4)
            if load:
                zb.load(folder, pipe, optimizer)
            message = pipe.describe(*share_of(mesh, 0))
            losses = []
            for seed in pipe_seeds:
                losses.append(pipe.step(*share_of(mesh, seed)).item())
                optimizer.step()
                optimizer.zero_grad()
                if seed == 2 and not load:
                    zb.save(folder, pipe, optimizer)
            optimizer.settle()
        return losses, message

    losses, message = make(range(5), load=False)
    resumed, _ = make(range(3, 5), load=True)
    model = named_mixture(range(2), 2, None, form)
    expected = whole_steps(model, torch.optim.AdamW(model.parameters(), lr=1e-2), mesh, range(5))
    again = named_mixture(range(2), 2, None, form)
    optimizer = torch.optim.AdamW(again.parameters(), lr=1e-2)
    zb.load(folder, again, optimizer)
    alone = whole_steps(again, optimizer, mesh, range(3, 5))
    found = zip([*losses, *resumed, *alone], [*expected, *expected[3:], *expected[3:]], strict=True)
    return max(abs(loss / theirs - 1) for loss, theirs in found), [(report.share, str(report)) for report in message]


@pytest.mark.long
@pytest.mark.parametrize("form", [*(pytest.param(form, marks=pytest.mark.long) for form in ("modules", "stacked")), "divided"])
def test_experts_are_stepped_without_a_barrier_saved_and_loaded_as_one_model(world: Ranks, tmp_path: Path, form: str) -> None:
    for worst, result in world.run(saved_and_loaded, str(tmp_path / form), form, ranks=4):
        assert worst < 1e-11
        for share, text in result:
            if form == "divided":
                states(text, "DTensor", "Linear", "W")
            else:
                assert share == 1.0


def scaled(group: dist.ProcessGroup) -> tuple[float, float]:
    """The scale and the change of parameters after only an expert of rank 3 has a gradient that is not finite."""
    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("pp", "ep"))
    with zb.Pipeline(lambda s, n: build_mixture(s, n, mesh["ep"], "stacked"), "zb-h1", MICROBATCHES, loss_fn, mesh=mesh) as pipe:
        scaler = torch.amp.GradScaler(DEVICE.type, init_scale=4.0)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        pipe.step(*share_of(mesh, 0), scaler=scaler)
        if dist.get_rank() == 3:
            next(parameter for name, parameter in pipe.modules[1].named_parameters() if "experts" in name).grad.fill_(torch.inf)  # type: ignore[union-attr]
        before = [parameter.detach().clone() for parameter in pipe.parameters()]
        pipe.unscale_(scaler, optimizer)
        scaler.step(optimizer)
        scaler.update()
        moved = [(now - then).abs().max().item() for now, then in zip(pipe.parameters(), before, strict=True)]
        return scaler.get_scale(), max(moved)


def test_all_ranks_leave_out_a_step_in_which_one_rank_s_expert_is_not_finite(world: Ranks) -> None:
    assert world.run(scaled, ranks=4) == [(2.0, 0.0)] * 4
