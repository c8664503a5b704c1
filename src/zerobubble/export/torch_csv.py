"""PyTorch's compute-only schedule CSV: a row per rank, a cell per pass, no header and no idle cells.

PyTorch writes `<stage><letter><microbatch>` with I for our B and B for our BW; F and W are the same. This mapping is written
here and nowhere else.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from zerobubble.errors import InputError, ParseError
from zerobubble.ir import Kind, Op, Placement, Schedule

_LETTER = {Kind.F: "F", Kind.B: "I", Kind.W: "W", Kind.BW: "B"}
_KIND = {letter: kind for kind, letter in _LETTER.items()}
_CELL = re.compile(r"([0-9]{1,9})([FIWB])([0-9]{1,9})")
_MESSAGE_CELL = re.compile(r"[0-9]+(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)[0-9]*")
_FIRST_CELL = re.compile(r"\s*(\(|[0-9]+[A-Z_]+[0-9]*\s*(,|\n|$))")

Row = tuple[Op, ...]


def to_torch_csv(schedule: Schedule) -> str:
    """The CSV of `schedule`, which PyTorch's `_load_csv` reads with format `compute_only`.

    Raises `InputError` for a placement with several routes: PyTorch keeps one copy of each stage.
    """
    routes = len(schedule.placement.routes)
    if routes > 1:
        raise InputError(f"schedule {schedule.name!r} has {routes} routes, PyTorch's CSV can hold one; use the text or JSON form")
    return "".join(",".join(_cell(op) for op in row) + "\n" for row in schedule.rows)


def _cell(op: Op) -> str:
    return f"{op.stage}{_LETTER[op.kind]}{op.microbatch}"


def looks_like_torch_csv(text: str) -> bool:
    """Whether `text` starts with a cell of PyTorch's schedule CSV."""
    return _FIRST_CELL.match(text) is not None


def from_torch_csv(text: str, name: str = "unnamed") -> Schedule:
    """The schedule in PyTorch's compute-only CSV `text`; empty cells are skipped.

    The CSV tells neither the placement nor the number of microbatches. Each stage lives on the rank that runs most of its
    passes (so that `schedule_faults` can name the others), recognised as linear, looped or vee where it is one; microbatches
    count from 0 to the largest seen. Raises `ParseError` naming line and cell for anything else than a compute cell, a row
    without passes, and a stage or microbatch that no cell names although a larger one appears.
    """
    lines = text.removeprefix("\ufeff").rstrip().split("\n")
    rows = tuple(_parse_row(number, line) for number, line in enumerate(lines, 1))
    _require_all("stage", [op.stage for row in rows for op in row])
    num_microbatches = _require_all("microbatch", [op.microbatch for row in rows for op in row])
    return Schedule(name, _infer_placement(rows), num_microbatches, rows)


def _parse_row(number: int, line: str) -> Row:
    row = tuple(_parse_cells(number, line))
    if not row:
        raise ParseError(f"line {number}: this rank has no pass; the CSV has one row per rank and every rank holds a stage")
    return row


def _parse_cells(number: int, line: str) -> Iterator[Op]:
    for place, cell in enumerate(map(str.strip, line.split(",")), 1):
        match = _CELL.fullmatch(cell)
        if match is not None:
            yield Op(_KIND[match[2]], int(match[1]), int(match[3]))
        elif cell:
            raise ParseError(f"line {number}, cell {place}: {_refusal(cell)}")


def _refusal(cell: str) -> str:
    if cell.endswith("OVERLAP_F_B"):
        return f"{cell!r} runs passes overlapped, which is not supported yet; write its passes as cells of their own"
    if _MESSAGE_CELL.fullmatch(cell):
        return f"{cell!r} is not a compute pass; write the CSV with PyTorch's format='compute_only'"
    return f"{cell!r} is not a pass; write <stage><letter><microbatch> with letter F, I, W or B, such as 0F3"


def _require_all(what: str, numbers: Sequence[int]) -> int:
    """How many there are, counted from 0; the numbers must not leave one out."""
    seen = set(numbers)
    largest = max(seen)
    if len(seen) <= largest:
        missing = next(number for number in range(largest) if number not in seen)
        raise ParseError(f"{what} {missing} has no pass on any rank, although {what} {largest} has: number them from 0 without gaps")
    return largest + 1


def _infer_placement(rows: Sequence[Row]) -> Placement:
    votes: dict[int, Counter[int]] = {}
    for rank, row in enumerate(rows):
        for op in row:
            votes.setdefault(op.stage, Counter())[rank] += 1
    homes = tuple(max(votes[stage], key=lambda rank: (votes[stage][rank], -rank)) for stage in range(len(votes)))
    ranks = len(rows)
    _require_homes(homes, rows)
    known = [Placement.linear(ranks), Placement.looped(ranks, max(1, len(homes) // ranks)), Placement.vee(ranks)]
    return next((placement for placement in known if placement.routes == (homes,)), Placement.custom(homes))


def _require_homes(homes: tuple[int, ...], rows: Sequence[Row]) -> None:
    for rank, row in enumerate(rows):
        if rank not in homes:
            stage = row[0].stage
            raise ParseError(
                f"line {rank + 1}: rank {rank} holds no stage: most passes of its stage {stage} are on rank {homes[stage]} (line "
                f"{homes[stage] + 1}); give each stage to one rank"
            )
