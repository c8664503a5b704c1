"""The folder of a checkpoint. At any moment, it holds a complete checkpoint: the last one written, or the previous one.

A checkpoint is written next to its place, and renamed into it once it is complete. If a process is killed between the two renames that
replace an older checkpoint, both are left next to the place, where `find_checkpoint` still finds them.

| name | state |
|---|---|
| `NAME.writing-1a2b3c4d` | in progress, or left by a process that was killed |
| `NAME.written-1a2b3c4d` | complete, about to be renamed to `NAME` |
| `NAME.before-1a2b3c4d` | the previous one, about to be removed |

Nothing else is ever removed: no folder whose name only resembles these, and no file that does not belong to a checkpoint.
"""

from __future__ import annotations

import fcntl
import os
import re
import uuid
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

from zerobubble.arguments import instance, require
from zerobubble.errors import InputError
from zerobubble.runtime.checkpoint.checksums import CHECKSUMS_FILE, METADATA_FILE
from zerobubble.runtime.failure.forked import detach_in_children

SCHEDULE = "schedule.json"
"""The file in the folder with the schedule, or the plan."""
_LOCK = "lock"
_NAMES = rf"{re.escape(METADATA_FILE)}(\.tmp)?|{SCHEDULE}|{CHECKSUMS_FILE}|{_LOCK}"
_OWN_FILE = re.compile(rf"{_NAMES}|__\d+_\d+\.distcp|part\.\d+(\.writing)?|failed\.\d+")
_DRAFT_NAME = re.compile(r"(?P<name>.+)\.(?P<kind>writing|written|before)-(?=[0-9]*[a-f])[0-9a-f]{8}", re.DOTALL)
"""The 8 hexadecimal digits must include a letter, because `NAME.before-20261231` may be the user's."""


def resolve_path(path: Any, what: str = "path") -> Path:
    """Returns the absolute path of `path`, with links resolved.

    If it is not a path, raises `InputError`, with `what` as the name of the argument.
    """
    require(what, path, instance(str, os.PathLike))
    text = os.fsdecode(path)
    if not text:
        raise InputError("{argument} is empty", argument=what, got=text, remedy='give the name of a folder, such as "checkpoint"')
    try:
        return Path(os.path.realpath(text))
    except ValueError as error:  # a NUL byte, or what the file system cannot encode
        raise InputError("{argument} cannot be {got:.200}: {reason}", argument=what, got=repr(text), reason=str(error)) from error


class Draft:
    """A checkpoint that rank 0 prepares for `path`. Until it is published, its files are in `folder`, which this process keeps locked.

    Raises `InputError` if there is something other than a checkpoint at `path`, or if another process is writing one there.
    """

    def __init__(self, path: Path) -> None:
        if _DRAFT_NAME.fullmatch(path.name):
            raise InputError("{path!r} is a name that zb.save gives to unfinished checkpoints", path=path.name, remedy="give another path")
        try:
            refuse_what_is_no_checkpoint(path)
            _refuse_second_process(path)
            self.folder = _next_to(path, "writing")
            self.folder.mkdir(parents=True)
            self._lock = _Lock(self.folder)
        except OSError as error:
            raise InputError("a checkpoint cannot be written to {file}: {reason}", file=str(path), reason=error.strerror) from error
        self._path = path

    def publish(self) -> None:
        """Puts the checkpoint in place, replacing the one there, and removes what earlier attempts have left."""
        path = self._path
        refuse_what_is_no_checkpoint(path)
        # Only renames from here on, each atomic: a crash between two of them leaves a whole checkpoint that `find_checkpoint` finds.
        _sync(self.folder)
        self._rename(self.folder, _next_to(path, "written"))
        if path.is_dir():
            os.rename(path, _next_to(path, "before"))
        self._rename(self.folder, path)
        _sync(path.parent)
        self.release()
        for left in _drafts(path):
            if _is_locked(left) is False:
                _remove(left)

    def remove(self) -> None:
        """Removes what has been written, once no rank writes any more."""
        self.release()
        _remove(self.folder)

    def release(self) -> None:
        """Unlocks the folder. The next checkpoint removes it."""
        self._lock.release()

    def _rename(self, folder: Path, name: Path) -> None:
        os.rename(folder, name)
        self.folder = self._lock.folder = name


