"""Marks the rows of a divided head as this rank's part of one matrix, which checkpoints hold complete under its own name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

_MARK = "_zerobubble_head_rows"


@dataclass(frozen=True)
class HeadRows:
    """Marks a parameter as the rows from `first_row` on of a matrix with `num_rows` rows, called `name` in a checkpoint."""

    name: str
    first_row: int
    num_rows: int


def mark_head_rows(module: nn.Module, parameter: str, rows: HeadRows) -> None:
    """Marks a parameter of `module` itself, by its name there."""
    module.__dict__.setdefault(_MARK, {})[parameter] = rows


def head_rows(module: nn.Module) -> dict[str, HeadRows]:
    """Returns the marks in `module`, by the names of its parameters."""
    return dict(module.__dict__.get(_MARK, {}))


def names_of_heads(modules: Iterable[nn.Module]) -> list[str]:
    """Returns the checkpoint names of the heads of which these `modules` hold rows."""
    return [rows.name for module in modules for rows in head_rows(module).values()]
