"""Why a placement won or lost, in sentences, and the table of the competition."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from textwrap import fill
from typing import NamedTuple

from zerobubble.planning.problem.problem import Solved, Status

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


def can_beat(solved: Solved, best: Solved) -> bool:
    """Whether the bound of `solved` leaves room below the bubble of `best`; rates are compared to nine digits, times are rounded to ns."""
    return best.bubble is not None and round(solved.least_bubble, 9) < round(best.bubble, 9)


def notes(answers: Sequence[tuple[Solved, bool]]) -> list[str]:
    """For each answer, the best first and each with whether it was searched for, why it stands where it does."""
    best, *others = [solved for solved, _ in answers]
    rivals = [other for other in others if other.time is not None]
    unbeaten = bool(rivals) and not any(can_beat(other, best) for other in rivals)
    first = _note(*answers[0])
    if best.status is Status.OPTIMAL and unbeaten:
        first = first.replace(":", ", nor on any other tried:", 1)
    return [first, *(_note_against_winner(best, *answer) for answer in answers[1:])]


def _note_against_winner(best: Solved, solved: Solved, searched: bool) -> str:
    if solved.status is not Status.FEASIBLE or can_beat(solved, best) or best.bubble is None:
        return _note(solved, searched)
    if round(best.bubble, 9) == 0:
        return "nothing can beat the winner, which has no bubble"
    aim, least, winners = solved.problem.objective, percent(solved.least_bubble), percent(best.bubble)
    if least == winners:
        return f"cannot have a smaller {aim} bubble than the winner's {winners}: {solved.bound.reason}"
    return f"cannot have a {aim} bubble below {least}, the winner has {winners}: {solved.bound.reason}"


def _note(solved: Solved, searched: bool) -> str:
    if solved.gap is None:
        return f"nothing can run: {solved.reason}"
    if solved.status is Status.OPTIMAL:
        return f"nothing on this placement is shorter: {solved.bound.reason}"
    how = "the search ended with" if searched else "without a search it has"
    return f"{how} a {solved.problem.objective} {percent(solved.gap)} over its bound: {solved.bound.reason}"


def percent(share: float) -> str:
    """A share with two decimals: plans differ by less than the one decimal of other figures."""
    return f"{100 * share:.2f} %"


def table_row(name: str, solved: Solved) -> tuple[str, ...]:
    """The figures of one answer, under `titles`."""
    bound = percent(solved.least_bubble)
    if solved.timeline is None or solved.gap is None:
        return name, "–", "–", bound, "–", "–", "–", "nothing fits"
    over_bound = "optimal" if solved.status is Status.OPTIMAL else percent(solved.gap)
    rates = percent(solved.bubble_at(solved.timeline.span)), percent(solved.bubble_at(solved.timeline.makespan))
    return name, *rates, bound, over_bound, f"{solved.peak_microbatches:.4g}", f"{solved.problem.messages:,}", solved.how


class Told(NamedTuple):
    """A placement in the table: its answer, why it stands where it does, and whether the answer is one of a search or proven optimal."""

    name: str
    solved: Solved
    note: str
    is_result: bool


def comparison_table(choices: Iterable[Told]) -> str:
    """A line of figures for each placement, the results of a search before what was not searched, then the notes."""
    told = list(choices)
    results, rest = [each for each in told if each.is_result], [each for each in told if not each.is_result]
    if told[0] in rest:  # the winner is no result, so neither is anything else
        results, rest = told, []
    aim = told[0].solved.problem.objective
    head, *lines = aligned([titles(aim), *(table_row(each.name, each.solved) for each in (*results, *rest))], left=(0, 7))
    between = ["", NOT_SEARCHED] if rest else []
    width = max(len(each.name) for each in told)
    paragraphs = [fill(f"{each.name.ljust(width)}  {each.note}", NOTE_WIDTH, subsequent_indent=" " * (width + 2)) for each in told]
    legend = LEGEND.format(objective=aim) + ("" if told[0].solved.problem.recomputation is None else AGAIN)
    legend = fill(legend + ("" if told[0].is_result else NONE_SEARCHED), NOTE_WIDTH)
    return "\n".join([head, *lines[: len(results)], *between, *lines[len(results) :], "", legend, "", *paragraphs])


def aligned(rows: Sequence[Sequence[str]], left: Sequence[int]) -> list[str]:
    """The rows as lines of columns, those of `left` to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(_cell(text, widths[i], i in left) for i, text in enumerate(row)).rstrip() for row in rows]


def _cell(text: str, width: int, left: bool) -> str:
    return text.ljust(width) if left else text.rjust(width)
