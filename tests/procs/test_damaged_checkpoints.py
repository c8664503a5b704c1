"""Loading a checkpoint with a damaged file raises an `InputError` that names the file, on every rank, and changes nothing."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from tests.device import DEVICE
from tests.procs.exhaustive import EXHAUSTIVE
from tests.procs.models import loss_fn
from tests.procs.ranks import Ranks
from tests.procs.test_checkpoint import MICROBATCHES, cut, optimizer_for, train
from tests.refusals import raises, states
from zerobubble.runtime.checkpoint import contents
from zerobubble.runtime.checkpoint.checksums import CHECKSUMS_FILE
from zerobubble.runtime.checkpoint.contents import FORM
from zerobubble.runtime.step.hook import StepHook

NUM_CORRUPTIONS = 700 if EXHAUSTIVE else 70
NUM_ON_RANKS = 60 if EXHAUSTIVE else 10


def flip_a_bit(file: Path, draw: random.Random) -> None:
    data = bytearray(file.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    file.write_bytes(data)


def zero_a_block(file: Path, draw: random.Random) -> None:
    data = file.read_bytes()
    begin = draw.randrange(len(data))
    block = data[begin : begin + draw.choice([1, 16, 512])]
    data = data[:begin] + bytes(len(block)) + data[begin + len(block) :]
    file.write_bytes(data if any(block) else data[:-1])


def overwrite_a_block(file: Path, draw: random.Random) -> None:
    data = bytearray(file.read_bytes())
    begin = draw.randrange(len(data))
    data[begin : begin + 8] = draw.randbytes(len(data[begin : begin + 8]))
    file.write_bytes(data)


def cut_off(file: Path, draw: random.Random) -> None:
    file.write_bytes(file.read_bytes()[: draw.randrange(file.stat().st_size)])


def append(file: Path, draw: random.Random) -> None:
    file.write_bytes(file.read_bytes() + draw.randbytes(draw.randrange(1, 64)))


def remove(file: Path, draw: random.Random) -> None:
    file.unlink()


CORRUPTIONS: tuple[Callable[[Path, random.Random], None], ...] = (
    *(flip_a_bit, zero_a_block, overwrite_a_block),
    *(cut_off, append, remove),
)


def corrupted(whole: Path, folder: Path, seed: int) -> Path:
    """Copy a checkpoint and damage one file at random; returns the file."""
    draw = random.Random(seed)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)
    file = folder / draw.choice(sorted(each.name for each in whole.iterdir()))
    before = file.read_bytes()
    while file.exists() and file.read_bytes() == before:
        draw.choice(CORRUPTIONS)(file, draw)
    return file


class Normed(nn.Module):
    """Parameters and buffers, for an optimizer that keeps two tensors of each."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.linear(x))
        return y


