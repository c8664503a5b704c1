"""Figures of schedules as a table, JSON, pages and pictures: time, bubble, memory, messages, and idle time by cause."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import le

from zerobubble.cli.inputs.options import PictureFiles
from zerobubble.cli.inputs.schedule_and_costs import Costed
from zerobubble.explain import Causes, Idle, attribute
from zerobubble.export.png import write_picture
from zerobubble.export.svg import period_caption, timeline_svg
from zerobubble.ir import Schedule
from zerobubble.kinds import SENT_BETWEEN_STAGES
from zerobubble.lowering.messages import messages_of
from zerobubble.simulation import metrics, peak_memory
from zerobubble.timeline import Timeline
from zerobubble.units import counted, listed, ms, show_bytes, show_ms, show_percent
from zerobubble.verify import checked
from zerobubble.view import Viewed, comparison_html
from zerobubble.whole_files import write_text

NOTE = (
    "Makespan: from the first start to the last end over all ranks. Period: time per step over consecutive steps. "
    "Bubble: the idle fraction of that time. Peak memory: {unit} held by a rank, from the least to the most over all ranks. "
    "{causes}: idle time by cause, which adds up to the makespan's bubble."
)


@dataclass(frozen=True)
class Evaluation:
    """A simulated schedule: its timeline, its idle time in the makespan, peak bytes per rank, and messages between ranks.

    `copies` are the ns that copies to the host and back add to the makespan, which are idle time of each rank.
    """

    costed: Costed
    timeline: Timeline
    idle: Idle
    peaks: tuple[int, ...]
    messages: int
    copies: int = 0

    @property
    def caption(self) -> str:
        """The period, the makespan and their bubbles."""
        return period_caption(self.timeline, self.costed.period)

    @property
    def peak_microbatches(self) -> list[float]:
        """The peak memory of the ranks in microbatches."""
        return self.costed.in_microbatches(self.peaks)

    def idle_by(self, cause: str) -> int:
        """Returns the total idle time of all ranks by this cause, in ns."""
        if cause == COPIES:
            return self.copies * self.costed.schedule.num_ranks
        time: int = getattr(self.idle.overall, cause)
        return time


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table: `value` compares schedules (less is better), and `text` is shown."""

    title: str
    value: Callable[[Evaluation], float]
    text: Callable[[Evaluation], str]


@dataclass(frozen=True, slots=True)
class TableCell:
    """A cell of the table; `best` if no other schedule has less and some have more."""

    text: str
    best: bool


def evaluate(costed: Costed) -> Evaluation:
    """Simulates a schedule under its costs; raises as `simulate` does."""
    schedule, costs = costed.schedule, costed.costs
    timeline = costed.timeline
    graph, _ = checked(schedule)
    # Collectives of a divided head have other sizes, so they do not count as messages.
    messages = sum(message.value.value_kind in SENT_BETWEEN_STAGES for message in messages_of(graph, schedule.num_stages))
    idle = attribute(schedule, costs)
    if costed.link is None:
        return Evaluation(costed, timeline, idle, peak_memory(schedule, costs), messages)
    peaks = tuple(plan.peak_bytes for plan in costed.offloads)
    return Evaluation(costed, timeline, idle, peaks, messages, timeline.makespan - metrics(schedule, costs).makespan)


def time_and_memory_columns(in_bytes: bool, message_bytes: int | None) -> list[Column]:
    """Returns the columns of time, memory and messages, with the bytes sent if the size of a message is known."""
    columns = [
        Column("period", lambda e: e.costed.period, lambda e: show_ms(e.costed.period)),
        Column("its bubble", _bubble_of_period, lambda e: show_percent(_bubble_of_period(e))),
        Column("makespan", lambda e: e.timeline.makespan, lambda e: show_ms(e.timeline.makespan)),
        Column("its bubble", lambda e: e.timeline.bubble_makespan, lambda e: show_percent(e.timeline.bubble_makespan)),
        _peak_column(in_bytes),
        Column("messages", lambda e: e.messages, lambda e: f"{e.messages:,}"),
    ]
    if message_bytes is not None:
        columns.append(Column("bytes sent", lambda e: e.messages, lambda e: show_bytes(e.messages * message_bytes)))
    return columns


