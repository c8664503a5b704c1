"""Where in a schedule's file a fault is: its row, with a mark under the pass."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zerobubble.errors import Fault
from zerobubble.ir import Op, Schedule

AROUND = 4
"""Passes shown on either side of a mark."""

_PASS = re.compile(r"[0-9]+[A-Z]+[0-9]+")
_ROW = re.compile(r"\s*rank\s+[0-9]+\s*:")


@dataclass(frozen=True, slots=True)
class SourceRow:
    """One rank's row as it was written: where it stands, the line, and first and last column (exclusive) of each pass in it."""

    label: str
    line: str
    passes: tuple[tuple[int, int], ...]


def source_rows(text: str, schedule: Schedule) -> list[SourceRow]:
    """The rows of `schedule` in its file's `text`; in the text form where the file (JSON) has no line for each rank."""
    rows = list(_rows(text.removeprefix("\ufeff").rstrip().split("\n")))
    if [len(row.passes) for row in rows] == [len(row) for row in schedule.rows]:
        return rows
    written = _rows(schedule.to_text().split("\n"))
    return [SourceRow(row.line.partition(":")[0], row.line, row.passes) for row in written]


def _rows(lines: Sequence[str]) -> Iterator[SourceRow]:
    """The lines that start with their rank, or else (CSV) all of them."""
    labelled = any(map(_ROW.match, lines))
    for number, line in enumerate(lines, 1):
        start = _ROW.match(line)
        if start or not labelled:
            found = _PASS.finditer(line.partition("#")[0], start.end() if start else 0)
            yield SourceRow(f"line {number}", line, tuple(match.span() for match in found))


def excerpt(fault: Fault, rows: Sequence[SourceRow], schedule: Schedule) -> str:
    """The passes around a fault with carets under those it is about, two lines; empty for a fault of no single rank."""
    if fault.rank is None:
        return ""
    row = rows[fault.rank]
    marked = _marked(fault, schedule)
    centre = marked[0] if marked else len(row.passes)
    near = [number for number in range(len(row.passes)) if abs(number - centre) <= AROUND]
    first, last = (row.passes[near[0]][0], row.passes[near[-1]][1]) if near else (0, len(row.line))
    carets = [row.passes[number] for number in marked if number in near] or [(last + 1, last + 2)]
    before, after = ("… " if near and near[0] > 0 else ""), (" …" if near and near[-1] + 1 < len(row.passes) else "")
    under = "".join("^" if any(start <= at < end for start, end in carets) else " " for at in range(first, carets[-1][1]))
    gutter = " " * len(row.label)
    return f"  {row.label} | {before}{row.line[first:last]}{after}\n  {gutter} | {' ' * len(before)}{under}"


def _marked(fault: Fault, schedule: Schedule) -> list[int]:
    """The positions a fault is about: its own, or those of the passes that the missing one belongs with; none marks the row's end."""
    if fault.position is not None:
        return [fault.position]
    if fault.rank is None or fault.op is None:
        return []
    _, stage, microbatch = Op.parse(fault.op.partition(" ")[0])
    return [position for position, op in enumerate(schedule.rows[fault.rank]) if (op.stage, op.microbatch) == (stage, microbatch)]