def stepped(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model alone after a step."""
    torch.manual_seed(seed)
    model = Normed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.rand(8, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def numbers_of(modules: Any, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Copies of parameters, buffers and optimizer state."""
    kept = [tensor for module in modules for tensor in module.state_dict().values()]
    kept += [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return [tensor.clone() for tensor in kept]


def same(before: list[Tensor], after: list[Tensor]) -> bool:
    return len(before) == len(after) and all(map(torch.equal, before, after))


def test_no_corruption_is_loaded_in_silence_or_by_half(tmp_path: Path) -> None:
    zb.save(tmp_path / "whole", *stepped(0), extra={"seen": 1})
    model, optimizer = stepped(1)
    before = numbers_of([model], optimizer)
    for seed in range(NUM_CORRUPTIONS):
        file = corrupted(tmp_path / "whole", tmp_path / "damaged", seed)
        with pytest.raises(zb.InputError) as caught:
            zb.load(tmp_path / "damaged", model, optimizer)
        assert str(file) in str(caught.value), seed
        assert same(before, numbers_of([model], optimizer)), seed
    zb.load(tmp_path / "whole", model, optimizer)
    model_then, optimizer_then = stepped(0)
    assert same(numbers_of([model], optimizer), numbers_of([model_then], optimizer_then))


def damaged_on_ranks(group: Any, folder: str) -> list[tuple[str, str, bool]]:
    """Per corruption: the file, the error, and whether everything is as it was; then a step, and a load of the whole checkpoint."""
    whole, damaged = Path(folder, "whole"), Path(folder, "damaged")
    found = []
    with zb.Pipeline(cut(), "1f1b", MICROBATCHES, loss_fn, group=group) as pipe:
        optimizer = optimizer_for(pipe)
        train(pipe, optimizer, range(1))
        zb.save(whole, pipe, optimizer)
        saved = numbers_of(pipe.modules.values(), optimizer)
        train(pipe, optimizer, range(1, 2))
        before = numbers_of(pipe.modules.values(), optimizer)
        for seed in range(NUM_ON_RANKS):
            file = corrupted(whole, damaged, seed) if pipe.rank == 0 else None
            torch.distributed.barrier(group)
            with pytest.raises(zb.InputError) as caught:
                zb.load(damaged, pipe, optimizer)
            found.append((str(file), str(caught.value), same(before, numbers_of(pipe.modules.values(), optimizer))))
        zb.load(whole, pipe, optimizer)
        assert same(saved, numbers_of(pipe.modules.values(), optimizer))
        train(pipe, optimizer, range(1, 2))
        assert same(before, numbers_of(pipe.modules.values(), optimizer))
    return found


def test_every_rank_names_the_damaged_file_and_the_pipeline_goes_on(world: Ranks, tmp_path: Path) -> None:
    first, second = world.run(damaged_on_ranks, str(tmp_path), ranks=2)
    for (file, message, is_as_before), (_, theirs, is_theirs) in zip(first, second, strict=True):
        assert message == theirs
        assert file in message
        assert is_as_before
        assert is_theirs


class Refusing(StepHook):
    """Refuses to load its state."""

    def state_dict(self) -> dict[str, Any]:
        return {"number": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise zb.InputError("not this state")


def refused_late(group: Any, path: str) -> tuple[list[str], bool]:
    """Errors raised after everything has been read: by a hook of one rank, and for different checkpoints on different ranks."""
    seen = []
    with zb.Pipeline(cut(), "1f1b", MICROBATCHES, loss_fn, group=group) as pipe:
        optimizer = optimizer_for(pipe)
        if pipe.rank == 1:
            pipe.attach(Refusing())
        zb.save(f"{path}-0", pipe, optimizer)
        train(pipe, optimizer, range(1))
        zb.save(f"{path}-1", pipe, optimizer)
        before = numbers_of(pipe.modules.values(), optimizer)
        for place in (f"{path}-0", f"{path}-{pipe.rank}"):
            with pytest.raises(zb.InputError) as caught:
                zb.load(place, pipe, optimizer)
            seen.append(str(caught.value))
        return seen, same(before, numbers_of(pipe.modules.values(), optimizer))


def test_a_load_that_a_hook_refuses_and_one_of_two_checkpoints_change_nothing(world: Ranks, tmp_path: Path) -> None:
    first, second = world.run(refused_late, str(tmp_path / "last"), ranks=2)
    assert first == second
    (of_the_hook, of_the_checkpoints), is_as_before = first
    states(of_the_hook, "rank 1", "Refusing")
    assert of_the_hook.endswith("not this state")
    states(of_the_checkpoints, "rank 1", "checkpoint")
    assert is_as_before


class Counting(StepHook):
    """Counts steps, in containers that it changes in place."""

    def __init__(self) -> None:
        self.seen = [0]

    def on_step_end(self, step: Any) -> None:
        self.seen[0] += 1

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen[:] = state["seen"]


class Checked(Counting):
    """Refuses before anything is loaded if `refuses` is set."""

    refuses = False
    num_loads = 0

    def check_state_dict(self, state: dict[str, Any]) -> None:
        if self.refuses:
            raise KeyError("seen")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_loads += 1
        super().load_state_dict(state)


class Explodes(Counting):
    """Takes half of its state and then raises, on one rank."""

    refuses = False

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if self.refuses and state["seen"] == [1]:
            raise ZeroDivisionError("boom")


class Choosy(torch.optim.AdamW):
    """An optimizer that loads its state, and then raises once."""

    refuses = False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self.refuses:
            raise RuntimeError("not these moments")


def everything_of(pipe: Any, optimizer: torch.optim.Optimizer, hooks: list[Counting]) -> tuple[Any, ...]:
    plain = [list(hook.seen) for hook in hooks], optimizer.param_groups[0]["lr"], random.getstate(), pipe.step_state()["num_steps"]
    return numbers_of(pipe.modules.values(), optimizer), torch.get_rng_state(), plain


def is_equal(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return same(one[0], other[0]) and torch.equal(one[1], other[1]) and one[2] == other[2]


def refused_on_rank_1(group: Any, path: str) -> list[tuple[str, bool, int]]:
    """Per object that refuses on rank 1 alone: the error, whether everything is as before, and how often the checked hook was loaded."""
    found = []
    hooks = [Counting(), Checked(), Explodes()]
    with zb.Pipeline(cut(), "1f1b", MICROBATCHES, loss_fn, group=group, hooks=hooks) as pipe:
        optimizer = Choosy(pipe.parameters(), lr=0.1)
        train(pipe, optimizer, range(1))
        zb.save(path, pipe, optimizer)
        saved = everything_of(pipe, optimizer, hooks)
        train(pipe, optimizer, range(1, 3))
        optimizer.param_groups[0]["lr"] = 0.2
        random.random()
        torch.rand(1)
        before = everything_of(pipe, optimizer, hooks)
        for refusing in (hooks[1], hooks[2], optimizer):
            refusing.refuses = pipe.rank == 1
            with pytest.raises(zb.InputError) as caught:
                zb.load(path, pipe, optimizer)
            refusing.refuses = False
            found.append((str(caught.value), is_equal(before, everything_of(pipe, optimizer, hooks)), hooks[1].num_loads))
        zb.load(path, pipe, optimizer)
        assert is_equal(saved, everything_of(pipe, optimizer, hooks))
        train(pipe, optimizer, range(1, 3))
    return found


@pytest.mark.long
def test_a_load_refused_on_one_rank_changes_no_rank(world: Ranks, tmp_path: Path) -> None:
    first, second = world.run(refused_on_rank_1, str(tmp_path / "last"), ranks=2)
    assert first == second
    for (message, is_as_before, num_loads), name in zip(first, ("Checked", "Explodes", "Choosy"), strict=True):
        assert message.count("rank 1: ") == 1
        assert name in message
        assert is_as_before, name
        assert num_loads == 0, "loaded last"


def test_a_state_that_a_hook_refuses_leaves_the_others_alone(world: Ranks) -> None:
    assert all(world.run(partial_state, ranks=2))


def partial_state(group: Any) -> bool:
    """The same with `load_state_dict` of the pipeline, which each rank calls separately."""
    hooks = [Counting(), Checked(), Explodes()]
    with zb.Pipeline(cut(), "1f1b", MICROBATCHES, loss_fn, group=group, hooks=hooks) as pipe:
        optimizer = optimizer_for(pipe)
        train(pipe, optimizer, range(1))
        state = json.loads(json.dumps(pipe.step_state()))
        train(pipe, optimizer, range(1, 3))
        hooks[2].refuses = True  # type: ignore[attr-defined]
        with raises(zb.InputError, "Explodes", "ZeroDivisionError"):
            pipe.load_step_state(state)
        return [hook.seen for hook in hooks] == [[3], [3], [3]] and pipe.step_state()["num_steps"] == 3


def test_an_optimizer_of_one_device_that_refuses_leaves_the_model_alone(tmp_path: Path) -> None:
    model, _ = stepped(0)
    zb.save(tmp_path / "last", model, Choosy(model.parameters(), lr=0.1))
    model, _ = stepped(1)
    optimizer = Choosy(model.parameters(), lr=0.3)
    model(torch.rand(8, 4)).sum().backward()
    optimizer.step()
    optimizer.refuses = True
    before = numbers_of([model], optimizer)
    with raises(zb.InputError, "RuntimeError", "moments"):
        zb.load(tmp_path / "last", model, optimizer)
    assert same(before, numbers_of([model], optimizer))
    assert optimizer.param_groups[0]["lr"] == 0.3
    assert optimizer.param_groups[0]["params"][0] is model.linear.weight


@pytest.mark.parametrize(("saved", "loaded"), [(False, True), (True, False), (False, False)])
def test_scalers_that_were_or_are_disabled(tmp_path: Path, saved: bool, loaded: bool) -> None:
    model, optimizer = stepped(0)
    zb.save(tmp_path / "last", model, optimizer, scaler=torch.amp.GradScaler(DEVICE.type, enabled=saved))
    model, optimizer = stepped(1)
    before = numbers_of([model], optimizer)
    scaler = torch.amp.GradScaler(DEVICE.type, enabled=loaded)
    if loaded:
        with raises(zb.InputError, "scaler"):
            zb.load(tmp_path / "last", model, optimizer, scaler=scaler)
        assert same(before, numbers_of([model], optimizer))
    else:
        zb.load(tmp_path / "last", model, optimizer, scaler=scaler)
        assert not same(before, numbers_of([model], optimizer))


@pytest.mark.parametrize("form", [1, FORM + 1])
def test_a_checkpoint_of_another_form_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: int) -> None:
    model, optimizer = stepped(0)
    with monkeypatch.context() as patch:
        patch.setattr(contents, "FORM", form)
        zb.save(tmp_path / "last", model, optimizer)
    before = numbers_of([model], optimizer)
    with raises(zb.InputError, file=str(tmp_path / "last"), got=form, expected=FORM):
        zb.load(tmp_path / "last", model, optimizer)
    assert same(before, numbers_of([model], optimizer))


@pytest.mark.parametrize("name", [CHECKSUMS_FILE, ".metadata"])
def test_a_folder_that_lacks_a_file_of_every_checkpoint_is_not_loaded(tmp_path: Path, name: str) -> None:
    zb.save(tmp_path / "last", *stepped(0))
    (tmp_path / "last" / name).unlink()
    with raises(zb.InputError, file=str(tmp_path / "last" / name)):
        zb.load(tmp_path / "last", *stepped(1))
