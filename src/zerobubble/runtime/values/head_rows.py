"""Rows of a divided head: marked as this rank's part of one matrix, which checkpoints hold whole under the name that it has there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

_MARK = "_zerobubble_head_rows"


@dataclass(frozen=True)
class HeadRows:
    """That a parameter is the rows from `first_row` on of one that has `num_rows` and is called `name` in a checkpoint."""

    name: str
    first_row: int
    num_rows: int


def mark_head_rows(module: nn.Module, parameter: str, rows: HeadRows) -> None:
    """Mark a parameter of `module` itself, by its name there."""
    module.__dict__.setdefault(_MARK, {})[parameter] = rows


def head_rows(module: nn.Module) -> dict[str, HeadRows]:
    """The marks in `module`, by the names of parameters there."""
    return dict(module.__dict__.get(_MARK, {}))


def names_of_heads(modules: Iterable[nn.Module]) -> list[str]:
    """The names that heads of which these `modules` have rows have in a checkpoint."""
    return [rows.name for module in modules for rows in head_rows(module).values()]
