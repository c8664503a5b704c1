"""Paths of checkpoints: files that are not part of a checkpoint are never removed, and an unusable path ends no pipeline."""

from __future__ import annotations

import errno
import os
import pickle
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerobubble as zb
from tests.procs.models import loss_fn
from tests.procs.ranks import ONE_AT_A_TIME, Ranks, forkserver
from tests.procs.test_checkpoint import MICROBATCHES, cut, train
from tests.procs.versions import needs_no_dist
from tests.refusals import raises
from zerobubble.runtime.checkpoint import checksums


def model(value: float = 0.0) -> nn.Module:
    made = nn.Linear(2, 2)
    nn.init.constant_(made.weight, value)
    return made


def names(folder: Path) -> set[str]:
    return {each.name for each in folder.iterdir()}


OTHERS = (
    *("run.before-finetune", "run.writing-notes", "run.before-20261125", "run.written-1a2b3c4"),
    *("run-1.before-1a2b3c4d", "xrun.before-1a2b3c4d"),
)
"""Names that only resemble those of drafts of `run`."""


def test_folders_of_others_next_to_a_checkpoint_stay(tmp_path: Path) -> None:
    zb.save(tmp_path / "run", model())
    for name in OTHERS:
        zb.save(tmp_path / "other", model())
        os.rename(tmp_path / "other", tmp_path / name)
    (tmp_path / "run.before-1a2b3c4d").mkdir()
    (tmp_path / "run.before-1a2b3c4d" / "thesis.tex").write_text("mine")
    (tmp_path / "run.written-1a2b3c4d").write_text("a file")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run.writing-1a2b3c4d").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "run.before-deadbeef").mkdir()
    (tmp_path / "run.before-deadbeef" / "part.0").write_text("left by a kill")
    before = names(tmp_path)
    zb.save(tmp_path / "run", model())
    assert names(tmp_path) == before - {"run.before-deadbeef"}
    assert (tmp_path / "run.before-1a2b3c4d" / "thesis.tex").read_text() == "mine"


@needs_no_dist
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_folder_that_is_no_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "train.log").write_text("mine")
    zb.save(tmp_path / "used", model())
    (tmp_path / "used" / "notes").write_text("mine")
    torch.distributed.checkpoint.save({"weight": torch.ones(2)}, checkpoint_id=tmp_path / "of-torch", no_dist=True)
    for name, stated in {"file": ("a file",), "folder": ("train.log",), "used": ("notes",), "of-torch": ("zb.save", "checkpoint")}.items():
        with raises(zb.InputError, *stated):
            zb.save(tmp_path / name, model())
    assert names(tmp_path) == {"file", "folder", "used", "of-torch"}
    assert (tmp_path / "file").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    zb.save(tmp_path / "empty", model())
    zb.load(tmp_path / "empty", model())


def test_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "run")
    for value in (1.0, 2.0):
        zb.save(tmp_path / "link", model(value))
        loaded = model()
        zb.load(tmp_path / "link", loaded)
        assert torch.equal(loaded.weight, model(value).weight)
    assert (tmp_path / "link").is_symlink()
    assert names(tmp_path / "disk") == {"run"}


@pytest.mark.parametrize("name", ["run[1]", "run[!a]*?", "{run}", "r.u+n(1)", "läuft\n"])
def test_a_checkpoint_may_have_any_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    for value in (1.0, 2.0):
        zb.save(path, model(value))
    assert names(tmp_path) == {name}
    for kind in ("before", "written"):  # as a kill between the two renames leaves it
        os.rename(path, tmp_path / f"{name}.{kind}-1a2b3c4d")
        for place in (path, tmp_path / f"{name}.{kind}-1a2b3c4d"):
            loaded = model()
            zb.load(place, loaded)
            assert torch.equal(loaded.weight, model(2.0).weight)
        zb.save(path, model(2.0))
        assert names(tmp_path) == {name}


def test_the_newest_of_two_that_kills_have_left_is_loaded(tmp_path: Path) -> None:
    for value, name in ((1.0, "run.written-ffffffff"), (2.0, "run.written-aaaaaaaa")):
        zb.save(tmp_path / "run", model(value))
        os.rename(tmp_path / "run", tmp_path / name)
        os.utime(tmp_path / name / checksums.METADATA_FILE, (value, value))
    loaded = model()
    zb.load(tmp_path / "run", loaded)
    assert torch.equal(loaded.weight, model(2.0).weight)