def _bubble_of_period(evaluation: Evaluation) -> float:
    return evaluation.timeline.bubble_at(evaluation.costed.period)


COPIES = "copies"
CAUSES = (*Causes._fields, COPIES)
"""Causes of idle time; the last two are for sums over replicas, and for copies to the host and back."""


def causes_of(evaluations: Sequence[Evaluation]) -> tuple[str, ...]:
    """Returns the causes of idle time that these schedules may have."""
    absent = {
        CAUSES[-2]: not any(evaluation.timeline.reductions for evaluation in evaluations),
        COPIES: not any(evaluation.costed.link for evaluation in evaluations),
    }
    return tuple(cause for cause in CAUSES if not absent.get(cause))


def idle_columns(causes: Sequence[str]) -> list[Column]:
    """Returns columns with the idle fraction by each of `causes`. They add up to the bubble of the makespan."""
    return [_idle_column(cause) for cause in causes]


def _idle_column(cause: str) -> Column:
    def share(evaluation: Evaluation) -> float:
        return evaluation.idle_by(cause) / max(1, evaluation.timeline.num_ranks * evaluation.timeline.makespan)

    return Column(cause, share, lambda evaluation: show_percent(share(evaluation)))


def _peak_column(in_bytes: bool) -> Column:
    def text(evaluation: Evaluation) -> str:
        if in_bytes:
            least, most = (show_bytes(end(evaluation.peaks)) for end in (min, max))
        else:
            least, most = (f"{end(evaluation.peak_microbatches):.4g}" for end in (min, max))
        return least if least == most else f"{least} to {most}"

    return Column("peak memory", lambda evaluation: max(evaluation.peaks if in_bytes else evaluation.peak_microbatches), text)


def table_rows(evaluations: Sequence[Evaluation], columns: Sequence[Column]) -> list[list[TableCell]]:
    """Returns a row of cells per schedule, with the best of each column marked."""
    values = [[column.value(evaluation) for evaluation in evaluations] for column in columns]
    return [
        [TableCell(column.text(evaluation), min(v) == v[row] < max(v)) for column, v in zip(columns, values, strict=True)]
        for row, evaluation in enumerate(evaluations)
    ]


def evaluation_to_dict(evaluation: Evaluation, message_bytes: int | None) -> dict[str, object]:
    """Returns the figures of one schedule: times in ms, and bytes if they are real."""
    timeline, causes = evaluation.timeline, CAUSES if evaluation.costed.link else Causes._fields
    peak_bytes = {"peak_bytes": max(evaluation.peaks), "peak_bytes_per_rank": list(evaluation.peaks)} if evaluation.costed.in_bytes else {}
    sent = {} if message_bytes is None else {"sent_bytes": evaluation.messages * message_bytes}
    return {
        "name": evaluation.costed.schedule.name,
        "num_stages": evaluation.costed.schedule.num_stages,
        **figures_to_dict(evaluation.costed, timeline),
        "peak_microbatches": max(evaluation.peak_microbatches),
        "peak_microbatches_per_rank": evaluation.peak_microbatches,
        **peak_bytes,
        "messages": evaluation.messages,
        **sent,
        "idle_ms": {cause: ms(evaluation.idle_by(cause)) for cause in causes},
        "idle_ms_per_rank": [
            {cause: ms(evaluation.copies if cause == COPIES else getattr(rank, cause)) for cause in causes}
            for rank in evaluation.idle.ranks
        ],
    }


def figures_to_dict(costed: Costed, timeline: Timeline) -> dict[str, object]:
    """Returns the source of the costs, the times of a step in ms, and its bubbles."""
    return {
        "costs": costed.source,
        "period_ms": ms(costed.period),
        "makespan_ms": ms(timeline.makespan),
        "span_ms": ms(timeline.span),
        "bubble_makespan": timeline.bubble_makespan,
        "bubble_span": timeline.bubble_span,
    }


