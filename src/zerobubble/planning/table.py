"""Plans in a table: figures in columns, and below them why each stands where it does."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill
from typing import NamedTuple

NOTE_WIDTH = 118
"""Columns of the notes under a table."""

AGAIN = " Forwards computed again count as idle."
LEGEND = (
    "Step: the time per step if {steps}. Bubble: its idle share. Bound: no schedule on the placement has a smaller bubble. Over bound: how "
    "much longer a step is than with that bubble. Peak: microbatches held by a rank."
)
STEPS = {
    "period": "nothing global comes between steps (for ranks that meet, --objective makespan)",
    "makespan": "ranks meet before each (if nothing global comes between them, --objective period)",
}
"""What the time per step stands for, by the objective."""

NOT_SEARCHED = "not searched, a first schedule that fits:"
NONE_SEARCHED = " Nothing was searched: each line is the best published schedule that fits."


TITLES = ("placement", "step", "bubble", "bound", "over bound", "peak", "messages", "schedule")
"""What stands above the columns of the table."""


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
    head, *rows = aligned([TITLES, *((each.name, *each.cells) for each in (*results, *rest))], left=(0, 7))
    between = ["", NOT_SEARCHED] if rest else []
    width = max(len(each.name) for each in lines)
    paragraphs = [fill(f"{each.name.ljust(width)}  {each.note}", NOTE_WIDTH, subsequent_indent=" " * (width + 2)) for each in lines]
    legend = LEGEND.format(steps=STEPS[objective]) + (AGAIN if again else "")
    legend = fill(legend + ("" if lines[0].is_result else NONE_SEARCHED), NOTE_WIDTH)
    return "\n".join([head, *rows[: len(results)], *between, *rows[len(results) :], "", legend, "", *paragraphs])


def aligned(rows: Sequence[Sequence[str]], left: Sequence[int]) -> list[str]:
    """The rows as lines of columns, those of `left` to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(_cell(text, widths[i], i in left) for i, text in enumerate(row)).rstrip() for row in rows]


def _cell(text: str, width: int, left: bool) -> str:
    return text.ljust(width) if left else text.rjust(width)
