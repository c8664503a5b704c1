"""The folder of a checkpoint, which holds a whole one at any moment: the last that was written, or the one before it.

A checkpoint is written beside its place and renamed into it when nothing is missing. A process that is killed between the two renames
that replace an older one leaves both beside the place, where `find` still finds them.
"""

from __future__ import annotations

import os
import shutil
import uuid
from pathlib import Path

from zerobubble.errors import InputError

_WRITTEN, _BEFORE = ".written-", ".before-"


def room_beside(path: Path) -> Path:
    """Where to write what shall be at `path`; one process chooses it for all ranks."""
    return path.with_name(f"{path.name}.writing-{uuid.uuid4().hex[:8]}")


def publish(written: Path, path: Path) -> None:
    """Put the checkpoint `written` at `path`, in the place of what is there, and remove what earlier attempts have left."""
    _sync(written)
    complete = path.with_name(f"{path.name}{_WRITTEN}{uuid.uuid4().hex[:8]}")
    os.rename(written, complete)
    if path.exists():
        os.rename(path, path.with_name(f"{path.name}{_BEFORE}{uuid.uuid4().hex[:8]}"))
    os.rename(complete, path)
    _sync(path.parent)
    for left in path.parent.glob(f"{path.name}.*-*"):
        if left.name.removeprefix(path.name).startswith((_WRITTEN, _BEFORE, ".writing-")):
            shutil.rmtree(left, ignore_errors=True)


def find(path: Path) -> Path:
    """Where the newest whole checkpoint of `path` is; raises `InputError` where there is none."""
    if path.is_dir():
        return path
    for kind in (_WRITTEN, _BEFORE):
        for found in sorted(path.parent.glob(f"{path.name}{kind}*")):
            return found
    raise InputError(f"there is no checkpoint at {path}")


def _sync(folder: Path) -> None:
    """Have the system write the folder's list of files before anything that comes after."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
