"""Tables of plans: figures in columns, followed by the reasons."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from textwrap import fill
from typing import NamedTuple

NOTE_WIDTH = 118
"""Width of the notes under a table, in columns."""

RECOMPUTE = " Recomputed forwards count as idle."
SPLIT = " The time that splitting a backward pass adds counts as idle."
LEGEND = (
    "{title}: the time per step if {steps}. Bubble: its idle share. Bound: no schedule on the placement has a smaller bubble. Over bound: "
    "how much longer the {objective} is than with that bubble. Peak: microbatches held by a rank."
)
STEPS = {
    "period": "no global operation separates steps (with one, --objective makespan)",
    "makespan": "a global operation separates steps (without one, --objective period)",
}
"""The meaning of the time per step, by objective."""

NOT_SEARCHED = "not searched, a first schedule that fits:"
NONE_SEARCHED = (
    " Nothing was searched: published schedules alone took {took:.2g} s. To search, give {enough} s or more (--budget, or seconds=). "
    "Each line is the best published schedule that fits, or runs microbatches one by one if none fits."
)
LEAST_SECONDS = 10
"""The least budget that is advised where nothing was searched."""


def titles(objective: str) -> tuple[str, ...]:
    """Returns the column titles of the table."""
    return "placement", objective, "bubble", "bound", "over bound", "peak", "messages", "schedule"


class Line(NamedTuple):
    """A row of the table: its figures, its note, and whether it was searched for or is proven optimal."""

    name: str
    cells: tuple[str, ...]
    note: str
    is_result: bool


def comparison_table(lines: Sequence[Line], objective: str, seconds: float, *, recompute: bool, fused: bool) -> str:
    """A row for each placement, results of a search before the rest, then the notes.

    The legend says how recomputed forwards count with `recompute`, how split backward passes count if a BW is shorter (`fused`), and, if
    nothing was searched, what took the `seconds` and what to give.
    """
    results, rest = [each for each in lines if each.is_result], [each for each in lines if not each.is_result]
    if lines[0] in rest:  # the winner is no result, so neither is anything else
        results, rest = list(lines), []
    head, *rows = aligned([titles(objective), *((each.name, *each.cells) for each in (*results, *rest))], left=(0, 7))
    between = ["", NOT_SEARCHED] if rest else []
    width = max(len(each.name) for each in lines)
    paragraphs = [fill(f"{each.name.ljust(width)}  {each.note}", NOTE_WIDTH, subsequent_indent=" " * (width + 2)) for each in lines]
    legend = LEGEND.format(title=objective.capitalize(), objective=objective, steps=STEPS[objective])
    legend += (RECOMPUTE if recompute else "") + (SPLIT if fused else "")
    none = NONE_SEARCHED.format(took=seconds, enough=max(LEAST_SECONDS, ceil(LEAST_SECONDS * seconds)))
    legend = fill(legend + ("" if lines[0].is_result else none), NOTE_WIDTH)
    return "\n".join([head, *rows[: len(results)], *between, *rows[len(results) :], "", legend, "", *paragraphs])


def aligned(rows: Sequence[Sequence[str]], left: Sequence[int]) -> list[str]:
    """The rows as lines of aligned columns: those in `left` left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    alignments = ["<" if i in left else ">" for i in range(len(widths))]
    return ["  ".join(map("{:{}{}}".format, row, alignments, widths)).rstrip() for row in rows]
