"""PyTorch's schedule CSV: a row per rank, a cell per step, no header and no idle cells. Written with passes alone, read in any form.

The forms with messages and weights are written in `torch_comms` and judged in `torch_check`.
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
    """The CSV of `schedule`, which PyTorch's `_load_csv` reads with format `compute_only`.

    Raises `InputError` for a schedule that PyTorch cannot play: several routes, or a last stage with its forwards out of order.
    """
    require_expressible(schedule)
    return "".join(",".join(map(step_cell, row)) + "\n" for row in schedule.steps)


def looks_like_torch_csv(text: str) -> bool:
    """Whether `text` starts with a cell of PyTorch's schedule CSV."""
    return _FIRST_CELL.match(text) is not None


@takes(text=str, name=str)
def from_torch_csv(text: str, name: str = "unnamed") -> Schedule:
    """The schedule in PyTorch's CSV `text`, with passes alone or with messages and weights too; empty cells are skipped.

    The CSV tells neither the placement nor the number of microbatches. Each stage lives on the rank that runs most of its
    passes (so that `schedule_faults` can name the others), recognised as linear, looped, vee or wave where it is one; microbatches
    count from 0 to the largest seen. Raises `ParseError` naming line and cell for a cell that is none of PyTorch's, a row without
    passes, a stage or microbatch that no pass names although a larger one appears, and where a legal schedule has messages or
    cells for weights, for one that is missing or out of order.
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
    """The cells of a line by their place in it."""
    for place, cell in enumerate(map(str.strip, line.split(",")), 1):
        try:
            if cell:
                yield place, parse_cell(cell)
        except ParseError as error:
            raise ParseError(f"line {number}, cell {place}: {error}") from None


def _steps(number: int, cells: dict[int, Cell]) -> list[Step]:
    row = steps_of(cells)
    if not row:
        raise ParseError(f"line {number}: this rank has no pass; the CSV has one row per rank and every rank holds a stage")
    return row


def _require_all(what: str, numbers: Sequence[int]) -> int:
    """How many there are, counted from 0; the numbers must not leave one out."""
    seen = set(numbers)
    largest = max(seen)
    if len(seen) <= largest:
        missing = next(number for number in range(largest) if number not in seen)
        raise ParseError(f"{what} {missing} has no pass on any rank, although {what} {largest} has: number them from 0 without gaps")
    return largest + 1


def inferred_placement(rows: Sequence[Sequence[Step]]) -> Placement:
    """Where stages live: each on the rank that runs most of its passes. Raises `ParseError` for a rank that is left without a stage."""
    votes: dict[int, Counter[int]] = {}
    for rank, row in enumerate(rows):
        for op in (op for step in row for op in step):
            votes.setdefault(op.stage, Counter())[rank] += 1
    homes = tuple(max(votes[stage], key=lambda rank: (votes[stage][rank], -rank)) for stage in range(len(votes)))
    _require_homes(homes, rows)
    ranks = len(rows)
    loops = max(1, len(homes) // ranks)
    known = [Placement.linear(ranks), Placement.looped(ranks, loops), Placement.vee(ranks), Placement.wave(ranks, max(1, loops // 2))]
    return next((placement for placement in known if placement.routes == (homes,)), Placement.custom(homes))


def _require_homes(homes: tuple[int, ...], rows: Sequence[Sequence[Step]]) -> None:
    for rank, row in enumerate(rows):
        if rank not in homes:
            stage = row[0][0].stage
            raise ParseError(
                f"line {rank + 1}: rank {rank} holds no stage: most passes of its stage {stage} are on rank {homes[stage]} (line "
                f"{homes[stage] + 1}); give each stage to one rank"
            )
