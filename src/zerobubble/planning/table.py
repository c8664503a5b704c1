"""Plans in a table: figures in columns, and below them why each stands where it does."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill
from typing import NamedTuple

NOTE_WIDTH = 118
"""Columns of the notes under a table."""

AGAIN = " Forwards computed again count as idle."
LEGEND = (
    "Bubbles: the idle share of the longest span of a rank, and of the makespan. Bound: no schedule on the placement has a smaller bubble "
    "of the {objective}. Over bound: how much longer the {objective} is than with that bubble. Peak: microbatches held by a rank."
)

NOT_SEARCHED = "not searched, a first schedule that fits:"
NONE_SEARCHED = " Nothing was searched: each line is the best published schedule that fits."


def titles(objective: str) -> tuple[str, ...]:
    """What stands above the columns of the table, where plans were made for `objective`."""
    return "placement", "span bubble", "makespan bubble", f"{objective} bound", f"{objective} over bound", "peak", "messages", "schedule"


def percent(share: float) -> str:
    """A share with two decimals: plans differ by less than the one decimal of other figures."""
    return f"{100 * share:.2f} %"


class Line(NamedTuple):
    """A placement in the table: its figures, why it stands where it does, and whether it was searched for or is proven optimal."""

    name: str
    cells: tuple[str, ...]
    note: str
    is_result: bool


def comparison_table(lines: Sequence[Line], objective: str, *, again: bool) -> str:
    """A line of figures for each placement, the results of a search before what was not searched, then the notes.

    Where forwards may be computed `again`, the legend says how they count.
    """
    results, rest = [each for each in lines if each.is_result], [each for each in lines if not each.is_result]
    if lines[0] in rest:  # the winner is no result, so neither is anything else
        results, rest = list(lines), []
    head, *rows = aligned([titles(objective), *((each.name, *each.cells) for each in (*results, *rest))], left=(0, 7))
    between = ["", NOT_SEARCHED] if rest else []
    width = max(len(each.name) for each in lines)
    paragraphs = [fill(f"{each.name.ljust(width)}  {each.note}", NOTE_WIDTH, subsequent_indent=" " * (width + 2)) for each in lines]
    legend = LEGEND.format(objective=objective) + (AGAIN if again else "")
    legend = fill(legend + ("" if lines[0].is_result else NONE_SEARCHED), NOTE_WIDTH)
    return "\n".join([head, *rows[: len(results)], *between, *rows[len(results) :], "", legend, "", *paragraphs])


def aligned(rows: Sequence[Sequence[str]], left: Sequence[int]) -> list[str]:
    """The rows as lines of columns, those of `left` to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(_cell(text, widths[i], i in left) for i, text in enumerate(row)).rstrip() for row in rows]


def _cell(text: str, width: int, left: bool) -> str:
    return text.ljust(width) if left else text.rjust(width)
