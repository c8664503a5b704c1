"""PyTorch's schedule CSV: one row per rank and one cell per step, without a header or idle cells.

This module writes the form with passes only and reads any form. `torch_comms` writes messages and weight operations, and `torch_check`
checks them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from zerobubble.arguments import takes
from zerobubble.errors import ParseError
from zerobubble.export.torch_cells import Cell, parse_cell, require_expressible, step_cell
from zerobubble.export.torch_check import check_comms, steps_of
from zerobubble.ir import Placement, Schedule, Step

_FIRST_CELL = re.compile(r"[\s,]*(\(|[0-9]+[A-Z_]+[0-9]*\s*(,|\n|$))")


@takes(schedule=Schedule)
def to_torch_csv(schedule: Schedule) -> str:
    """Return the CSV of `schedule` in format `compute_only` of PyTorch's `_load_csv`.

    Raises `InputError` for a schedule that PyTorch cannot run: one with several routes, or with forwards of the last stage out of order.
    """
    require_expressible(schedule)
    return "".join(",".join(map(step_cell, row)) + "\n" for row in schedule.steps)


def looks_like_torch_csv(text: str) -> bool:
    """Whether `text` starts with a cell of PyTorch's schedule CSV."""
    return _FIRST_CELL.match(text) is not None


@takes(text=str, name=str)
def from_torch_csv(text: str, name: str = "unnamed") -> Schedule:
    """Return the schedule `name` in PyTorch's CSV `text`, with or without messages and weight operations; empty cells are skipped.

    The CSV has neither the placement nor the number of microbatches. Each stage is placed on the rank that runs most of its passes, so that
    `schedule_faults` can report the others; the placement is recognized if it is linear, looped, vee or wave. Microbatches count from 0 to
    the largest one. Raises `ParseError` naming line and cell for an unknown cell, a row without passes, and a gap in the numbers of stages
    or microbatches. It also raises for missing or misplaced messages and weight operations of a legal schedule.
    """
    lines = text.removeprefix("\ufeff").rstrip().split("\n")
    cells = [dict(_parse_cells(number, line)) for number, line in enumerate(lines, 1)]
    rows = [_steps(number, row) for number, row in enumerate(cells, 1)]
    ops = [op for row in rows for step in row for op in step]
    _require_all("stage", [op.stage for op in ops])
    num_microbatches = _require_all("microbatch", [op.microbatch for op in ops])
    schedule = Schedule.of_steps(name, inferred_placement(rows), num_microbatches, rows)
    check_comms(schedule, cells)
    return schedule


def _parse_cells(number: int, line: str) -> Iterator[tuple[int, Cell]]:
    """Yield the cells of a line with their positions."""
    for place, cell in enumerate(map(str.strip, line.split(",")), 1):
        try:
            if cell:
                yield place, parse_cell(cell)
        except ParseError as error:
            raise ParseError("line {number}, cell {place}: {reason}", number=number, place=place, reason=str(error)) from None


def _steps(number: int, cells: dict[int, Cell]) -> list[Step]:
    row = steps_of(cells)
    if not row:
        raise ParseError("line {line}: this rank has no pass; the CSV needs one row per rank and a stage on every rank", line=number)
    return row


def _require_all(what: str, numbers: Sequence[int]) -> int:
    """Return the count of numbers from 0 on; raises `ParseError` if one is missing."""
    seen = set(numbers)
    largest = max(seen)
    if len(seen) <= largest:
        missing = next(number for number in range(largest) if number not in seen)
        message = "{what} {missing} has no pass on any rank, although {what} {largest} has"
        remedy = "add the row that is missing, or number them from 0 without gaps"
        raise ParseError(message, what=what, missing=missing, largest=largest, remedy=remedy)
    return largest + 1


def inferred_placement(rows: Sequence[Sequence[Step]]) -> Placement:
    """Return the placement with each stage on the rank that runs most of its passes. Raises `ParseError` for a rank without a stage."""
    votes: dict[int, Counter[int]] = {}
    for rank, row in enumerate(rows):
        for op in (op for step in row for op in step):
            votes.setdefault(op.stage, Counter())[rank] += 1
    homes = tuple(max(votes[stage], key=lambda rank: (votes[stage][rank], -rank)) for stage in range(len(votes)))
    _require_homes(homes, rows)
    ranks = len(rows)
    loops = max(1, len(homes) // ranks)
    named = [Placement.linear(ranks), Placement.looped(ranks, loops), Placement.vee(ranks), Placement.wave(ranks, max(1, loops // 2))]
    return next((placement for placement in named if placement.routes == (homes,)), Placement.custom(homes))


def _require_homes(homes: tuple[int, ...], rows: Sequence[Sequence[Step]]) -> None:
    for rank, row in enumerate(rows):
        if rank not in homes:
            stage = row[0][0].stage
            raise ParseError(
                ("line {line}: rank {rank} has no stage: most passes of its stage {stage} are on rank {home} (line {home_line}); {remedy}"),
                line=rank + 1,
                rank=rank,
                stage=stage,
                home=homes[stage],
                home_line=homes[stage] + 1,
                remedy="give each stage to one rank",
            )
