"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from zerobubble.errors import InputError


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