BAD: tuple[Any, ...] = ("", ".", "/", "a\0b", None, 3, "\ud800", "run.writing-1a2b3c4d", "x" * 250)


def refused(group: Any, folder: str) -> list[str]:
    """The errors of save and load for unusable paths and for paths that differ between ranks; the pipeline stays usable."""
    os.chdir(folder)
    seen = []
    with zb.Pipeline(cut(), "1f1b", MICROBATCHES, loss_fn, group=group) as pipe:
        for path in BAD:
            for call in (zb.save, zb.load):
                with pytest.raises(zb.InputError) as caught:
                    call(path, pipe)
                seen.append(str(caught.value))
        with pytest.raises(zb.InputError) as caught:
            zb.save(f"run-{pipe.rank}", pipe)
        seen.append(str(caught.value))
        with pytest.raises(zb.InputError) as caught:
            zb.save("" if pipe.rank else "run", pipe)
        seen.append(str(caught.value))
        train(pipe, torch.optim.SGD(pipe.parameters(), lr=0.1), range(1))
        zb.save("run", pipe)
        zb.load("run", pipe)
    os.chdir("/")
    return seen


def test_a_path_that_cannot_be_used_is_one_sentence_and_ends_nothing(world: Ranks, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    first, second = world.run(refused, str(tmp_path), ranks=2)
    assert first == second
    assert len(first) == 2 * len(BAD) + 2
    assert all("\n" not in message and len(message) < 600 for message in first)
    assert names(tmp_path) == {"mine", "run"}


def hold(path: str, message: Connection) -> None:
    """Start a checkpoint and block it until there is input or the process is killed."""
    from zerobubble.runtime.checkpoint.folder import Draft, resolve_path

    draft = Draft(resolve_path(path))
    message.send(draft.folder.name)
    message.recv()
    draft.publish()


def test_the_draft_of_another_process_is_left_alone_while_it_lives(tmp_path: Path) -> None:
    ours, theirs = forkserver().Pipe()
    process = forkserver().Process(target=hold, args=(str(tmp_path / "run"), theirs), daemon=True)
    with ONE_AT_A_TIME:
        process.start()
    draft = ours.recv()
    with raises(zb.InputError, draft, "checkpoint"):
        zb.save(tmp_path / "run", model())
    assert names(tmp_path) == {draft}
    process.kill()
    process.join()
    zb.save(tmp_path / "run", model())
    assert names(tmp_path) == {"run"}


class FullDisk(checksums.FileIO):
    """A file that accepts at most `left` more bytes."""

    left = 300

    def write(self, data: Any) -> int:
        self.left -= len(data)
        if self.left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(data) or 0


def test_a_full_disk_is_one_sentence_without_the_words_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zb.save(tmp_path / "run", model(1.0))
    with monkeypatch.context() as patch:
        patch.setattr(checksums, "FileIO", FullDisk)
        for wait in (True, False):
            with pytest.raises(zb.InputError) as caught:
                zb.save(tmp_path / "run", model(2.0), wait=wait).wait()
            assert os.strerror(errno.ENOSPC) in str(caught.value)
            assert "enforce" not in str(caught.value)
    assert names(tmp_path) == {"run"}
    loaded = model()
    zb.load(tmp_path / "run", loaded)
    assert torch.equal(loaded.weight, model(1.0).weight)


def test_a_failed_save_leaves_no_open_file(tmp_path: Path) -> None:
    before = len(os.listdir(f"/proc/{os.getpid()}/fd")) if sys.platform == "linux" else 0
    for _ in range(3):
        zb.save(tmp_path / "run", model())
        with pytest.raises(zb.InputError):
            zb.save(tmp_path, model())
    assert not before or len(os.listdir(f"/proc/{os.getpid()}/fd")) == before


class Evil:
    """A pickle that creates a file where it is loaded."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.file),)


def test_saving_runs_no_code_of_a_folder_that_it_replaces(tmp_path: Path) -> None:
    for name in ("checkpoint", "other"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "ran")))
    (tmp_path / "checkpoint" / checksums.CHECKSUMS_FILE).touch()
    zb.save(tmp_path / "checkpoint", model())
    with raises(zb.InputError, file=str(tmp_path / "other")):
        zb.save(tmp_path / "other", model())
    assert not (tmp_path / "ran").exists()
    zb.load(tmp_path / "checkpoint", model())
