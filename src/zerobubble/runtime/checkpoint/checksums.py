"""Checksums of the files of a checkpoint, computed while they are written and compared before anything is loaded.

`checksums.json` has the size and the CRC-32 of every other file, and a CRC-32 of its own.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed.checkpoint.filesystem import FileSystem

from zerobubble.errors import InputError, ParseError, parsed_json, reading

CHECKSUMS_FILE = "checksums.json"
METADATA_FILE = ".metadata"
"""torch's list of the tensors and where they are stored."""
_CHUNK_BYTES = 1 << 22


class Checksum(NamedTuple):
    """The size of a file in bytes, and its CRC-32."""

    num_bytes: int
    crc32: int


Checksums = dict[str, Checksum]
"""By file name."""


class SummedFiles(FileSystem):
    """The file access of torch, which also computes the checksums of files that it writes.

    `fault` is the last error of the system while writing, because the archives of torch raise an error of their own instead.
    """

    def __init__(self) -> None:
        self.checksums: Checksums = {}
        self.fault: OSError | None = None

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Opens a file for torch."""
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        try:
            with _SummedStream(path, self) as summed:
                yield summed
        except OSError as error:
            self.fault = error
            raise
        self.checksums[Path(path).name] = Checksum(summed.num_bytes, summed.crc32)

    def write_text(self, path: Path, text: str) -> None:
        """Writes a text file and syncs it."""
        with self.create_stream(path, "wb") as stream:
            stream.write(text.encode())
            stream.flush()
            os.fsync(stream.fileno())

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Renames a file that has been written."""
        super().rename(path, new_path)
        self.checksums[Path(new_path).name] = self.checksums.pop(Path(path).name)


class _SummedStream(BufferedWriter):
    """A new file, and the checksum of what has been written to it. Errors are recorded in `files`."""

    def __init__(self, path: str | os.PathLike[str], files: SummedFiles) -> None:
        super().__init__(FileIO(path, "w"))
        self.num_bytes = 0
        self.crc32 = 0
        self._files = files

    def write(self, data: Any) -> int:
        """Writes `data`. Archives are written from beginning to end, never with a seek."""
        self.crc32 = zlib.crc32(data, self.crc32)
        try:
            written = super().write(data)
        except OSError as error:
            self._files.fault = error
            raise
        self.num_bytes += written
        return written


def as_text(checksums: Mapping[str, Checksum]) -> str:
    """Returns the content of `checksums.json`."""
    files = {name: list(checksum) for name, checksum in sorted(checksums.items())}
    return json.dumps({"format": "zerobubble checksums 1", "files": files, "crc32": zlib.crc32(json.dumps(files).encode())}) + "\n"


def _read_checksums(folder: Path) -> Checksums:
    """Returns the checksums of the checkpoint in `folder`. Raises `InputError` if there are none, or if they are damaged."""
    file = folder / CHECKSUMS_FILE
    try:
        text = file.read_bytes().decode()
        data = parsed_json(text)
        with reading("checksums", data):
            checksums = {name: Checksum(*numbers) for name, numbers in data["files"].items()}
        is_whole = as_text(checksums) == text
    except FileNotFoundError:
        message, remedy = "{file} is missing: its folder is not a checkpoint of zb.save, or a damaged one", "give the path of a checkpoint"
        raise InputError(message, file=str(file), remedy=remedy) from None
    except OSError as error:
        raise InputError("{file} cannot be read: {reason}", file=str(file), reason=error.strerror) from error
    except (ParseError, UnicodeDecodeError, AttributeError):
        is_whole = False
    if not is_whole:
        raise _damaged(file, "its content does not match its own checksum")
    return checksums


def check(folder: Path, share: int, num_shares: int) -> None:
    """Compares one of `num_shares` shares of the files in `folder` with their checksums. Raises `InputError` for the first difference."""
    checksums = _read_checksums(folder)
    largest_first = sorted(checksums, key=lambda name: (-checksums[name].num_bytes, name))
    for name in largest_first[share::num_shares]:
        _check_file(folder / name, checksums[name])


def _check_file(file: Path, written: Checksum) -> None:
    try:
        current = _checksum_of(file, written.num_bytes)
    except FileNotFoundError:
        raise _damaged(file, "it is missing") from None
    except OSError as error:
        raise InputError("{file} cannot be read: {reason}", file=str(file), reason=error.strerror) from error
    if current.num_bytes != written.num_bytes:
        raise _damaged(file, f"it has {current.num_bytes:,} bytes and was written with {written.num_bytes:,}")
    if current != written:
        raise _damaged(file, f"its CRC-32 is {current.crc32:08x} and was {written.crc32:08x} when it was written")


def _checksum_of(file: Path, num_bytes: int) -> Checksum:
    """Returns the checksum of `file`; reads nothing if its size is not `num_bytes`."""
    with file.open("rb", buffering=0) as stream:
        size, crc32 = os.fstat(stream.fileno()).st_size, 0
        while size == num_bytes and (chunk := stream.read(_CHUNK_BYTES)):
            crc32 = zlib.crc32(chunk, crc32)
    return Checksum(size, crc32)


def _damaged(file: Path, reason: str) -> InputError:
    message, remedy = "the checkpoint is damaged in {file}: {reason}; {remedy}", "load another checkpoint, or restore this file from a copy"
    return InputError(message, file=str(file), reason=reason, remedy=remedy)


def identity(folder: Path) -> int:
    """Returns a number that differs between any two checkpoints: torch gives the metadata of each checkpoint its own id."""
    try:
        return zlib.crc32((folder / METADATA_FILE).read_bytes())
    except OSError as error:
        raise InputError("{file} cannot be read: {reason}", file=str(folder / METADATA_FILE), reason=error.strerror) from error