def describe_shape(schedule: Schedule) -> str:
    """Describes a schedule: `4 ranks, 8 stages, 12 microbatches`."""
    parts = ((schedule.num_ranks, "rank"), (schedule.num_stages, "stage"), (schedule.whole_microbatches, "microbatch"))
    slices = f" of {schedule.slices} slices" if schedule.slices > 1 else ""
    return ", ".join(counted(count, noun) for count, noun in parts) + slices


def described(costed: Costed) -> str:
    """Describes a schedule with its costs, as the title of its picture."""
    return f"{costed.schedule.name}: {describe_shape(costed.schedule)}, {costed.source}"


def column_groups(evaluations: Sequence[Evaluation], message_bytes: int | None = None) -> tuple[list[Column], list[Column]]:
    """Returns the columns of time and memory, and those of idle time by cause."""
    return time_and_memory_columns(evaluations[0].costed.in_bytes, message_bytes), idle_columns(causes_of(evaluations))


def note_of(evaluations: Sequence[Evaluation]) -> str:
    """Explains the columns."""
    causes = causes_of(evaluations)
    star = "* best of its column. " if len(evaluations) > 1 else ""
    return star + NOTE.format(unit="bytes" if evaluations[0].costed.in_bytes else "microbatches", causes=listed(causes).capitalize())


def title_of(evaluations: Sequence[Evaluation]) -> str:
    """Describes the shape and the costs that all have in common."""
    first = evaluations[0]
    return f"{first.costed.schedule.num_ranks} ranks, {first.costed.schedule.whole_microbatches} microbatches, {first.costed.source}"


def write_page(file: str, evaluations: Sequence[Evaluation], message_bytes: int | None = None, sections: Sequence[str] = ()) -> None:
    """Writes the page with figures and timelines, and `sections` of HTML below them."""
    columns = [column for group in column_groups(evaluations, message_bytes) for column in group]
    rows = [[marked(cell) for cell in row] for row in table_rows(evaluations, columns)]
    titles, viewed = [column.title for column in columns], list(map(viewed_of, evaluations))
    periods = [evaluation.costed.period for evaluation in evaluations]
    write_text(file, comparison_html(title_of(evaluations), titles, rows, viewed, note_of(evaluations), sections, periods))


def viewed_of(evaluation: Evaluation) -> Viewed:
    """Returns the timeline with its messages, and its memory in bytes or microbatches.

    Limits that never bind are left out, so that the scale fits the memory held.
    """
    costed = evaluation.costed
    unit = () if costed.in_bytes else costed.microbatch_bytes
    most = [costed.schedule.whole_microbatches * size for size in costed.microbatch_bytes]
    limits = costed.limits if any(map(le, costed.limits, most)) else ()
    return Viewed(
        evaluation.timeline,
        costed.costs,
        limits=limits,
        constant_bytes=costed.constant_bytes,
        microbatch_bytes=unit,
        caption=evaluation.caption,
    )


def svg_of(evaluations: Sequence[Evaluation]) -> str:
    """Returns the timelines as one picture."""
    captions = [evaluation.caption for evaluation in evaluations]
    return timeline_svg(*(evaluation.timeline for evaluation in evaluations), title=title_of(evaluations), captions=captions)


def write_pictures(pictures: PictureFiles, evaluations: Sequence[Evaluation], message_bytes: int | None = None) -> None:
    """Writes the pictures that are asked for."""
    if pictures.svg is not None:
        write_picture(pictures.svg, svg_of(evaluations))
    if pictures.html is not None:
        write_page(pictures.html, evaluations, message_bytes)


def marked(cell: TableCell) -> str:
    """Returns the text of a cell, with a star if it is the best of its column."""
    return cell.text + ("*" if cell.best else "\N{NO-BREAK SPACE}")
