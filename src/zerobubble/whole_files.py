"""Atomic writes of files, and reads with a size limit."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, Protocol

from zerobubble.errors import InputError, near, nearest

File = str | os.PathLike[str] | IO[Any]
"""A path, or an open file of text or bytes."""

PIECE_BYTES = 1 << 20

_PICTURES = frozenset((".svg", ".png", ".jpg", ".jpeg", ".webp", ".pdf", ".gif"))
"""The suffixes of pictures, including those of other programs."""

_WRITTEN_BY = {
    "config.json": "copy it from the folder of a model of Transformers",
    "layers.json": "`zerobubble split config.json -o layers.json` writes it",
    "plan.json": "`zerobubble plan` writes it with -o plan.json",
    "costs.json": "a training program writes it, as in docs/measure.md",
    "run.json": "a training program writes it, as in docs/measure.md",
    "plan.txt": "a training program writes it, as in docs/measure.md",
}
"""Where the files come from that the documentation names."""


class Readable(Protocol):
    """An open file of bytes."""

    def read(self, size: int, /) -> bytes:
        """Up to `size` bytes, none at the end."""


def unusable(verb: str, file: str | Path, error: OSError) -> InputError:
    """Returns the error of a `file` that cannot be read or written (`verb`), with the remedy."""
    return InputError(
        "cannot {verb} {file}: {reason}",
        verb=verb,
        file=str(file),
        reason=error.strerror or str(error),
        remedy=_remedy(verb, Path(file), error),
    )


def _remedy(verb: str, file: Path, error: OSError) -> str:
    if isinstance(error, IsADirectoryError):
        return "give the path of a file"
    if not isinstance(error, FileNotFoundError):
        return ""
    if not file.parent.is_dir():
        return f"there is no folder {file.parent}" + (", so make it first" if verb == "write" else "")
    hint = near(file.name, os.listdir(file.parent)).rstrip()
    source = f"{_WRITTEN_BY[file.name]}; or " if verb == "read" and file.name in _WRITTEN_BY else ""
    return hint or f"{source}check the name in {file.parent.resolve()}"


def name_of(file: File) -> str:
    """Return the name of a file in messages; an open file may have none."""
    return os.fspath(file) if isinstance(file, str | os.PathLike) else str(getattr(file, "name", "unnamed"))


def read_text(file: File) -> str:
    """Return the text of a path or an open file. Raises `InputError` with its name if it cannot be read or is not UTF-8 text."""
    try:
        data = Path(file).read_bytes() if isinstance(file, str | os.PathLike) else file.read()
        return data if isinstance(data, str) else bytes(data).decode()
    except OSError as error:
        raise unusable("read", name_of(file), error) from error
    except UnicodeDecodeError as error:
        raise InputError("cannot read {file}: it is not UTF-8 text", file=name_of(file)) from error
    except ValueError as error:
        raise InputError("cannot read {file!r}: {reason}", file=name_of(file), reason=str(error)) from error


def write_text(file: File, text: str) -> None:
    """Write `file` atomically: it has either all of `text` or its old contents. Raises `InputError` if it cannot be written.

    If `file` is a link, its target is written and the link stays. Devices, pipes such as `/dev/stdout` and open files are written directly.
    """
    if isinstance(file, str | os.PathLike):
        write_bytes(os.fspath(file), text.encode())
        return
    try:
        try:
            file.write(text)
        except TypeError:  # opened for bytes
            file.write(text.encode())
    except OSError as error:
        raise unusable("write", name_of(file), error) from error


def write_bytes(file: str | Path, data: bytes) -> None:
    """Write `file` atomically, like `write_text`."""
    with _refusing(file):
        target = Path(file)
        if target.exists() and not target.is_file():
            target.write_bytes(data)
            return
        target = Path(os.path.realpath(target))
    _replace(target, data)


def replace_text(file: str | Path, text: str) -> None:
    """Write `file` atomically like `write_text`, but replace a link, device or pipe instead of writing through it."""
    _replace(Path(file), text.encode())


def _replace(target: Path, data: bytes) -> None:
    with _refusing(target):
        handle, draft = _draft_of(target)
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(data)
        os.chmod(draft, 0o666 & ~_umask())
        os.replace(draft, target)
    except (OSError, ValueError) as error:
        Path(draft).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise unusable("write", target, error) from error
        raise InputError("cannot write {file}: {reason}", file=str(target), reason=str(error)) from error


def require_suffix(file: str | Path, *suffixes: str) -> None:
    """Raise `InputError` if a file to write has a suffix other than `suffixes`. The remedy has the suffixes that are near or alike."""
    ending = Path(file).suffix.lower()
    if not ending or ending in suffixes:
        return
    pictures = [suffix for suffix in suffixes if {suffix, ending} <= _PICTURES]
    close = nearest(ending, suffixes)
    meant = pictures or ([close] if close else suffixes)
    *others, last = [str(Path(file).with_suffix(suffix)) for suffix in meant]
    rest = f" (known are {', '.join(suffixes)})" if len(meant) < len(suffixes) else ""
    raise InputError(
        "{file} would not be a {file_type} file",
        file=str(file),
        file_type=ending[1:],
        remedy=f"name it {', '.join(others)}{' or ' if others else ''}{last}{rest}",
    )


def require_writable(file: str | Path) -> None:
    """Raise as `write_text` would if `file` cannot be written, for commands that compute for long before they write."""
    with _refusing(file):
        target = Path(file)
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not target.exists() or target.is_file():
            handle, draft = _draft_of(Path(os.path.realpath(target)))
            os.close(handle)
            os.unlink(draft)


def _draft_of(target: Path) -> tuple[int, str]:
    return tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")


@contextmanager
def _refusing(file: str | Path) -> Iterator[None]:
    """Raise `InputError` with the name of the file if it cannot be opened for writing."""
    if not os.fspath(file):
        raise InputError("cannot write a file with an empty name", remedy="give its path")
    try:
        yield
    except OSError as error:
        raise unusable("write", file, error) from error
    except ValueError as error:
        raise InputError("cannot write {file!r}: {reason}", file=str(file), reason=str(error)) from error


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


@contextmanager
def opened_regular(file: str | Path) -> Iterator[BufferedReader]:
    """Open a file for reading. Raises `InputError` with its name if it cannot be read, or is not a regular file.

    A pipe or a device may never end, or make its reader wait for ever.
    """
    try:
        handle = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        with os.fdopen(handle, "rb") as opened:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise InputError("cannot read {file}: it is not a regular file", file=str(file), remedy="remove it, or name another file")
            yield opened
    except OSError as error:
        raise unusable("read", file, error) from error
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError("cannot read {file!r}: {reason}", file=str(file), reason=str(error)) from error


def read_whole(opened: Readable, most: int) -> bytearray | None:
    """Return all bytes of an open file, or None if there are more than `most`.

    The file is read in pieces, so that memory grows with its contents. A single read of `most` bytes would allocate all of them, and a
    small compressed file may decompress to any length.
    """
    data = bytearray()
    while piece := opened.read(PIECE_BYTES):
        data += piece
        if len(data) > most:
            return None
    return data
