"""Combined options of a pipeline: every allowed pair trains with the numbers of one device, and every other pair is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zerobubble as zb
from docs.combinations import AXES, EXCLUDED, covering_rows
from tests.device import DEVICE
from tests.procs.experts import WIDTH, Mixture
from tests.procs.meshes import init_device_mesh
from tests.procs.ranks import Ranks
from tests.procs.test_offload_runs import everything
from tests.procs.test_planned_steps import passes_of, plan_ahead
from zerobubble.schedules import with_recompute, with_vocabulary

ROWS = covering_rows()
PLANNED = [
    {axis: values[0] for axis, values in AXES.items()} | {"schedule": "zb-h1", "order_by": "planned ahead", "mesh": mesh}
    for mesh in AXES["mesh"]
]
"""Rows of which every step is planned: those above may meet this value only with offloads, which keep the order alone."""
MICROBATCHES, STEPS, VOCABULARY = 4, 4, 11
LENGTHS = (8, 2, 1, 5)
"""Tokens of the sequences of each microbatch, where these differ. Most of the schedules are planned anew for them."""
LIMIT = 0.05
"""A norm that gradients exceed, so that steps are clipped and, with post-update validation, taken back."""
TOLERANCES = {"float64": (1e-10, 1e-9), "GradScaler": (1e-10, 1e-9), "bf16 autocast": (2e-3, 5e-2)}
"""The largest relative errors of losses, and of the changes that training makes to parameters, where low precision rounds otherwise."""
IN_PARTS = 0.3
"""That of changes where tensor parallel ranks under autocast add products that each has rounded, as PyTorch's own ranks do."""

Row = Mapping[str, str]


class Block(nn.Module):
    """A residual block. With `adds` it has a loss of its own, with a `mixture` experts, and if it `attends` attention."""

    def __init__(self, mixture: nn.Module | None, *, adds: bool, attends: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.mixture = mixture
        self.adds = adds
        self.attention = zb.nn.CausalAttention() if attends else None

    def forward(self, x: Tensor) -> Tensor:
        if self.attention is not None:
            normal = self.norm(x)
            x = x + self.attention(normal, normal, normal)
        x = x + self.down(self.up(self.norm(x)).relu())
        if self.mixture is not None:
            x = self.mixture(x)
        if self.adds:
            zb.nn.add_loss("size", 0.01 * x.square().mean())
        return x


class Stage(nn.Module):
    """A stage of a small language model."""

    def __init__(self, row: Row, stage: int, num_stages: int, mesh: DeviceMesh | None, seed: int = 0) -> None:
        super().__init__()
        experts = Mixture(stage, mesh["ep"] if mesh is not None else None, "divided") if row["mesh"] == "ep" else None
        torch.manual_seed(100 * seed + stage)
        self.embed = nn.Embedding(VOCABULARY, WIDTH) if stage == 0 else None
        self.block = Block(experts, adds=row["added losses"] == "some" and stage % 2 == 0, attends=row["slices"] != "1")
        is_last = stage == num_stages - 1
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False) if is_last and row["head"] == "whole" else None
        if row["frozen"] == "some":
            self.block.norm.requires_grad_(False)
            self.block.requires_grad_(stage % 2 == 0)

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        x = self.block(x)
        return x if self.head is None else self.head(x)


def typed(row: Row, module: nn.Module) -> nn.Module:
    return module.to(torch.float32 if row["precision"] == "bf16 autocast" else torch.float64)


def stages_of(row: Row, mesh: DeviceMesh | None, seed: int = 0) -> Callable[[int, int], nn.Module]:
    """Builds the stages for a rank of `mesh`."""

    def build(stage: int, num_stages: int) -> nn.Module:
        module = typed(row, Stage(row, stage, num_stages, mesh, seed))
        if row["mesh"] == "tp" and mesh is not None:
            return parallelize_module(module, mesh["tp"], {"block.up": ColwiseParallel(), "block.down": RowwiseParallel()})
        if row["mesh"] == "dp_shard" and mesh is not None:
            from torch.distributed.fsdp import fully_shard

            return fully_shard(module, mesh=mesh["dp_shard"])
        return module

    return build


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def head_of(row: Row) -> nn.Linear:
    torch.manual_seed(7)
    head = typed(row, nn.Linear(WIDTH, VOCABULARY, bias=False))
    assert isinstance(head, nn.Linear)
    return head


def count_tokens(target: Tensor) -> int:
    return target.numel()


def microbatches(row: Row, seed: int, replica: int) -> list[tuple[Tensor, Tensor]]:
    """Tokens and next tokens, two sequences per microbatch."""
    draw = torch.Generator().manual_seed(10 * seed + replica)
    lengths = LENGTHS if row["order_by"] != "none" else MICROBATCHES * (4,)
    tokens = [torch.randint(0, VOCABULARY, (2, length + 1), generator=draw) for length in lengths]
    return [(each[:, :-1], each[:, 1:]) for each in tokens]


