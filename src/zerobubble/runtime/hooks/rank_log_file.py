"""The log of this rank in a run folder: locked while the pipeline is open, and extended by whole lines or not at all."""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zerobubble.errors import InputError
from zerobubble.run_folder import END, RESERVED, log_name, to_line


@contextmanager
def writable(folder: str | os.PathLike[str]) -> Iterator[None]:
    """A context in which a folder that cannot be written, such as on a full disk, is an `InputError`."""
    try:
        yield
    except InputError:
        raise
    except OSError as error:
        message = "cannot record the run in {folder}: {cause}"
        raise InputError(message, folder=os.fspath(folder), cause=error.strerror or str(error), remedy="give another folder") from error
    except ValueError as error:  # a NUL byte in the name
        message = "cannot record the run in {folder!r}: {cause}"
        raise InputError(message, folder=os.fspath(folder), cause=str(error), remedy="give another folder") from error


class RankLogFile:
    """The log of `rank` in `folder`.

    Raises `OSError` if it cannot be written, and `InputError` if it is not a regular file or another process writes it.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        path = folder / log_name(rank)
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        self._reserved_at = -1
        try:
            if not stat.S_ISREG(os.fstat(self._handle).st_mode):
                raise InputError("cannot record the run in {file}: it is not a regular file", file=str(path), remedy="give another folder")
            if os.fstat(self._handle).st_nlink > 1:
                message = "cannot record the run in {file}: it is a link to a file that has another name, too"
                raise InputError(message, file=str(path), remedy="give another folder")
            self._lock(folder, rank)
        except BaseException:
            self.close()
            raise

    def _lock(self, folder: Path, rank: int) -> None:
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            message = "another pipeline records its rank {rank} in {folder}"
            remedy = "give each run, and each replica of a mesh, a folder of its own"
            raise InputError(message, rank=rank, folder=str(folder), remedy=remedy) from error

    def begin(self, line: str) -> None:
        """Appends the first line of this process, and space for the last."""
        size = os.fstat(self._handle).st_size
        is_whole = not size or os.pread(self._handle, 1, size - 1) == b"\n"
        start = "" if is_whole else "\n"  # the last line of a process that was killed stays by itself
        self.append(f"{start}{line}{' ' * (RESERVED - 1)}\n")
        self._reserved_at = os.fstat(self._handle).st_size - RESERVED

    def append(self, lines: str) -> None:
        """Appends whole lines. Raises `OSError` without a change if they cannot be written."""
        size = os.fstat(self._handle).st_size
        try:
            self._write(lines.encode(), size)
        except OSError:
            os.ftruncate(self._handle, size)
            raise

    def _write(self, data: bytes, place: int) -> None:
        while data:
            written = os.pwrite(self._handle, data, place)
            data, place = data[written:], place + written

    def end(self, failure: Mapping[str, Any] | None) -> None:
        """Appends the last line of this process, or writes it into its space, with a shorter message, if the disk is full."""
        now = time.time()
        try:
            self.append(to_line({END: failure, "at": now}))
        except OSError:
            line = to_line({END: failure, "at": now}).encode()
            while failure and len(line) > RESERVED:
                failure = {**failure, "message": failure["message"][: len(failure["message"]) // 2]}
                line = to_line({END: failure, "at": now}).encode()
            self._write(line.rstrip(b"\n").ljust(RESERVED - 1) + b"\n", self._reserved_at)

    def close(self) -> None:
        """Releases the lock."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)
