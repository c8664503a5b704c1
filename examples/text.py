"""Real text on every machine with Python: the source of its standard library, as bytes."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data"}
"""Folders that are not on every machine, or contain more tables than text."""
HELD_OUT_EVERY = 20
"""One in this many files is held out of training."""


@dataclass(frozen=True)
class Text:
    """Two runs of bytes: `train` to learn from, `held_out` to check on."""

    train: Tensor
    held_out: Tensor


def standard_library() -> Text:
    """Returns the modules of the standard library, ordered by path, so the same on every rank."""
    root = Path(sysconfig.get_path("stdlib"))
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    files = [(root / name).read_bytes() for name in names if not LEFT_OUT.intersection(name.split("/"))]
    held_out = files[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    del files[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    return Text(_tensor(files), _tensor(held_out))


def _tensor(files: list[bytes]) -> Tensor:
    return torch.frombuffer(bytearray(b"".join(files)), dtype=torch.uint8)


def batch(text: Tensor, sequences: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns (inputs, targets), each (sequences, length): random places in `text`, drawn from `seed`, and the bytes that follow."""
    random = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, text.numel() - length, (sequences, 1), generator=random)
    windows = text[starts + torch.arange(length + 1)].long()
    return windows[:, :-1], windows[:, 1:]
