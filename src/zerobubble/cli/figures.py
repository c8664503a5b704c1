"""What `compare` tells of each schedule: time, bubble, memory, messages and idle time by cause, as cells of a table and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zerobubble.costs import UNIT_BYTES, Costs
from zerobubble.explain import Idle, attribute
from zerobubble.export.units import ms, show_bytes, show_ms, show_percent
from zerobubble.graph import resolve
from zerobubble.ir import Schedule
from zerobubble.lowering.messages import message_users
from zerobubble.simulation import peak_memory, simulate
from zerobubble.timeline import Timeline


@dataclass(frozen=True)
class Entry:
    """One schedule judged: its timeline, its idle time against the makespan, peak bytes per rank and messages between ranks."""

    schedule: Schedule
    timeline: Timeline
    idle: Idle
    peaks: tuple[int, ...]
    messages: int

    @property
    def peak_microbatches(self) -> list[float]:
        """The peaks in microbatches, where every stage holds `UNIT_BYTES` of one."""
        return [in_microbatches(self.schedule, peak) for peak in self.peaks]


@dataclass(frozen=True, slots=True)
class Column:
    """A figure: `value` to rank schedules by (less is better) and `text` to show."""

    title: str
    value: Callable[[Entry], float]
    text: Callable[[Entry], str]


@dataclass(frozen=True, slots=True)
class Cell:
    """What stands in a table; `best` where no other schedule has less and some has more."""

    text: str
    best: bool


def stages_passed(schedule: Schedule) -> float:
    """Stages of a rank that a microbatch passes through; a bidirectional schedule's second copy is for other microbatches."""
    return schedule.num_stages / schedule.num_ranks


def in_microbatches(schedule: Schedule, held: int) -> float:
    """Bytes held by a rank, `UNIT_BYTES` for each stage, in microbatches of all the stages that one passes there."""
    return held / (UNIT_BYTES * stages_passed(schedule))


def equal_costs(
    schedule: Schedule, times: tuple[float, float, float], comm: float, held: float = 1.0, overlap: float | None = None
) -> Costs:
    """Costs of equal stages in which a microbatch takes `times` ms of F, B and W on each rank, however many stages the schedule has.

    `overlap` is what F and the whole backward take together on a rank, in ms.
    """
    cut = stages_passed(schedule)
    forward, backward, weight = (time / cut for time in times)
    together = None if overlap is None else overlap / cut
    return Costs.uniform(schedule.num_stages, (forward, backward, weight), comm, held=held, overlap=together)


def judge(schedule: Schedule, costs: Costs) -> Entry:
    """Every figure of `schedule` under `costs`; raises as `simulate` does."""
    timeline = simulate(schedule, costs)
    messages = sum(user >= 0 for user in message_users(resolve(schedule)))
    return Entry(schedule, timeline, attribute(schedule, costs), peak_memory(schedule, costs), messages)


def columns(in_bytes: bool, message_bytes: int | None) -> list[Column]:
    """Time, memory (in bytes or in microbatches) and messages, with the bytes sent where the size of a message is known."""
    found = [
        Column("makespan", lambda e: e.timeline.makespan, lambda e: show_ms(e.timeline.makespan)),
        Column("bubble", lambda e: e.timeline.bubble_makespan, lambda e: show_percent(e.timeline.bubble_makespan)),
        Column("span", lambda e: e.timeline.span, lambda e: show_ms(e.timeline.span)),
        Column("bubble", lambda e: e.timeline.bubble_span, lambda e: show_percent(e.timeline.bubble_span)),
        _peak_column(in_bytes),
        Column("messages", lambda e: e.messages, lambda e: f"{e.messages:,}"),
    ]
    if message_bytes is not None:
        found.append(Column("sent", lambda e: e.messages, lambda e: show_bytes(e.messages * message_bytes)))
    return found


CAUSES = ("dependency", "comm", "imbalance", "memory")


def idle_columns() -> list[Column]:
    """The share of the ranks' time that is idle by each cause; together they are the makespan's bubble."""
    return [_idle_column(cause) for cause in CAUSES]


def _idle_column(cause: str) -> Column:
    def share(entry: Entry) -> float:
        part: int = getattr(entry.idle.overall, cause)
        return part / max(1, entry.timeline.num_ranks * entry.timeline.makespan)

    return Column(cause, share, lambda entry: show_percent(share(entry)))


def _peak_column(in_bytes: bool) -> Column:
    def text(entry: Entry) -> str:
        least, most = [show_bytes(end(entry.peaks)) if in_bytes else f"{end(entry.peak_microbatches):.4g}" for end in (min, max)]
        return least if least == most else f"{least} to {most}"

    return Column("peak", lambda entry: max(entry.peaks if in_bytes else entry.peak_microbatches), text)


def cells(entries: Sequence[Entry], shown: Sequence[Column]) -> list[list[Cell]]:
    """A row of cells for each entry, the best of each column marked."""
    values = [[column.value(entry) for entry in entries] for column in shown]
    rows = range(len(entries))
    return [[Cell(column.text(entries[i]), min(v) == v[i] < max(v)) for column, v in zip(shown, values, strict=True)] for i in rows]


def as_dict(entry: Entry, in_bytes: bool, message_bytes: int | None) -> dict[str, object]:
    """The figures of one schedule; times in ms."""
    timeline = entry.timeline
    peaks = {"peak_bytes": list(entry.peaks)} if in_bytes else {"peak_microbatches": entry.peak_microbatches}
    sent = {} if message_bytes is None else {"sent_bytes": entry.messages * message_bytes}
    return {
        "name": entry.schedule.name,
        "num_stages": entry.schedule.num_stages,
        "makespan": ms(timeline.makespan),
        "span": ms(timeline.span),
        "bubble_makespan": timeline.bubble_makespan,
        "bubble_span": timeline.bubble_span,
        **peaks,
        "messages": entry.messages,
        **sent,
        "idle": {cause: ms(getattr(entry.idle.overall, cause)) for cause in CAUSES},
        "idle_per_rank": [{cause: ms(getattr(causes, cause)) for cause in CAUSES} for causes in entry.idle.ranks],
    }
