"""Files that are written whole or not at all, and read within a limit."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Protocol

from zerobubble.errors import InputError

PIECE_BYTES = 1 << 20


class Readable(Protocol):
    """An open file of bytes."""

    def read(self, size: int, /) -> bytes:
        """Up to `size` bytes, none at the end."""


def write_text(file: str | Path, text: str) -> None:
    """Write `file` atomically: either it holds all of `text` or it is as before. Raises `InputError` when it cannot be written.

    A link stays, and what it leads to is written. So do devices and pipes such as `/dev/stdout`, which take the text as it comes.
    """
    if not os.fspath(file):
        raise InputError("cannot write a file whose name is empty: give its path")
    target = Path(file)
    try:
        if target.exists() and not target.is_file():
            target.write_text(text, encoding="utf-8", newline="")
            return
        target = Path(os.path.realpath(target))
        handle, draft = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        raise InputError(f"cannot write {file}: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"cannot write {str(file)!r}: {error}") from error
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as out:
            out.write(text)
        os.chmod(draft, 0o666 & ~_umask())
        os.replace(draft, target)
    except (OSError, ValueError) as error:
        Path(draft).unlink(missing_ok=True)
        raise InputError(f"cannot write {file}: {error.strerror if isinstance(error, OSError) else error}") from error


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def read_whole(opened: Readable, most: int) -> bytearray | None:
    """All bytes of an open file, or None if there are more than `most`.

    It reads in pieces, so that memory follows what the file has. To ask for `most` at once would take that much, and a small packed file
    may unpack to any length.
    """
    data = bytearray()
    while piece := opened.read(PIECE_BYTES):
        data += piece
        if len(data) > most:
            return None
    return data
