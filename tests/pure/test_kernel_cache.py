"""The cache of compiled kernels: machine code is loaded only from files that nobody else could write, and is never left in part."""

from __future__ import annotations

import os
import resource
import stat
from pathlib import Path
from typing import Any

import pytest

machine: Any = pytest.importorskip("zerobubble.planning.kernels.native.machine")

CODE = b'"i64"\ncode'


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(machine.FOLDER, str(tmp_path))
    return tmp_path


def test_all_users_read_an_entry_and_its_owner_alone_changes_it(folder: Path) -> None:
    machine._keep("key", CODE)
    assert stat.S_IMODE((folder / "key.o").stat().st_mode) == 0o644
    assert machine._kept("key") == CODE
    (folder / "other.o").write_bytes((folder / "key.o").read_bytes())
    assert machine._kept("other") is None, "the code of another kernel"
    for mode in (0o664, 0o646):
        (folder / "key.o").chmod(mode)
        assert machine._kept("key") is None
    (folder / "key.o").unlink()
    os.mkfifo(folder / "key.o")
    assert machine._kept("key") is None


@pytest.mark.parametrize(("owner", "is_trusted"), [("user", True), ("root", True), ("package", True), ("another", False)])
def test_an_entry_of_another_user_is_not_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch, owner: str, is_trusted: bool) -> None:
    machine._keep("key", CODE)
    state = list((folder / "key.o").stat())
    number = {"user": os.geteuid(), "root": 0, "package": os.stat(machine.__file__).st_uid, "another": 54321}[owner]
    state[stat.ST_UID] = number
    monkeypatch.setattr(machine.os, "fstat", lambda _: os.stat_result(state))
    assert (machine._kept("key") == CODE) is is_trusted


def test_a_full_disk_leaves_no_part_of_an_entry(folder: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, before[1]))
    try:
        machine._keep("key", CODE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(folder.iterdir())


def test_a_user_without_a_home_has_no_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in (machine.FOLDER, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(machine.Path, "home", home)
    assert [found.name for found in machine._folders()] == ["__pycache__"]
