"""Why a placement won or lost, in sentences, and the table of the competition."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from textwrap import fill

from zerobubble.planning.problem import Problem, Solved, Status, microbatch_bytes
from zerobubble.planning.seeds import serial_schedule, split
from zerobubble.simulation import peak_memory

NOTE_WIDTH = 118
"""Columns of the notes under a table."""

TITLES = ("placement", "span bubble", "makespan bubble", "bound", "over bound", "peak", "messages", "schedule")

LEGEND = (
    "Bubbles: the idle share of the longest span of a rank, and of the makespan. Bound: no schedule on the placement has a smaller bubble "
    "of the {objective}. Over bound: how much longer the {objective} is than with that bubble. Peak: microbatches held by a rank."
)


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
    return f"cannot have a bubble below {percent(solved.least_bubble)}, the winner has {percent(best.bubble)}: {solved.bound.reason}"


def _note(solved: Solved, searched: bool) -> str:
    if solved.gap is None:
        return f"nothing can run: {solved.reason}"
    if solved.status is Status.OPTIMAL:
        return f"nothing on this placement is shorter: {solved.bound.reason}"
    how = "the search ended with" if searched else "without a search it has"
    if searched and (obstacle := split_shortage(solved.problem)):
        how = f"nothing was searched, since {obstacle}; it has"
    return f"{how} a {solved.problem.objective} {percent(solved.gap)} over its bound: {solved.bound.reason}"


def split_shortage(problem: Problem) -> str:
    """Why no schedule of the search fits, in all of which B and W are apart: B may leave W more than F saved; empty where one fits."""
    peaks = peak_memory(split(serial_schedule(problem.placement, 1)), problem.costs)
    sizes = microbatch_bytes(problem.placement, problem.costs)
    for rank, (peak, limit, whole) in enumerate(zip(peaks, problem.limits.memory, sizes, strict=True)):
        if peak > limit:
            takes = f"then takes the memory of {peak / whole:.4g} on rank {rank}"
            return f"the search runs W apart from B and one microbatch {takes}, which has room for {limit / whole:.4g}: raise its limit"
    return ""


def percent(share: float) -> str:
    """A share with two decimals: plans differ by less than the one decimal of other figures."""
    return f"{100 * share:.2f} %"


def table_row(name: str, solved: Solved) -> tuple[str, ...]:
    """The figures of one answer, under `TITLES`."""
    bound = percent(solved.least_bubble)
    if solved.timeline is None or solved.gap is None:
        return name, "–", "–", bound, "–", "–", "–", "nothing fits"
    over_bound = "optimal" if solved.status is Status.OPTIMAL else percent(solved.gap)
    rates = percent(solved.timeline.bubble_span), percent(solved.timeline.bubble_makespan)
    return name, *rates, bound, over_bound, f"{solved.peak_microbatches:.4g}", f"{solved.problem.messages:,}", solved.how


def comparison_table(choices: Iterable[tuple[str, Solved, str]]) -> str:
    """A line of figures for each (name, answer, note), then the notes."""
    listed = list(choices)
    lines = aligned([TITLES, *(table_row(name, solved) for name, solved, _ in listed)], left=(0, 7))
    width = max(len(name) for name, _, _ in listed)
    paragraphs = [fill(f"{name.ljust(width)}  {note}", NOTE_WIDTH, subsequent_indent=" " * (width + 2)) for name, _, note in listed]
    legend = fill(LEGEND.format(objective=listed[0][1].problem.objective), NOTE_WIDTH)
    return "\n".join([*lines, "", legend, "", *paragraphs])


def aligned(rows: Sequence[Sequence[str]], left: Sequence[int]) -> list[str]:
    """The rows as lines of columns, those of `left` to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(_cell(text, widths[i], i in left) for i, text in enumerate(row)).rstrip() for row in rows]


def _cell(text: str, width: int, left: bool) -> str:
    return text.ljust(width) if left else text.rjust(width)
