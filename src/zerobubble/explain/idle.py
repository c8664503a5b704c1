"""Where the time of a schedule goes: idle time by its causes, and the chain of passes that sets the makespan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal, NamedTuple

from zerobubble.arguments import takes
from zerobubble.costs import Costs
from zerobubble.display import Displayed
from zerobubble.errors import InputError
from zerobubble.graph import Graph, resolve
from zerobubble.ir import Placement, Schedule
from zerobubble.kinds import Stuff, kinds_making
from zerobubble.simulation import simulate
from zerobubble.timeline import Span, Timeline
from zerobubble.units import counted, show_ms

Metric = Literal["makespan", "span"]
"""What idle time is counted against: the whole step, or each rank's own time between its first and its last pass."""


class Causes(NamedTuple):
    """Idle time in ns by its cause, as `attribute` defines them."""

    dependency: int
    comm: int
    imbalance: int
    memory: int

    @property
    def total(self) -> int:
        return sum(self)


@dataclass(frozen=True, slots=True, repr=False)
class Idle(Displayed):
    """The idle time of a schedule: `ranks[r].total` is `metric` minus the work of rank r."""

    metric: Metric
    ranks: tuple[Causes, ...]

    def _summary(self) -> str:
        causes = ", ".join(f"{name} {show_ms(time)}" for name, time in self.overall._asdict().items())
        return f"time against the {self.metric} of {counted(len(self.ranks), 'rank')}: {causes}"

    def _details(self) -> Iterator[str]:
        for rank, causes in enumerate(self.ranks):
            yield f"rank {rank}: " + ", ".join(f"{name} {show_ms(time)}" for name, time in causes._asdict().items())

    @property
    def overall(self) -> Causes:
        """The sums over the ranks."""
        return Causes(*map(sum, zip(*self.ranks, strict=True)))


@takes(schedule=Schedule, costs=Costs)
def attribute(schedule: Schedule, costs: Costs, metric: Metric = "makespan") -> Idle:
    """Every ns in which a rank of the simulated `schedule` is idle, by cause; the causes add up exactly.

    - comm: what goes away when messages take no time.
    - imbalance: what then goes away when the work is spread evenly over the ranks and over the stages of each (the same total,
      rounded to a ns per stage).
    - memory: of what is left, the moments before a rank's last forward when a later forward of its row had all it uses and the
      order held it back, which is how a schedule keeps fewer microbatches in memory.
    - dependency: all else; no forward was there to be run.

    Removing a delay can move another into the way, so comm and imbalance of a rank may be negative. With the metric `span` a rank's
    own gaps are searched for memory, and what it is shorter than the longest rank counts as dependency. Raises as `simulate` does,
    and `InputError` for another metric.

    >>> import zerobubble as zb
    >>> zb.explain.attribute(zb.make("1f1b", 4, 8), zb.Costs.uniform(4, times=(10, 10, 8), comm=0.5))
    <Idle time against the makespan of 4 ranks: dependency 228 ms, comm 32 ms, imbalance 0 ms, memory 108 ms>
    """
    if metric not in ("makespan", "span"):
        raise InputError(f"idle time is counted against 'makespan' or 'span', got {metric!r}")
    silent = replace(costs, comm=(0,) * len(costs.comm))
    even = simulate(schedule, _evened(silent, schedule.placement))
    held_back = _held_back(resolve(schedule), even, metric)
    totals = [_idle(timeline, metric) for timeline in (simulate(schedule, costs), simulate(schedule, silent), even)]
    parts = zip(*totals, held_back, strict=True)
    return Idle(metric, tuple(Causes(rest - memory, idle - quiet, quiet - rest, memory) for idle, quiet, rest, memory in parts))


def _idle(timeline: Timeline, metric: Metric) -> list[int]:
    whole = timeline.makespan if metric == "makespan" else timeline.span
    return [whole - figures.work for figures in timeline.ranks]


def _evened(costs: Costs, placement: Placement) -> Costs:
    """Costs with the same work on every rank, in equal parts on its stages; over several routes a stage has the mean of its parts."""
    parts = [[len(set(route)) * route.count(rank) for rank in route] for route in placement.routes]

    def evened(total: int) -> tuple[int, ...]:
        return tuple(round(sum(total / n for n in at) / len(at)) for at in zip(*parts, strict=True))

    return costs.with_columns(**{name: evened(sum(costs.column(name))) for name in (*costs.time_columns, "hidden")})


def _held_back(graph: Graph, timeline: Timeline, metric: Metric) -> list[int]:
    """For each rank, the idle time in which a later forward of its row had all it uses."""
    ends = [span.end for row in timeline.rows for span in row]
    held = []
    for rank, row in enumerate(timeline.rows):
        numbers = range(graph.first[rank], graph.first[rank + 1])
        ready = [_ready(graph, number, ends) for number in numbers]
        earliest = list(accumulate(reversed(ready), min))[::-1]
        free, total = 0 if metric == "makespan" or not row else row[0].start, 0
        for span, since in zip(row, earliest, strict=True):
            total += max(0, span.start - max(free, since))
            free = max(free, span.end)
        held.append(total)
    return held


def _ready(graph: Graph, number: int, ends: list[int]) -> int:
    """When all that a forward uses is there; never (a time after the last end) for any other pass."""
    if graph.ops[number].kind not in kinds_making(Stuff.ACTIVATION):
        return ends[number]
    return max((ends[need] for need in graph.needs[number]), default=0)


@takes(timeline=Timeline)
def critical_path(timeline: Timeline) -> tuple[Span, ...]:
    """The chain of spans that sets the end of a simulated timeline: each started when the one before it, or its message, let it.

    Empty for a timeline without spans; raises `InputError` for a measured one, which does not say what a span waited for.
    """
    by_op = {span.op: span for _, span in timeline.spans()}
    op = next((span.op for span in by_op.values() if span.end == timeline.end), None)
    path: list[Span] = []
    while op in by_op:
        span = by_op.pop(op)
        if span.why is None:
            raise InputError(f"timeline {timeline.name!r} does not say what {op} waited for: simulate the schedule instead")
        path.append(span)
        op = span.why.op
    return tuple(reversed(path))
