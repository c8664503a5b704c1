"""Checkpoints that are written during training have the state at the call of `save`, and all ranks report errors.

A checkpoint that cannot be written is one error on all ranks, and training continues.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter

import zerobubble as zb
from tests.procs.models import batch, loss_fn
from tests.procs.ranks import Ranks
from tests.procs.test_checkpoint import MICROBATCHES, Tied, cut, optimizer_for, resumed, train
from tests.refusals import states
from zerobubble.runtime.checkpoint import background

WRITE = FileSystemWriter.write_data


def held_back(gate: threading.Event) -> Any:
    def write(*args: Any, **kwargs: Any) -> Any:
        assert gate.wait(60)
        return WRITE(*args, **kwargs)

    return write


def saved_while_training(group: Any, path: str, monkeypatch_rank: int) -> tuple[list[float], list[bool]]:
    """Losses of the steps while a rank cannot write yet, and whether this rank's save was done before and after."""
    gate = threading.Event()
    with zb.Pipeline(cut(), "zb-v", MICROBATCHES, loss_fn, group=group) as pipe, pytest.MonkeyPatch.context() as patch:
        if pipe.rank == monkeypatch_rank:
            patch.setattr(FileSystemWriter, "write_data", held_back(gate))
        optimizer = optimizer_for(pipe)
        train(pipe, optimizer, range(3))
        saving = zb.save(path, pipe, optimizer, extra={"seen": 3}, wait=False)
        losses = train(pipe, optimizer, range(3, 6))
        done = [saving.done()]
        gate.set()
        saving.wait()
        saving.wait()
        return losses, [*done, saving.done()]


@pytest.mark.parametrize("held", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_background_save_has_the_state_at_its_call(world: Ranks, tmp_path: Path, held: int) -> None:
    path = str(tmp_path / "last")
    results = world.run(saved_while_training, path, held, ranks=2)
    assert not results[held][1][0]
    assert not results[0][1][0], "rank 0 waits for the others"
    assert all(done[-1] for _, done in results)
    assert world.run(resumed, path, "1f1b", ranks=1)[0] == pytest.approx(results[0][0], rel=1e-12)
    assert [each.name for each in tmp_path.iterdir()] == ["last"]


def one_after_another(group: Any, path: str) -> list[int]:
    """The step that a load finds after saves without a wait, and after the pipeline was closed during another save."""
    found = []
    with zb.Pipeline(cut(), "1f1b", MICROBATCHES, loss_fn, group=group) as pipe:
        for number in range(3):
            first = zb.save(path, pipe, extra={"number": number}, wait=False)
        found.append(zb.load(path, pipe)["number"])
        first.wait()
        zb.save(path, pipe, extra={"number": 3}, wait=False)
    with zb.Pipeline(cut(), "1f1b", MICROBATCHES, loss_fn, group=group) as pipe:
        found.append(zb.load(path, pipe)["number"])
        zb.save(path, pipe, extra={"number": 4}, wait=False)
        zb.save(path, pipe, extra={"number": 5})
        found.append(zb.load(path, pipe)["number"])
    return found


@pytest.mark.long
def test_a_save_waits_for_the_one_before_and_the_end_for_the_last(world: Ranks, tmp_path: Path) -> None:
    assert world.run(one_after_another, str(tmp_path / "last"), ranks=2) == [[2, 3, 5], [2, 3, 5]]
    assert [each.name for each in tmp_path.iterdir()] == ["last"]


def full(*args: Any, **kwargs: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def on_a_full_disk(group: Any, path: str, victim: int) -> tuple[list[str], int]:
    """The errors if a rank cannot write: from wait, the next save, a save that waits, and the end; training continues."""
    seen = []
    pipe = zb.Pipeline(cut(), "1f1b", MICROBATCHES, loss_fn, group=group)
    optimizer = optimizer_for(pipe)
    zb.save(path, pipe, optimizer, extra={"number": 0})
    with pytest.MonkeyPatch.context() as patch:
        if pipe.rank == victim:
            patch.setattr(FileSystemWriter, "write_data", full)
        for ask in ("wait", "save", "at once", "load", "close"):
            train(pipe, optimizer, range(1))
            with pytest.raises(zb.InputError) as caught:
                _ask(ask, path, pipe, optimizer)
            seen.append(str(caught.value))
    with pytest.raises(zb.PipelineError):
        train(pipe, optimizer, range(1))
    with zb.Pipeline(cut(), "1f1b", MICROBATCHES, loss_fn, group=group) as pipe:
        return seen, zb.load(path, pipe, optimizer_for(pipe))["number"]


def _ask(ask: str, path: str, pipe: zb.Pipeline, optimizer: torch.optim.Optimizer) -> None:
    saving = zb.save(path, pipe, optimizer, extra={"number": 1}, wait=ask == "at once")
    if ask == "wait":
        with pytest.raises(zb.InputError):
            saving.wait()
        saving.wait()
    elif ask == "save":
        zb.save(path, pipe, optimizer, extra={"number": 2}, wait=False)
    elif ask == "load":
        zb.load(path, pipe, optimizer)
    else:
        pipe.close()


@pytest.mark.long
@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_checkpoint_that_cannot_be_written_is_one_error_on_all_ranks(world: Ranks, tmp_path: Path, victim: int) -> None:
    message = world.run(on_a_full_disk, str(tmp_path / "last"), victim, ranks=2)
    assert message[0] == message[1]
    texts, number = message[0]
    assert number == 0
    assert len(texts) == 5
    for text in texts:
        states(text, f"rank {victim}", foreign=os.strerror(errno.ENOSPC))
        assert text.endswith("; the one before it is whole")
    assert [each.name for each in tmp_path.iterdir()] == ["last"]


def failing_in_between(group: Any, path: str) -> float:
    """The seconds until the pipeline has reported an error in user code while a checkpoint is written."""
    pipe = zb.Pipeline(cut(), "1f1b", MICROBATCHES, loss_fn, group=group, timeout=200.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(background, "IDLE_TIMEOUT_AFTER_END_S", 60.0)  # the other rank writes on, however busy the machine is
        saving = zb.save(path, pipe, extra={"number": 7}, wait=False)
        began = time.monotonic()
        inputs, targets = batch(MICROBATCHES, 0)
        with pytest.raises(zb.PipelineError), pipe:
            pipe.step(inputs, targets[1:] if pipe.rank else None)
        while not saving.done():
            time.sleep(0.01)
    return time.monotonic() - began


def test_an_error_in_a_step_does_not_undo_a_checkpoint(world: Ranks, tmp_path: Path) -> None:
    path = str(tmp_path / "last")
    assert max(world.run(failing_in_between, path, ranks=2)) < 100.0
    assert zb.load(path, Tied().double())["number"] == 7


def differing(group: Any, path: str) -> str:
    with zb.Pipeline(cut(), "1f1b", MICROBATCHES, loss_fn, group=group) as pipe:
        with pytest.raises(zb.InputError) as caught:
            zb.save(path, pipe, extra={"next": pipe.rank})
        zb.save(path, pipe, extra={"next": 1})
    return str(caught.value)


def test_an_extra_that_differs_between_ranks_is_refused(world: Ranks, tmp_path: Path) -> None:
    first, second = world.run(differing, str(tmp_path / "last"), ranks=2)
    assert first == second
    states(first, "next", 0, "rank 0", 1, "rank 1")
