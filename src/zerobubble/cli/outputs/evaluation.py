"""What `compare` says of each schedule: time, bubble, memory, messages and idle time by cause, as cells of a table and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zerobubble.cli.inputs.schedule_and_costs import Costed
from zerobubble.explain import Causes, Idle, attribute
from zerobubble.ir import Schedule
from zerobubble.kinds import MOVES
from zerobubble.lowering.messages import messages_of
from zerobubble.simulation import metrics, peak_memory
from zerobubble.timeline import Timeline
from zerobubble.units import counted, ms, show_bytes, show_ms, show_percent
from zerobubble.verify import checked


@dataclass(frozen=True)
class Evaluation:
    """One schedule played: its timeline, its idle time against the makespan, peak bytes per rank and messages between ranks.

    `copies` is by how many ns copies to the host and back make the makespan longer, for which each rank is idle besides.
    """

    costed: Costed
    timeline: Timeline
    idle: Idle
    peaks: tuple[int, ...]
    messages: int
    copies: int = 0

    @property
    def schedule(self) -> Schedule:
        return self.costed.schedule

    @property
    def peak_microbatches(self) -> list[float]:
        """The peaks of the ranks, in microbatches."""
        return self.costed.in_microbatches(self.peaks)

    def idle_by(self, cause: str) -> int:
        """The idle time of all ranks together by that cause, in ns."""
        if cause == COPIES:
            return self.copies * self.schedule.num_ranks
        found: int = getattr(self.idle.overall, cause)
        return found


@dataclass(frozen=True, slots=True)
class Column:
    """A figure: `value` to rank schedules by (less is better) and `text` to show."""

    title: str
    value: Callable[[Evaluation], float]
    text: Callable[[Evaluation], str]


@dataclass(frozen=True, slots=True)
class Cell:
    """What stands in a table; `best` where no other schedule has less and some has more."""

    text: str
    best: bool


def evaluate(costed: Costed) -> Evaluation:
    """Everything that is said of a schedule under its costs; raises as `simulate` does."""
    schedule, costs = costed.schedule, costed.costs
    timeline = costed.timeline
    graph, _ = checked(schedule)
    # What passes of a divided head put together is of other sizes, so it does not count as a message here.
    messages = sum(message.value.value_kind in MOVES for message in messages_of(graph, schedule.num_stages))
    idle = attribute(schedule, costs)
    if costed.link is None:
        return Evaluation(costed, timeline, idle, peak_memory(schedule, costs), messages)
    peaks = tuple(plan.peak_bytes for plan in costed.offloads)
    return Evaluation(costed, timeline, idle, peaks, messages, timeline.makespan - metrics(schedule, costs).makespan)


def time_and_memory_columns(in_bytes: bool, message_bytes: int | None) -> list[Column]:
    """Time, memory (in bytes or in microbatches) and messages, with the bytes sent where the size of a message is known."""
    found = [
        Column("period", lambda e: e.costed.period, lambda e: show_ms(e.costed.period)),
        Column("its bubble", _bubble_of_period, lambda e: show_percent(_bubble_of_period(e))),
        Column("makespan", lambda e: e.timeline.makespan, lambda e: show_ms(e.timeline.makespan)),
        Column("its bubble", lambda e: e.timeline.bubble_makespan, lambda e: show_percent(e.timeline.bubble_makespan)),
        _peak_column(in_bytes),
        Column("messages", lambda e: e.messages, lambda e: f"{e.messages:,}"),
    ]
    if message_bytes is not None:
        found.append(Column("bytes sent", lambda e: e.messages, lambda e: show_bytes(e.messages * message_bytes)))
    return found


def _bubble_of_period(evaluation: Evaluation) -> float:
    return evaluation.timeline.bubble_at(evaluation.costed.period)


COPIES = "copies"
CAUSES = (*Causes._fields, COPIES)
"""Why ranks are idle; the last two are for schedules with sums over replicas, and with copies to the host and back."""


def causes_of(evaluations: Sequence[Evaluation]) -> tuple[str, ...]:
    """Why ranks may be idle, without what none of these schedules has."""
    absent = {
        CAUSES[-2]: not any(evaluation.timeline.reductions for evaluation in evaluations),
        COPIES: not any(evaluation.costed.link for evaluation in evaluations),
    }
    return tuple(cause for cause in CAUSES if not absent.get(cause))


def idle_columns(causes: Sequence[str]) -> list[Column]:
    """The share of the ranks' time that is idle by each of `causes`; all of them together are the makespan's bubble."""
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


def table_rows(evaluations: Sequence[Evaluation], columns: Sequence[Column]) -> list[list[Cell]]:
    """A row of cells for each schedule, the best of each column marked."""
    values = [[column.value(evaluation) for evaluation in evaluations] for column in columns]
    return [
        [Cell(column.text(evaluation), min(v) == v[row] < max(v)) for column, v in zip(columns, values, strict=True)]
        for row, evaluation in enumerate(evaluations)
    ]


def evaluation_to_dict(evaluation: Evaluation, message_bytes: int | None) -> dict[str, object]:
    """The figures of one schedule; times in ms, bytes where they are real."""
    timeline, causes = evaluation.timeline, CAUSES if evaluation.costed.link else Causes._fields
    peak_bytes = {"peak_bytes": list(evaluation.peaks)} if evaluation.costed.in_bytes else {}
    sent = {} if message_bytes is None else {"sent_bytes": evaluation.messages * message_bytes}
    return {
        "name": evaluation.schedule.name,
        "num_stages": evaluation.schedule.num_stages,
        "costs": evaluation.costed.source,
        "period": ms(evaluation.costed.period),
        "makespan": ms(timeline.makespan),
        "span": ms(timeline.span),
        "bubble_makespan": timeline.bubble_makespan,
        "bubble_span": timeline.bubble_span,
        "peak_microbatches": evaluation.peak_microbatches,
        **peak_bytes,
        "messages": evaluation.messages,
        **sent,
        "idle": {cause: ms(evaluation.idle_by(cause)) for cause in causes},
        "idle_per_rank": [
            {cause: ms(evaluation.copies if cause == COPIES else getattr(rank, cause)) for cause in causes}
            for rank in evaluation.idle.ranks
        ],
    }


def describe_shape(schedule: Schedule) -> str:
    """Ranks, stages and microbatches of a schedule: `4 ranks, 8 stages, 12 microbatches`."""
    parts = ((schedule.num_ranks, "rank"), (schedule.num_stages, "stage"), (schedule.num_microbatches, "microbatch"))
    return ", ".join(counted(count, noun) for count, noun in parts)