def find_checkpoint(path: Path) -> Path:
    """Returns the folder of the newest whole checkpoint of `path`. Raises `InputError` if there is none."""
    if path.is_dir():
        return path
    try:
        for kind in ("written", "before"):
            whole = [left for left in _drafts(path, kind) if (left / METADATA_FILE).exists()]
            if whole:
                return max(whole, key=lambda left: (left / METADATA_FILE).stat().st_mtime)
    except OSError as error:
        message = "there is no checkpoint at {path}, and {parent} cannot be read: {strerror}"
        raise InputError(message, path=str(path), parent=str(path.parent), strerror=error.strerror) from error
    what = "is a file, and a checkpoint is a folder" if path.exists() else "does not exist"
    remedy = "give the path that zb.save wrote"
    raise InputError("there is no checkpoint at {path}, which {what}", path=str(path), what=what, remedy=remedy)


def refuse_what_is_no_checkpoint(path: Path) -> None:
    """Raises `InputError` if a checkpoint at `path` would replace something else."""
    if not os.path.lexists(path):
        return
    if not path.is_dir():
        raise InputError("{file} is a file, but a checkpoint is a folder", file=str(path), remedy="give another path")
    names = sorted(os.listdir(path))
    foreign = [name for name in names if not _OWN_FILE.fullmatch(name)]
    if foreign:
        sentence = "{path} holds {foreign!r}, which zb.save has not written, and a new checkpoint would replace the whole folder"
        raise InputError(sentence, path=str(path), foreign=foreign[0], remedy="give a folder of the checkpoint's own")
    if names and CHECKSUMS_FILE not in names:
        message = "{file} is not a checkpoint of zb.save, which would replace it"
        raise InputError(message, file=str(path), remedy="give another path, or move it away")


def _next_to(path: Path, kind: str) -> Path:
    """Returns a random draft name next to `path`."""
    while True:  # until the digits include a letter
        name = f"{path.name}.{kind}-{uuid.uuid4().hex[:8]}"
        if _DRAFT_NAME.fullmatch(name):
            return path.with_name(name)


def _drafts(path: Path, kind: str = "") -> list[Path]:
    """Returns the folders next to `path` that were created for a checkpoint there and hold nothing else."""
    drafts = []
    for name in sorted(os.listdir(path.parent)) if path.parent.is_dir() else ():
        match, folder = _DRAFT_NAME.fullmatch(name), path.with_name(name)
        if match and match["name"] == path.name and kind in ("", match["kind"]) and _holds_own_files_alone(folder):
            drafts.append(folder)
    return drafts


def _holds_own_files_alone(folder: Path) -> bool:
    try:
        return not folder.is_symlink() and all(map(_OWN_FILE.fullmatch, os.listdir(folder)))
    except OSError:  # no folder, or gone since
        return False


def _remove(folder: Path) -> None:
    """Removes the files of a checkpoint, and then the folder if it is empty.

    The metadata is removed first, so that the remaining files are not mistaken for a checkpoint.
    """
    with suppress(OSError):
        for name in sorted(filter(_OWN_FILE.fullmatch, os.listdir(folder)), key=lambda name: name != METADATA_FILE):
            os.unlink(folder / name)
        os.rmdir(folder)


class _Lock:
    """A file in `folder`, locked until `release` or the end of this process: other processes see that the folder is in use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        self._close = weakref.finalize(self, os.close, handle)
        detach_in_children(self)
        _locks.add(self)
        with suppress(OSError):  # a file system without locks: then no draft is ever considered abandoned
            fcntl.flock(handle, fcntl.LOCK_EX)

    def release(self) -> None:
        """Removes the file and unlocks it."""
        (self.folder / _LOCK).unlink(missing_ok=True)
        self._close()
        _locks.discard(self)

    def detach(self) -> None:
        """In a forked child: closes its copy of the handle, which would keep the file locked after the parent has ended."""
        self._close()


_locks: weakref.WeakSet[_Lock] = weakref.WeakSet()
"""The locks of this process. A pipeline that failed during a save may have left one, which must not stop the next save."""


def _is_locked(folder: Path) -> bool | None:
    """Whether a living process has locked it; None if the file system does not support locks."""
    try:
        handle = os.open(folder / _LOCK, os.O_RDWR)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    else:
        return False
    finally:
        os.close(handle)


def _refuse_second_process(path: Path) -> None:
    locked_here = {lock.folder for lock in _locks}
    for left in _drafts(path):
        if left not in locked_here and _is_locked(left):
            message = "another process is writing a checkpoint to {path} now, in {left}"
            raise InputError(
                message, path=str(path), left=left.name, remedy="give each job a path of its own, and save there after it has ended"
            )


def _sync(folder: Path) -> None:
    """Flushes the folder's list of files to disk before it returns."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
