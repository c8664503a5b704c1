"""Timelines: the times of passes on each rank, for simulated and measured runs, and the figures derived from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from zerobubble.arguments import takes
from zerobubble.display import Displayed
from zerobubble.errors import InputError, ParseError, line, reading, whole
from zerobubble.ir import Op
from zerobubble.rules import SENT_BETWEEN_STAGES, Value, makers, uses
from zerobubble.units import counted, show_bytes, show_ms, show_percent


class Awaited(StrEnum):
    """The last thing that a span waited for: nothing, the pass before it on its rank, a message, or a copy to or from the host."""

    NOTHING = "nothing"
    ROW = "row"
    MESSAGE = "message"
    COPY = "copy"


class Why(NamedTuple):
    """Why a span did not start earlier: the `cause`, and the pass `op` that ended last, None for `NOTHING` and `COPY`."""

    cause: Awaited
    op: Op | None = None

    def __str__(self) -> str:
        if self.cause is Awaited.NOTHING:
            return "started at once"
        if self.cause is Awaited.COPY:
            return "waited for a copy to the host or back"
        if self.cause is Awaited.MESSAGE:
            return f"waited for the message of {self.op}"
        return f"followed {self.op} without a gap"


class Span(NamedTuple):
    """A pass that ran from `start` to `end` (ns since the timeline's origin). `why` is None in a measured timeline."""

    op: Op
    start: int
    end: int
    why: Why | None = None

    @property
    def duration(self) -> int:
        return self.end - self.start


class Doing(StrEnum):
    """Activity of a rank outside its passes: sending a message, waiting for one, or the optimizer step."""

    SEND = "send"
    WAIT = "wait"
    OPTIMIZER = "optimizer"


class Mark(NamedTuple):
    """An activity outside passes, from `start` to `end` (ns since the timeline's origin), with its message `value`, such as `a0.3`."""

    doing: Doing
    start: int
    end: int
    value: str = ""

    @property
    def duration(self) -> int:
        return self.end - self.start


class ReplicaSum(NamedTuple):
    """A sum of the gradients of `stage` over replicas, from `start` to `end` (ns since the timeline's origin)."""

    stage: int
    start: int
    end: int

    @property
    def duration(self) -> int:
        return self.end - self.start


class Copying(StrEnum):
    """The direction of a copy."""

    TO_HOST = "to host"
    FROM_HOST = "from host"


class HostCopy(NamedTuple):
    """A copy of the values saved by F of `stage` and `microbatch`, from `start` to `end` (ns since the timeline's origin)."""

    copying: Copying
    stage: int
    microbatch: int
    start: int
    end: int

    @property
    def duration(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class RankFigures:
    """Figures of one rank, in ns: `makespan = lead + work + gaps + reduction + tail` and `span = work + gaps + reduction`.

    `work` is the busy time (overlapped passes count once), `lead` the idle time before the first pass, `gaps` the idle time between passes,
    `reduction` the time from the end of the last pass to the end of the last sum over replicas, and `tail` the time after both.
    `peak_bytes` is the peak activation memory, None if the timeline has no memory.
    """

    rank: int
    work: int
    lead: int
    gaps: int
    reduction: int
    tail: int
    peak_bytes: int | None

    @property
    def span(self) -> int:
        return self.work + self.gaps + self.reduction


_INSTEAD = {
    "bubble": ": `bubble_makespan` is the idle share of the makespan, `bubble_span` that of the longest span of a rank",
    "period": ": `zb.simulation.period(schedule, costs)` returns it",
}
"""Where to find the figures that a timeline lacks."""


@takes()
@dataclass(frozen=True, repr=False)
class Timeline(Displayed):
    """The spans of all ranks, in ns since the timeline's origin.

    Attributes:
        name: The name of the schedule.
        rows: The spans of each rank in order of their starts. Only adjacent spans may overlap, if they are the passes of one step.
        memory: The activation bytes of each rank, as steps of (time in ns, bytes from then on); empty if unknown.
        source: "simulated" or "measured".
        marks: The activities of each rank outside passes, in order of their ends; empty if they were not recorded.
        reductions: The sums of gradients of each rank over replicas, in order; empty if there are none.
        copies: The copies of each rank to host memory and back, in order; empty if there are none.
        numbers: The numbers of the ranks, row by row, if ranks were lost (`survive=True`); empty for 0, 1, ...

    There are two metrics. The `makespan` is the time from the first start to the last end over all ranks. The `span` is the longest time of
    a single rank from its own first start to its own last end. A bubble rate (`bubble_makespan`, `bubble_span`) is the idle share of this
    time over all ranks: 1 - total work / (ranks x metric). A rank ends with the last of its passes and sums over replicas.

    >>> import zerobubble as zb
    >>> timeline = zb.simulate(zb.make("zb-h1", 2, 3), zb.Costs.uniform(2, times=(10, 10, 8)))
    >>> print(timeline)
    Timeline zb-h1 (simulated): 2 ranks, 18 spans, makespan 96 ms, bubble 12.50 % of the makespan
    rank 0: works 84 ms, idles 12 ms
    rank 1: works 84 ms, idles 12 ms
    >>> timeline.span, timeline.makespan
    (96000000, 96000000)
    """

    name: str
    rows: tuple[tuple[Span, ...], ...]
    memory: tuple[tuple[tuple[int, int], ...], ...] = ()
    source: str = field(default="simulated")
    marks: tuple[tuple[Mark, ...], ...] = ()
    reductions: tuple[tuple[ReplicaSum, ...], ...] = ()
    copies: tuple[tuple[HostCopy, ...], ...] = ()
    numbers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for what in ("memory", "marks", "reductions", "copies", "numbers"):
            rows = getattr(self, what)
            if rows and len(rows) != len(self.rows):
                message = "a timeline of {num_rows} ranks needs {what} for as many or for none, got {got}"
                raise InputError(message, num_rows=len(self.rows), what=what, got=len(rows))

    def _summary(self) -> str:
        sizes = f"{counted(self.num_ranks, 'rank')}, {counted(sum(map(len, self.rows)), 'span')}"
        figures = f"makespan {show_ms(self.makespan)}, bubble {show_percent(self.bubble_makespan)} of the makespan"
        return f"{self.name or 'unnamed'} ({self.source}): {sizes}, {figures}"

    def _details(self) -> Iterator[str]:
        for rank in self.ranks:
            # Simulated bytes may be arbitrary units (`Costs.uniform`), which a timeline cannot distinguish from bytes.
            peak = "" if rank.peak_bytes is None or self.source == "simulated" else f", holds up to {show_bytes(rank.peak_bytes)}"
            yield f"rank {rank.rank}: works {show_ms(rank.work)}, idles {show_ms(self.makespan - rank.work)}{peak}"

    if not TYPE_CHECKING:  # which would accept every name

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(f"'Timeline' object has no attribute {name!r}{_INSTEAD.get(name, '')}", name=name, obj=self)

    @property
    def num_ranks(self) -> int:
        """The number of rows."""
        return len(self.rows)

    @cached_property
    def start(self) -> int:
        """The first start of all ranks, in ns."""
        return min((row[0].start for row in self.rows if row), default=0)

    @cached_property
    def end(self) -> int:
        """The last end of all ranks, in ns."""
        return max((self._end_of_rank(rank) for rank, row in enumerate(self.rows) if row), default=0)

    def _end_of_rank(self, rank: int) -> int:
        """Return the end of the last pass or sum over replicas of a rank."""
        return max([_end_of_row(self.rows[rank]), *(sum_.end for sum_ in self.reductions_of(rank))])

    def number_of(self, rank: int) -> int:
        """Return the number of the rank of row `rank`, as errors name it."""
        return self.numbers[rank] if self.numbers else rank

    def reductions_of(self, rank: int) -> tuple[ReplicaSum, ...]:
        """Return the sums over replicas of `rank`, in order."""
        return self.reductions[rank] if self.reductions else ()

    def copies_of(self, rank: int) -> tuple[HostCopy, ...]:
        """Return the copies of `rank` to the host and back, in order."""
        return self.copies[rank] if self.copies else ()

    @property
    def makespan(self) -> int:
        """The time from the first start to the last end over all ranks, in ns."""
        return self.end - self.start

    @cached_property
    def ranks(self) -> tuple[RankFigures, ...]:
        """The figures of each rank, in order of the rows."""
        return tuple(self._figures(rank) for rank in range(self.num_ranks))

    def _figures(self, rank: int) -> RankFigures:
        row, number = self.rows[rank], self.number_of(rank)
        work = _busy(row)
        peak = max((held for _, held in self.memory[rank]), default=0) if self.memory else None
        if not row:
            return RankFigures(number, 0, self.makespan, 0, 0, 0, peak)
        begin, last, end = row[0].start, _end_of_row(row), self._end_of_rank(rank)
        return RankFigures(number, work, begin - self.start, last - begin - work, end - last, self.end - end, peak)

    @property
    def span(self) -> int:
        """The longest time of a single rank from its first start to its last end, in ns."""
        return max((figures.span for figures in self.ranks), default=0)

    @property
    def work(self) -> int:
        """The time that all ranks run passes, in ns."""
        return sum(figures.work for figures in self.ranks)

    def bubble_at(self, time: int) -> float:
        """Return the idle share of `time` ns over all ranks."""
        return 1 - self.work / (self.num_ranks * time) if time else 0.0

    @property
    def bubble_makespan(self) -> float:
        """The idle share of the makespan over all ranks, 0 to 1."""
        return self.bubble_at(self.makespan)

    @property
    def bubble_span(self) -> float:
        """The idle share of the span over all ranks, 0 to 1."""
        return self.bubble_at(self.span)

    @property
    def peak_bytes(self) -> int | None:
        """The most activation bytes of a rank; None if memory is unknown."""
        return max((f.peak_bytes for f in self.ranks if f.peak_bytes is not None), default=None)

    def spans(self) -> Iterator[tuple[int, Span]]:
        """Yield every span with its rank."""
        for rank, row in enumerate(self.rows):
            for span in row:
                yield rank, span

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, which `from_dict` reads.

        A span is [pass, start, end, cause, cause's pass], a mark [doing, start, end, message], a sum over replicas [stage, start, end], and
        a copy [direction, stage, microbatch, start, end].
        """
        numbers = {"numbers": list(self.numbers)} if self.numbers else {}
        return {
            "format": "zerobubble timeline 1",
            "name": self.name,
            "source": self.source,
            "rows": [[_span_to_list(span) for span in row] for row in self.rows],
            "memory": [[list(step) for step in steps] for steps in self.memory],
            "marks": [[[mark.doing.value, *mark[1:]] for mark in marks] for marks in self.marks],
            "reductions": [[list(reduction) for reduction in row] for row in self.reductions],
            "copies": [[[copy.copying.value, *copy[1:]] for copy in row] for row in self.copies],
            **numbers,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Timeline:
        """Read `data`, as `to_dict` returns it; raises `ParseError` if a part is missing or malformed."""
        with reading("timeline", data):
            rows = tuple(tuple(map(_span_from_list, row)) for row in data["rows"])
            memory = tuple(tuple((whole(time), whole(held)) for time, held in steps) for steps in data.get("memory", ()))
            marks = tuple(tuple(map(_mark_from_list, row)) for row in data.get("marks", ()))
            sums = tuple(tuple(ReplicaSum(*map(whole, (stage, *times))) for stage, *times in row) for row in data.get("reductions", ()))
            copies = tuple(tuple(HostCopy(Copying(way), *map(whole, numbers)) for way, *numbers in row) for row in data.get("copies", ()))
            numbers = tuple(map(whole, data.get("numbers", ())))
            return cls(line(data["name"]), rows, memory, line(data.get("source", "measured")), marks, sums, copies, numbers)


def _end_of_row(row: Sequence[Span]) -> int:
    """Return the end of a rank's passes. Of two overlapped passes, the first may end last."""
    return max(span.end for span in row[-2:])


def _busy(row: tuple[Span, ...]) -> int:
    """Return the time during which at least one span runs; spans are in order of their starts."""
    busy, end = 0, row[0].start if row else 0
    for span in row:
        busy += max(0, span.end - max(span.start, end))
        end = max(end, span.end)
    return busy


def steps_of(row: Sequence[Span]) -> Iterator[tuple[Span, ...]]:
    """Yield the steps of a rank in order, each with one span or two overlapped ones."""
    place = 0
    while place < len(row):
        pair = tuple(row[place : place + 2])
        overlapped = len(pair) == 2 and pair[1].start < pair[0].end
        yield pair if overlapped else pair[:1]
        place += 2 if overlapped else 1


def lanes(row: Sequence[Span]) -> list[tuple[int, int]]:
    """Return the lane of each span and the number of lanes: (0, 1) for one that runs alone, (0, 2) and (1, 2) for two overlapped."""
    return [(lane, len(group)) for group in steps_of(row) for lane in range(len(group))]


def _span_to_list(span: Span) -> list[Any]:
    if span.why is None:
        return [str(span.op), span.start, span.end]
    return [str(span.op), span.start, span.end, span.why.cause.value, None if span.why.op is None else str(span.why.op)]


def _span_from_list(cell: list[Any]) -> Span:
    if len(cell) not in (3, 5):
        raise ParseError("a span is [pass, start, end] or [pass, start, end, cause, cause's pass], got {got!r}", got=cell)
    op, start, end, *why = cell
    reason = Why(Awaited(why[0]), None if why[1] is None else Op.parse(why[1])) if why else None
    return Span(Op.parse(op), whole(start), whole(end), reason)


def _mark_from_list(cell: list[Any]) -> Mark:
    doing, start, end, value = cell
    return Mark(Doing(doing), whole(start), whole(end), line(value))


class Message(NamedTuple):
    """A message with `value` from rank `source`, where span `made` makes it, to rank `destination`, where span `used` uses it."""

    value: Value
    source: int
    made: Span
    destination: int
    used: Span


def messages(timeline: Timeline) -> Iterator[Message]:
    """Yield every message between ranks, in order of its user; a value that no pass makes is left out."""
    where = {span.op: (rank, span) for rank, span in timeline.spans()}
    num_stages = 1 + max((op.stage for op in where), default=0)
    for op, (destination, used) in where.items():
        for value in uses(op, num_stages):
            source = next((where[maker] for maker in makers(value) if maker in where), None)
            if value.value_kind in SENT_BETWEEN_STAGES and source is not None and source[0] != destination:
                yield Message(value, *source, destination, used)
