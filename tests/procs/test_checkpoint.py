"""Checkpoints: training resumes with the same numbers in the same pipeline, in another one, and after a crash.

The same layout resumes to the bit, other layouts up to rounding. A kill while saving leaves one complete checkpoint. A checkpoint that
does not fit changes nothing.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter

import zerobubble as zb
from tests.device import DEVICE
from tests.procs.meshes import init_device_mesh
from tests.procs.models import Block, batch, build, loss_fn
from tests.procs.ranks import Ranks
from tests.procs.versions import needs_fsdp2_on_cpu
from tests.refusals import states

MICROBATCHES = 4


class Tied(nn.Module):
    """A language model whose head is its embedding, with a buffer that training changes."""

    def __init__(self, blocks: int = 6, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Sequential(Block(6), nn.Dropout(dropout)) for _ in range(blocks))
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def cut(*, seed: int = 0, dropout: float = 0.0, blocks: int = 6) -> Any:
    torch.manual_seed(seed)
    return zb.split(Tied(blocks, dropout).double(), example=torch.zeros(2, 5, dtype=torch.long))


def optimizer_for(pipe: zb.Pipeline) -> torch.optim.Optimizer:
    return torch.optim.AdamW(pipe.parameters(), lr=1e-2, betas=(0.8, 0.95), foreach=False)


def train(pipe: zb.Pipeline, optimizer: Any, seeds: range, share: slice = slice(None)) -> list[float]:
    losses = []
    for seed in seeds:
        inputs, targets = (tensor[share] for tensor in batch(MICROBATCHES, seed))
        losses.append(pipe.step(inputs, targets).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def saved(group: Any, path: str, schedule: str) -> list[float]:
    """Train three steps, save, and train three more; returns the losses of these."""
    with zb.Pipeline(cut(), schedule, MICROBATCHES, loss_fn, group=group) as pipe:
        optimizer = optimizer_for(pipe)
        train(pipe, optimizer, range(3))
        zb.save(path, pipe, optimizer, extra={"seen": 3, "best": float("nan")})
        return train(pipe, optimizer, range(3, 6))


def resumed(group: Any, path: str, schedule: str, replicas: int = 1) -> list[float]:
    """Load into a pipeline with other weights; returns the losses of three more steps."""
    where: dict[str, Any] = {"group": group}
    share = slice(None)
    if replicas > 1:
        mesh = init_device_mesh(DEVICE.type, (replicas, group.size() // replicas), mesh_dim_names=("dp", "pp"))
        where, half = {"mesh": mesh}, 2 * MICROBATCHES // replicas
        share = slice(half * mesh.get_local_rank("dp"), half * (mesh.get_local_rank("dp") + 1))
    with zb.Pipeline(cut(seed=1), schedule, MICROBATCHES, loss_fn, **where) as pipe:
        optimizer = optimizer_for(pipe)
        extra = zb.load(path, pipe, optimizer)
        return train(pipe, optimizer, range(extra["seen"], 6), share)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("schedule", "ranks", "replicas"), [pytest.param("zb-v", 2, 1, marks=pytest.mark.long), ("1f1b", 4, 1), ("1f1b", 1, 1)]
)
def test_training_goes_on_in_another_pipeline(world: Ranks, tmp_path: Path, schedule: str, ranks: int, replicas: int) -> None:
    path = str(tmp_path / "last")
    before = world.run(saved, path, "zb-v", ranks=2)[0]
    after = world.run(resumed, path, schedule, replicas, ranks=ranks)
    assert all(losses == after[0] for losses in after)
    assert after[0] == pytest.approx(before, rel=1e-12)
    assert [each.name for each in tmp_path.iterdir()] == ["last"]


def replicas_saved(group: Any, path: str) -> list[float]:
    """As `saved`, over two replicas of two ranks."""
    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("dp", "pp"))
    replica = mesh.get_local_rank("dp")
    share = slice(MICROBATCHES * replica, MICROBATCHES * (replica + 1))
    with zb.Pipeline(cut(), "zb-v", MICROBATCHES, loss_fn, mesh=mesh) as pipe:
        optimizer = optimizer_for(pipe)
        train(pipe, optimizer, range(3), share)
        zb.save(path, pipe, optimizer, extra={"seen": 3})
        return train(pipe, optimizer, range(3, 6), share)


@pytest.mark.long
def test_replicas_go_on_as_one_pipeline_and_back(world: Ranks, tmp_path: Path) -> None:
    path = str(tmp_path / "last")
    before = world.run(replicas_saved, path, ranks=4)
    assert all(losses == before[0] for losses in before)
    assert world.run(resumed, path, "zb-v", 2, ranks=4)[0] == before[0]


def with_dropout(group: Any, path: str) -> tuple[list[float], list[float]]:
    """The losses after saving and after loading into a new pipeline, with dropout and an optimizer without a barrier."""
    with zb.Pipeline(cut(dropout=0.3), "zb-v", MICROBATCHES, loss_fn, group=group) as pipe:
        optimizer = zb.PostValidation(optimizer_for(pipe), pipe, max_norm=0.5)
        train(pipe, optimizer, range(3))
        zb.save(path, pipe, optimizer)
        before = train(pipe, optimizer, range(3, 6))
        optimizer.settle()
    with zb.Pipeline(cut(seed=1, dropout=0.3), "zb-v", MICROBATCHES, loss_fn, group=group) as pipe:
        optimizer = zb.PostValidation(optimizer_for(pipe), pipe, max_norm=0.5)
        zb.load(path, pipe, optimizer)
        after = train(pipe, optimizer, range(3, 6))
        optimizer.settle()
    return before, after


@pytest.mark.long
def test_the_same_pipeline_goes_on_to_the_bit(world: Ranks, tmp_path: Path) -> None:
    for before, after in world.run(with_dropout, str(tmp_path / "last"), ranks=2):
        assert before == after


def written_by_hand(group: Any, path: str) -> list[str]:
    """Stages without the names of one model: loaded into the same number of stages, refused by others."""
    seen = []
    with zb.Pipeline(build, "1f1b", MICROBATCHES, loss_fn, group=group) as pipe:
        zb.save(path, pipe, extra={"epoch": [1, 2]})
        before = [parameter.clone() for parameter in pipe.parameters()]
        with torch.no_grad():
            for parameter in pipe.parameters():
                parameter.zero_()
        assert zb.load(path, pipe) == {"epoch": [1, 2]}
        assert all(torch.equal(*pair) for pair in zip(pipe.parameters(), before, strict=True))
        for call in (
            lambda: zb.load(path + "not", pipe),
            lambda: zb.load(path, pipe, optimizer_for(pipe)),
            lambda: zb.save(path, pipe, extra={"tensor": torch.zeros(1)}),
            lambda: zb.save(path, pipe, "adam"),  # type: ignore[arg-type]
        ):
            with pytest.raises(zb.InputError) as caught:
                call()
            seen.append(str(caught.value).replace(path, "PATH"))
        assert zb.load(path, pipe) == {"epoch": [1, 2]}
    with zb.Pipeline(build, "zb-v", MICROBATCHES, loss_fn, group=group) as pipe:
        with pytest.raises(zb.InputError) as caught:
            zb.load(path, pipe)
        seen.append(str(caught.value))
    with zb.Pipeline(cut(), "1f1b", MICROBATCHES, loss_fn, group=group) as pipe:
        zb.save(path, pipe)
    with zb.Pipeline(cut(blocks=7), "1f1b", MICROBATCHES, loss_fn, group=group) as pipe:
        before = [parameter.clone() for parameter in pipe.parameters()]
        with pytest.raises(zb.InputError) as caught:
            zb.load(path, pipe)
        seen.append(str(caught.value))
        assert all(torch.equal(*pair) for pair in zip(pipe.parameters(), before, strict=True))
    return seen


@pytest.mark.long
def test_a_checkpoint_that_does_not_fit_changes_nothing(world: Ranks, tmp_path: Path) -> None:
    first, second = world.run(written_by_hand, str(tmp_path / "last"), ranks=2)
    assert first == second
    nothing, no_optimizer, not_plain, no_such, stages, model = first
    states(nothing, "PATHnot", "checkpoint")
    states(no_optimizer, "checkpoint", "optimizer")
    states(not_plain, "extra", "numbers", ".item()", ".tolist()", "buffers")
    states(no_such, "optimizer")
    states(stages, 2, 4, "checkpoint", "stages")
    states(model, "blocks.6.0.down.weight", "checkpoint")


MOMENTS: dict[str, tuple[Any, str, int]] = {
    "writing tensors": (FileSystemWriter, "write_data", 0),
    "noting where they lie": (os, "rename", 0),
    "writing their list": (FileSystemWriter, "finish", 0),
    "before the first renaming": (os, "rename", 2),
    "before the second": (os, "rename", 3),
    "before the third": (os, "rename", 4),
    "removing the old one": (os, "rmdir", 0),
}
"""Where a rank is killed while the second checkpoint is written; its note and DCP's list of tensors are renamed first."""
WHOLE = ("before the third", "removing the old one")


