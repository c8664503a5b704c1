"""One-device checkpoints: pipelines resume from them, and one device from a pipeline's; a kill at any write leaves one complete."""

from __future__ import annotations

import errno
import os
import random
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zerobubble as zb
from tests.device import DEVICE
from tests.procs.meshes import init_device_mesh
from tests.procs.models import Block, batch, loss_fn
from tests.procs.ranks import ONE_AT_A_TIME, Ranks, forkserver
from tests.procs.test_checkpoint import MICROBATCHES, Tied, cut, optimizer_for, resumed, saved, train
from tests.procs.versions import needs_fsdp2_on_cpu
from tests.refusals import raises
from tests.thinned import every


def alone(seed: int = 0, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Tied(**options).double()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.8, 0.95))


def adamw_of(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return model, torch.optim.AdamW(model.parameters())


def train_alone(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> list[float]:
    """What the pipeline trains, microbatch by microbatch."""
    losses = []
    for seed in seeds:
        inputs, targets = batch(MICROBATCHES, seed)
        total = 0.0
        for x, y in zip(inputs.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True):
            loss = loss_fn(model(x), y) / MICROBATCHES
            loss.backward()
            total += loss.item()
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def goes_on_alone(path: str, until: int = 6) -> list[float]:
    """The losses of one device that goes on from a checkpoint, with other weights at first."""
    model, optimizer = alone(seed=1)
    extra = zb.load(path, model, optimizer)
    return train_alone(model, optimizer, range(extra["seen"], until))


def test_groups_get_all_saved_options_and_keep_the_names_of_their_own_parameters(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    optimizer.param_groups[0]["label"] = "all"
    optimizer.step()
    scheduler.step()
    zb.save(tmp_path / "last", model, optimizer)
    own = [{"params": list(layer.named_parameters(prefix=f"layer {number}"))} for number, layer in enumerate(model)]
    loaded = torch.optim.SGD(own, lr=0.1)
    zb.load(tmp_path / "last", model, loaded)
    for number, group in enumerate(loaded.param_groups):
        assert (group["lr"], group["initial_lr"], group["label"]) == (0.2, 0.4, "all")
        assert group["param_names"] == [f"layer {number}.weight", f"layer {number}.bias"]


def test_a_state_that_belongs_to_no_parameter_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state["calls"] = {"number": 3}
    with raises(zb.InputError, optimizer="SGD", name="'calls'"):
        zb.save(tmp_path / "last", model, optimizer)
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_one_device_goes_on_from_a_pipeline(world: Ranks, tmp_path: Path) -> None:
    path = str(tmp_path / "last")
    before = world.run(saved, path, "zb-v", ranks=2)[0]
    assert goes_on_alone(path) == pytest.approx(before, rel=1e-12)


@pytest.mark.long
@pytest.mark.parametrize("wait", every(2, [True, False]))
def test_a_pipeline_goes_on_from_one_device(world: Ranks, tmp_path: Path, wait: bool) -> None:
    path = str(tmp_path / "last")
    model, optimizer = alone()
    train_alone(model, optimizer, range(3))
    saving = zb.save(path, model, optimizer, extra={"seen": 3}, wait=wait)
    before = train_alone(model, optimizer, range(3, 6))
    saving.wait()
    assert saving.done()
    assert goes_on_alone(path) == before
    assert world.run(resumed, path, "zb-v", ranks=2)[0] == pytest.approx(before, rel=1e-12)
    assert [each.name for each in tmp_path.iterdir()] == ["last"]


@pytest.mark.long
def test_random_numbers_a_scaler_and_the_place_in_the_data_go_on(tmp_path: Path) -> None:
    path = tmp_path / "last"
    model, optimizer = alone(dropout=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    place = {"epoch": 2, "order": [3, 1, 2], "shard": {"name": "b", "left": 0.25}}
    for _ in range(2):  # two good steps of three
        scaler.scale(model(batch(1)[0]).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    zb.save(path, model, optimizer, scaler=scaler, extra=place)
    drawn = random.random(), np.random.random(), torch.rand(1).item(), train_alone(model, optimizer, range(2))
    model, optimizer = alone(seed=1, dropout=0.5)
    scaler = torch.amp.GradScaler("cpu")
    assert zb.load(path, model, optimizer, scaler=scaler) == place
    assert (random.random(), np.random.random(), torch.rand(1).item(), train_alone(model, optimizer, range(2))) == drawn
    assert (scaler.state_dict()["scale"], scaler.state_dict()["_growth_tracker"]) == (8.0, 2)
    with raises(zb.InputError, "checkpoint", "scaler", "load"):
        zb.load(path, model, optimizer)


def test_what_does_not_fit_one_device_is_refused(world: Ranks, tmp_path: Path) -> None:
    path = str(tmp_path / "last")
    model, optimizer = alone()
    zb.save(path, model, optimizer)
    before = [parameter.clone() for parameter in model.parameters()]
    with raises(zb.InputError, "embed.weight", "torch.float64", "torch.float32"):
        zb.load(path, *adamw_of(Tied()))
    with raises(zb.InputError, "blocks.6.0.down.weight", 2):
        zb.load(path, *adamw_of(Tied(7).double()))
    with raises(zb.InputError, "checkpoint", "optimizer", "load"):
        zb.load(path, model)
    with raises(zb.InputError, "second", "model", "Pipeline"):
        zb.load(path, "model")  # type: ignore[arg-type]
    groups = [{"params": [one], "lr": 0.1 * number} for number, one in enumerate(model.parameters())]
    zb.save(path, model, torch.optim.SGD(groups))
    with raises(zb.InputError, "group 0", "optimizer", "options"):
        zb.load(path, model, optimizer)
    (tmp_path / "file").write_text("")
    with raises(zb.InputError, str(tmp_path / "file"), foreign=os.strerror(errno.ENOTDIR)):
        zb.save(tmp_path / "file" / "last", model)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))


def two_optimizers(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """One for the embedding, which is the head, and one for the rest; both have stepped."""
    tied, *rest = model.parameters()
    optimizers = torch.optim.AdamW([tied], lr=1e-2), torch.optim.SGD(rest, lr=1e-2, momentum=0.9)
    loss_fn(model(batch(1)[0]), batch(1)[1]).backward()
    for optimizer in optimizers:
        optimizer.step()
    return optimizers


@pytest.mark.long
def test_one_of_two_optimizers_is_refused_where_the_other_has_stepped(tmp_path: Path) -> None:
    path = tmp_path / "last"
    model, _ = alone()
    first, second = two_optimizers(model)
    with raises(zb.InputError, "SGD", "AdamW"):
        zb.save(path, model, first)
    assert not path.exists()
    zb.save(path, model, [first, second])
    with raises(zb.InputError, "optimizer", "lacks"):
        zb.load(path, model, first)
    zb.load(path, model, [first, second])


@pytest.mark.parametrize("why", every(3, ["frozen", "never stepped", "gone"]))
def test_an_optimizer_for_a_part_of_the_model_is_saved_where_nothing_else_trains(tmp_path: Path, why: str) -> None:
    model, _ = alone()
    first, second = two_optimizers(model)
    if why == "frozen":
        for parameter in second.param_groups[0]["params"]:
            parameter.requires_grad_(False)
    elif why == "never stepped":
        second.state.clear()
    else:
        second.itself = second  # type: ignore[attr-defined]  # only the garbage collector removes it
        del second
    zb.save(tmp_path / "last", model, first)
    zb.load(tmp_path / "last", model, first)


class Unused(nn.Module):
    """A model alone, small enough to be saved a hundred times."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))


EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


def killed_at(path: str, left: int, wait: bool, message: Connection) -> None:
    """Saves a second checkpoint and dies at its write number `left`; if there are fewer writes, sends their number."""
    model, count, is_armed = Unused(), [0], [False]
    zb.save(path, model, extra={"seen": 1})
    with torch.no_grad():
        model.weight.fill_(1.0)

    def hear(event: str, args: tuple[Any, ...]) -> None:
        if is_armed[0] and event in EVENTS and str(args[0]).startswith(path) and not (event == "open" and args[1] in ("r", "rb", None)):
            if count[0] == left:
                os.kill(os.getpid(), signal.SIGKILL)
            count[0] += 1

    sys.addaudithook(hear)
    is_armed[0] = True
    zb.save(path, model, extra={"seen": 2}, wait=wait).wait()
    message.send(count[0])


def kill_at(path: str, left: int, wait: bool) -> int:
    """How many writes there were, 0 where the process was killed before the last."""
    ours, theirs = forkserver().Pipe()
    process = forkserver().Process(target=killed_at, args=(path, left, wait, theirs), daemon=True)
    with ONE_AT_A_TIME:
        process.start()
    theirs.close()
    try:
        assert ours.poll(60), "the process hangs"
        count: int = ours.recv()
    except EOFError:
        count = 0
    process.join()
    return count


@pytest.mark.long
@pytest.mark.parametrize("wait", every(2, [False, True]))
def test_a_kill_at_any_write_leaves_a_whole_checkpoint(tmp_path: Path, wait: bool) -> None:
    path = tmp_path / "last"
    writes, seen = kill_at(str(path), -1, wait), []
    assert writes >= 8
    for left in range(writes):
        assert kill_at(str(path), left, wait) == 0
        model = Unused()
        seen.append(zb.load(path, model)["seen"])
        assert torch.equal(model.weight, torch.full((3,), seen[-1] - 1.0))
    assert seen == sorted(seen)
    assert set(seen) == {1, 2}
    zb.save(path, Unused())
    assert [each.name for each in tmp_path.iterdir()] == ["last"]


def undivided(model: nn.Module) -> nn.Module:
    """Torch takes no in-place operation behind a divided layer."""
    for part in model.modules():
        if isinstance(part, Block):
            part.act = nn.ReLU()
    return model


def divided(group: Any, path: str, sizes: dict[str, int], schedule: str) -> tuple[list[float], list[float]]:
    """The losses after saving, and those after loading it again, of stages divided by tensor parallelism and FSDP2."""
    mesh = init_device_mesh(DEVICE.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    model = cut()
    stage = undivided(model(mesh.get_local_rank("pp"), 2))
    for block in [part for part in stage.modules() if isinstance(part, Block)]:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if "dp_shard" in sizes:
            from torch.distributed.fsdp import fully_shard

            fully_shard(block, mesh=mesh["dp_shard"])
    count = 2 * MICROBATCHES // sizes.get("dp_shard", 1)
    first = count * mesh.get_local_rank("dp_shard") if "dp_shard" in sizes else 0
    share = slice(first, first + count)
    with zb.Pipeline(stage, schedule, count // 2, loss_fn, mesh=mesh, tied=model.tied(2)) as pipe:
        optimizer = optimizer_for(pipe)
        train(pipe, optimizer, range(3), share)
        zb.save(path, pipe, optimizer, extra={"seen": 3})
        before = train(pipe, optimizer, range(3, 6), share)
        zb.load(path, pipe, optimizer)
        return before, train(pipe, optimizer, range(3, 6), share)


@pytest.mark.long
def test_what_tensor_parallelism_divides_goes_on_to_the_bit_and_on_one_device(world: Ranks, tmp_path: Path) -> None:
    path = str(tmp_path / "last")
    before, after = world.run(divided, path, {"pp": 2, "tp": 2}, "1f1b", ranks=4)[0]
    assert before == after
    assert goes_on_alone(path) == pytest.approx(before, rel=1e-12)


@pytest.mark.long
@needs_fsdp2_on_cpu
def test_fsdp2_shards_resume_again_and_on_one_device(tmp_path: Path) -> None:
    path = str(tmp_path / "last")
    eight = Ranks(8)
    try:
        before, after = eight.run(divided, path, {"pp": 2, "dp_shard": 2, "tp": 2}, "zb-h1", ranks=8)[0]
    finally:
        eight.kill()
    assert before == after
    assert goes_on_alone(path) == pytest.approx(before, rel=1e-12)


def four_by_two(group: Any, path: str, wait: bool) -> tuple[list[float], list[float]]:
    """Two replicas of four ranks: the losses after saving, and those of a new pipeline of the same layout that loads it."""
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "pp"))
    first = MICROBATCHES * mesh.get_local_rank("dp")
    share = slice(first, first + MICROBATCHES)
    losses = []
    for seed in range(2):
        with zb.Pipeline(cut(seed=seed, blocks=8), "zb-v", MICROBATCHES // 2, loss_fn, mesh=mesh) as pipe:
            optimizer = zb.PostValidation(optimizer_for(pipe), pipe, max_norm=0.5)
            if seed == 0:
                train(pipe, optimizer, range(3), share)
                zb.save(path, pipe, optimizer, extra={"seen": 3}, wait=wait)
            else:
                assert zb.load(path, pipe, optimizer) == {"seen": 3}
            losses.append(train(pipe, optimizer, range(3, 6), share))
    return losses[0], losses[1]


def two_ranks(group: Any, path: str) -> list[float]:
    with zb.Pipeline(cut(seed=1, blocks=8), "1f1b", MICROBATCHES, loss_fn, group=group) as pipe:
        optimizer = zb.PostValidation(optimizer_for(pipe), pipe, max_norm=0.5)
        extra = zb.load(path, pipe, optimizer)
        return train(pipe, optimizer, range(extra["seen"], 6))


@pytest.mark.long
@pytest.mark.parametrize("wait", [True, False])
def test_two_replicas_of_four_ranks_go_on_with_two_ranks_and_alone(tmp_path: Path, wait: bool) -> None:
    path = str(tmp_path / "last")
    eight = Ranks(8)
    try:
        results = eight.run(four_by_two, path, wait, ranks=8)
        before, after = results[0]
        assert all(theirs == results[0] for theirs in results)
        assert after == before
        assert eight.run(two_ranks, path, ranks=2)[0] == pytest.approx(before, rel=1e-12)
    finally:
        eight.kill()
    model, optimizer = alone(seed=1, blocks=8)
    zb.load(path, model, optimizer)
    losses = []
    for seed in range(3, 6):
        inputs, targets = batch(MICROBATCHES, seed)
        pieces = zip(inputs.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True)
        loss = torch.stack([loss_fn(model(x), y) for x, y in pieces]).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    assert losses == pytest.approx(before, rel=1e-12)