def given(row: Row, seed: int, replica: int) -> tuple[Any, Any]:
    """The arguments of a step: tensors, or lists if microbatches have different lengths."""
    inputs, targets = zip(*microbatches(row, seed, replica), strict=True)
    return (list(inputs), list(targets)) if row["order_by"] != "none" else (torch.cat(inputs), torch.cat(targets))


def precision(row: Row) -> AbstractContextManager[object]:
    return torch.autocast(DEVICE.type, torch.bfloat16) if row["precision"] == "bf16 autocast" else nullcontext()


def optimizer_for(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def scaler_for(row: Row) -> torch.amp.GradScaler | None:
    return torch.amp.GradScaler(DEVICE.type, init_scale=8.0, growth_interval=2) if row["precision"] == "GradScaler" else None


class OneDevice:
    """The whole model, trained by plain PyTorch."""

    def __init__(self, row: Row, num_stages: int, replicas: int) -> None:
        self.row, self.replicas = row, replicas
        build = stages_of(row, None)
        self.stages = nn.ModuleList(build(stage, num_stages) for stage in range(num_stages))
        self.head: nn.Linear | None = head_of(row) if row["head"] == "divided" else None
        if row["tied"] != "none" and self.head is None:
            self.stages[-1].head.weight = self.stages[0].embed.weight
        self.all = nn.ModuleList([self.stages, *([self.head] if self.head is not None else [])])
        self.optimizer = optimizer_for(p for p in self.all.parameters() if p.requires_grad)
        self.before = {name: tensor.detach().clone() for name, tensor in self.all.named_parameters()}

    def step(self, seed: int) -> float:
        parts = [part for replica in range(self.replicas) for part in microbatches(self.row, seed, replica)]
        total = sum(targets.numel() for _, targets in parts)
        mean = 0.0
        for inputs, targets in parts:
            with precision(self.row):
                with zb.nn.collecting_losses() as added:
                    x = inputs
                    for stage in self.stages:
                        x = stage(x)
                    x = x if self.head is None else self.head(x)
                loss = (loss_fn(x, targets) + sum(added.values())) * (targets.numel() / total)
            loss.backward()
            mean += loss.item()
        if self.row["optimizer step"] != "plain":
            nn.utils.clip_grad_norm_(self.all.parameters(), LIMIT)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return mean

    def change_error(self, pipe: zb.Pipeline) -> float:
        """The largest error of this rank's parameters, in units of the largest change that training made to that parameter."""
        worst = 0.0
        for stage, module in pipe.modules.items():
            for name, parameter in module.named_parameters():
                mine = parameter.detach()
                mine = mine.full_tensor() if isinstance(mine, DTensor) else mine
                key, rows = f"0.{stage}.{name}", slice(None)
                if "head_rows_" in name:
                    first, end = name.rpartition("head_rows_")[2].split("_to_")
                    key, rows = "1.weight", slice(int(first), int(end))
                theirs = dict(self.all.named_parameters(remove_duplicate=False))[key].detach()
                before = self.before.get(key, self.before["0.0.embed.weight"])
                change = (theirs - before).abs().max().item()
                error = (mine - theirs[rows]).abs().max().item()
                worst = max(worst, error / change if change else error / 1e-12)
        return worst


def mesh_of(row: Row, group: dist.ProcessGroup) -> tuple[dict[str, Any], DeviceMesh | None, int, int]:
    """The pipeline's mesh, this rank's index among the data-parallel ranks, and their number."""
    if row["mesh"] == "pp":
        return {"group": group}, None, 0, 1
    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("pp", row["mesh"]))
    shares = 1 if row["mesh"] == "tp" else 2
    return {"mesh": mesh}, mesh, mesh.get_local_rank(row["mesh"]) if shares > 1 else 0, shares


def options_of(row: Row) -> tuple[zb.Schedule, dict[str, Any]]:
    """The schedule and the options of the pipeline."""
    slices = int(row["slices"])
    schedule = zb.make(row["schedule"], 2, MICROBATCHES, **({"slices": slices} if slices > 1 else {}))
    options: dict[str, Any] = {"split": row["split"], "scale": row["scale"], "survive": row["survive"] == "yes", "slices": slices}
    if row["recompute"] != "none":
        schedule = with_recompute(schedule)
    if row["recompute"] == "selective":
        options["recompute"] = {"selective": ["*.up", "*.norm"]}
    if row["head"] == "divided":
        schedule = with_vocabulary(schedule)
    if row["offload"] == "all":
        options["offload"] = everything(schedule)
    if row["order_by"] != "none":
        options |= {"order_by": "tokens", "loss_weight": count_tokens}
    if row["main_grad"] != "none":
        options["main_grad"] = torch.float64
    if row["tied"] != "none":
        options["tied"] = [[(0, "embed.weight"), (schedule.num_stages - 1, "head.weight")]]
    return schedule, options


class Errors(NamedTuple):
    """The largest errors of a run on a rank, and whether its last step played other passes than the schedule's."""

    loss: float
    change: float
    plays_plan: bool