def killed(group: Any, path: str, moment: str, victim: int, wait: bool) -> str:
    with zb.Pipeline(cut(), "1f1b", MICROBATCHES, loss_fn, group=group, timeout=30.0) as pipe:
        optimizer = optimizer_for(pipe)
        train(pipe, optimizer, range(1))
        zb.save(path, pipe, optimizer, extra={"seen": 1})
        train(pipe, optimizer, range(1, 2))
        owner, name, left = MOMENTS[moment]
        original, calls = getattr(owner, name), [left]

        def strike(*args: Any, **kwargs: Any) -> Any:
            calls[0] -= 1
            if calls[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        if pipe.rank == victim:
            setattr(owner, name, strike)
        with pytest.raises(zb.PipelineError) as caught:
            _save_and_go_on(path, pipe, optimizer, wait=wait)
    return str(caught.value)


def _save_and_go_on(path: str, pipe: zb.Pipeline, optimizer: Any, *, wait: bool) -> None:
    zb.save(path, pipe, optimizer, extra={"seen": 2}, wait=wait)
    train(pipe, optimizer, range(2, 40))
    pipe.close()


def found(group: Any, path: str) -> tuple[int, float]:
    """The number of steps in the checkpoint, and the loss of the next step after each number."""
    with zb.Pipeline(cut(seed=1), "1f1b", MICROBATCHES, loss_fn, group=group) as pipe:
        optimizer = optimizer_for(pipe)
        seen = zb.load(path, pipe, optimizer)["seen"]
        return seen, train(pipe, optimizer, range(seen, seen + 1))[0]


def parameters_left_by(world: Ranks, worlds: list[Ranks], path: str, moment: str, victim: int, wait: bool) -> int:
    """The number of steps in the checkpoint found after a kill; training resumes from it as if there had been no kill."""
    outcomes = world.outcomes(killed, path, moment, victim, wait, ranks=2)
    assert outcomes[victim] == ("gone", "SIGKILL")
    state, reported = outcomes[1 - victim]
    assert state == "ok", reported
    assert any(words in reported for words in (f"rank {victim} is gone", "lost contact", f"rank {1 - victim} failed while saving")), (
        reported
    )
    worlds.append(Ranks(4))
    (seen, loss), _ = worlds[-1].run(found, path, ranks=2)
    assert loss == pytest.approx(worlds[-1].run(after_steps, seen, ranks=2)[0], rel=1e-12)
    return seen


@pytest.mark.long
@pytest.mark.parametrize(
    "moment", [moment if moment == "before the third" else pytest.param(moment, marks=pytest.mark.long) for moment in MOMENTS]
)
def test_a_kill_while_saving_leaves_a_whole_checkpoint(world: Ranks, worlds: list[Ranks], tmp_path: Path, moment: str) -> None:
    assert parameters_left_by(world, worlds, str(tmp_path / "last"), moment, 0, True) == (2 if moment in WHOLE else 1)


@pytest.mark.long
@pytest.mark.parametrize(
    ("moment", "victim"),
    [
        pytest.param("writing tensors", 0, marks=pytest.mark.long),
        ("writing tensors", 1),
        pytest.param("noting where they lie", 1, marks=pytest.mark.long),
        pytest.param("before the second", 0, marks=pytest.mark.long),
        pytest.param("before the third", 0, marks=pytest.mark.long),
    ],
)
def test_a_kill_during_a_background_save_leaves_one(world: Ranks, worlds: list[Ranks], tmp_path: Path, moment: str, victim: int) -> None:
    assert parameters_left_by(world, worlds, str(tmp_path / "last"), moment, victim, False) == (2 if moment in WHOLE else 1)


def after_steps(group: Any, count: int) -> float:
    """The loss of the step after `count` steps, without any checkpoint."""
    with zb.Pipeline(cut(), "1f1b", MICROBATCHES, loss_fn, group=group) as pipe:
        return train(pipe, optimizer_for(pipe), range(count + 1))[-1]


def sharded(group: Any, path: str) -> list[float]:
    """As `saved`, with parts that FSDP2 divides over two ranks."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("pp", "dp_shard"))
    share = slice(MICROBATCHES * mesh.get_local_rank("dp_shard"), MICROBATCHES * (mesh.get_local_rank("dp_shard") + 1))
    model = cut()
    stages = [model(stage, 2) for stage in range(2)]
    stage = stages[mesh.get_local_rank("pp")]
    for block in list(stage.modules()):
        if isinstance(block, Block):
            fully_shard(block, mesh=mesh["dp_shard"])
    with zb.Pipeline(stage, "1f1b", MICROBATCHES, loss_fn, mesh=mesh, tied=model.tied(2)) as pipe:
        optimizer = optimizer_for(pipe)
        train(pipe, optimizer, range(3), share)
        zb.save(path, pipe, optimizer, extra={"seen": 3})
        before = train(pipe, optimizer, range(3, 6), share)
        zb.load(path, pipe, optimizer)
        assert train(pipe, optimizer, range(3, 6), share) == before
    return before


@pytest.mark.long
@needs_fsdp2_on_cpu
def test_fsdp2_shards_are_saved_whole(world: Ranks, tmp_path: Path) -> None:
    path = str(tmp_path / "last")
    before = world.run(sharded, path, ranks=4)[0]
    assert world.run(resumed, path, "zb-v", 2, ranks=4)[0] == pytest.approx(before, rel=1e-12)
