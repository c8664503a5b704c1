"""The pages and pictures of schedules side by side, and the figures that stand above them."""

from __future__ import annotations

from collections.abc import Sequence
from operator import le

from zerobubble.cli.inputs.options import PictureFiles
from zerobubble.cli.outputs.evaluation import Cell, Column, Evaluation, causes_of, idle_columns, table_rows, time_and_memory_columns
from zerobubble.export.svg import timeline_svg
from zerobubble.view import Viewed, comparison_html
from zerobubble.whole_files import write_text

NOTE = (
    "* best of its column. Makespan: from the first start to the last end over all ranks. Longest span: the longest time from the first "
    "start to the last end of one rank. Bubble: the idle share of that time. Peak memory: {unit} held by a rank, from the rank that "
    "holds least to the one that holds most. {causes} are why ranks are idle; they add up to the "
    "makespan's bubble."
)


def column_groups(evaluations: Sequence[Evaluation], message_bytes: int | None = None) -> tuple[list[Column], list[Column]]:
    """The columns of time and memory, and those of idle time by its cause."""
    return time_and_memory_columns(evaluations[0].costed.in_bytes, message_bytes), idle_columns(causes_of(evaluations))


def note_of(evaluations: Sequence[Evaluation]) -> str:
    """What the columns mean."""
    causes = causes_of(evaluations)
    told = f"{', '.join(causes[:-1])} and {causes[-1]}".capitalize()
    return NOTE.format(unit="bytes" if evaluations[0].costed.in_bytes else "microbatches", causes=told)


def title_of(evaluations: Sequence[Evaluation]) -> str:
    """Shape and costs, which all have in common."""
    first = evaluations[0]
    return f"{first.schedule.num_ranks} ranks, {first.schedule.num_microbatches} microbatches, {first.costed.source}"


def write_page(file: str, evaluations: Sequence[Evaluation], message_bytes: int | None = None, sections: Sequence[str] = ()) -> None:
    """Write the page with figures and timelines, and `sections` of HTML below them."""
    columns = [column for group in column_groups(evaluations, message_bytes) for column in group]
    rows = [[marked(cell) for cell in row] for row in table_rows(evaluations, columns)]
    titles, viewed = [column.title for column in columns], list(map(viewed_of, evaluations))
    write_text(file, comparison_html(title_of(evaluations), titles, rows, viewed, note_of(evaluations), sections))


def viewed_of(evaluation: Evaluation) -> Viewed:
    """The timeline with its messages, and its memory in bytes, or in microbatches where bytes stand for these.

    Limits that no order of the passes reaches stand for none: they are left out, so that what is held can be seen.
    """
    costed = evaluation.costed
    unit = () if costed.in_bytes else costed.microbatch_bytes
    most = [costed.schedule.num_microbatches * size for size in costed.microbatch_bytes]
    limits = costed.limits if any(map(le, costed.limits, most)) else ()
    return Viewed(evaluation.timeline, costed.costs, limits=limits, layers=costed.layers, microbatch_bytes=unit)


def write_pictures(pictures: PictureFiles, evaluations: Sequence[Evaluation], message_bytes: int | None = None) -> None:
    """Write the files that are asked for."""
    if pictures.svg is not None:
        timelines = (evaluation.timeline for evaluation in evaluations)
        write_text(pictures.svg, timeline_svg(*timelines, title=title_of(evaluations)))
    if pictures.html is not None:
        write_page(pictures.html, evaluations, message_bytes)


def marked(cell: Cell) -> str:
    """The text of a cell, with a star where it is the best of its column."""
    return cell.text + ("*" if cell.best else "\N{NO-BREAK SPACE}")