def run(group: dist.ProcessGroup, row: Row, folder: str) -> Errors:
    """Train with the options of `row`, and once more from a checkpoint halfway if it asks for that, and compare with one device."""
    where, mesh, replica, replicas = mesh_of(row, group)
    schedule, options = options_of(row)
    losses: list[float] = []
    halves = [range(STEPS)] if row["checkpoint"] == "none" else [range(STEPS // 2), range(STEPS // 2, STEPS)]
    for turn, seeds in enumerate(halves):
        loss = zb.nn.DividedHead(head_of(row)) if row["head"] == "divided" else loss_fn
        with zb.Pipeline(stages_of(row, mesh, seed=turn), schedule, MICROBATCHES, loss, **options, **where) as pipe:
            trained = [parameter for parameter in pipe.parameters() if parameter.requires_grad]
            inner, scaler = optimizer_for(iter(trained)), scaler_for(row)
            if turn:
                zb.load(folder, pipe, inner)
            optimizer = zb.PostValidation(inner, pipe, LIMIT, scaler) if row["optimizer step"] == "PostValidation" else None
            for seed in seeds:
                if row["order_by"] == "planned ahead":
                    plan_ahead(pipe, given(row, seed, replica)[0])
                with precision(row):
                    losses.append(pipe.step(*given(row, seed, replica), scaler=scaler).item())
                finish_step(row, pipe, inner, optimizer, scaler)
            if optimizer is not None:
                optimizer.settle()
            if len(halves) == 2 and not turn:
                zb.save(folder, pipe, inner)
            if turn == len(halves) - 1:  # only now, so that options that are refused cost no training
                whole = OneDevice(row, schedule.num_stages, replicas)
                expected = [whole.step(seed) for seed in range(STEPS)]
                change = whole.change_error(pipe)
            assert pipe.played is not None
            plays_plan = passes_of(pipe.played) != passes_of(schedule)
    return Errors(max(abs(mine / theirs - 1) for mine, theirs in zip(losses, expected, strict=True)), change, plays_plan)


def finish_step(row: Row, pipe: zb.Pipeline, inner: torch.optim.Optimizer, optimizer: Any, scaler: torch.amp.GradScaler | None) -> None:
    """Clip the gradients and step the optimizer."""
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
        return
    if scaler is not None:
        pipe.unscale_(scaler, inner)
    if row["optimizer step"] == "clip_grad_norm_":
        pipe.clip_grad_norm_(LIMIT)
    held = list(pipe.parameters())
    if row["main_grad"] != "none":
        for parameter in held:
            main = getattr(parameter, "main_grad", None)
            parameter.grad = None if main is None else main.to(parameter.dtype)
    if scaler is None:
        inner.step()
    else:
        scaler.step(inner)
        scaler.update()
    inner.zero_grad()
    for parameter in held:
        if row["main_grad"] != "none":
            parameter.main_grad = None  # type: ignore[attr-defined]


def ranks_of(row: Row) -> int:
    return 2 if row["mesh"] == "pp" else 4


@pytest.mark.long(all=True)
@pytest.mark.parametrize("number", range(len(ROWS)))
def test_options_together_train_as_one_device(world: Ranks, tmp_path: Path, number: int) -> None:
    row = ROWS[number]
    most_of_loss, most_of_change = TOLERANCES[row["precision"]]
    if (row["precision"], row["mesh"]) == ("bf16 autocast", "tp"):
        most_of_change = IN_PARTS
    for errors in world.run(run, row, str(tmp_path / "checkpoint"), ranks=ranks_of(row)):
        assert errors.loss <= most_of_loss
        assert errors.change <= most_of_change


@pytest.mark.long(all=True)
@pytest.mark.parametrize("row", PLANNED, ids=lambda row: row["mesh"])
def test_planned_steps_train_as_one_device(world: Ranks, tmp_path: Path, row: Row) -> None:
    for errors in world.run(run, row, str(tmp_path), ranks=ranks_of(row)):
        assert errors.loss <= TOLERANCES["float64"][0]
        assert errors.change <= TOLERANCES["float64"][1]
        assert errors.plays_plan


def refusals(group: dist.ProcessGroup, folder: str) -> list[str]:
    """The error for each pair of excluded options that takes as many ranks as `group` has; empty for a pair that trains."""
    said = []
    for one, other, _ in EXCLUDED:
        row = {axis: values[0] for axis, values in AXES.items()} | dict([one, other])
        if row["survive"] == "yes" and row["mesh"] == "pp":
            row["mesh"] = "pp" if "mesh" in (one[0], other[0]) else "dp"
        if ranks_of(row) == group.size():
            try:
                run(group, row, folder)
                said.append("")
            except zb.ZeroBubbleError as error:
                said.append(str(error))
    return said


def test_excluded_options_are_refused(world: Ranks, tmp_path: Path) -> None:
    found = [said for ranks in (2, 4) for said in world.run(refusals, str(tmp_path), ranks=ranks)[0]]
    assert len(found) == len(EXCLUDED)
    assert all(found)
