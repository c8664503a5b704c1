"""Explains the time of a schedule: idle time by cause, and the critical path, the chain of passes that determines the makespan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

from zerobubble.arguments import takes
from zerobubble.costs import Costs
from zerobubble.display import Displayed
from zerobubble.errors import InputError
from zerobubble.garbage_pause import garbage_collection_paused
from zerobubble.graph import Graph, Played, play
from zerobubble.ir import Op, Schedule
from zerobubble.kinds import ValueKind, kinds_making
from zerobubble.simulation import metrics_of, pass_times
from zerobubble.timeline import ReplicaSum, Span, Timeline
from zerobubble.units import counted, show_ms
from zerobubble.verify import checked

Metric = Literal["makespan", "span"]
"""Period in which idle time counts: the whole step, or for each rank the time from its first to its last pass."""


class Causes(NamedTuple):
    """Idle time in ns by its cause; `attribute` defines them.

    Attributes:
        dependency: No forward was ready.
        comm: Messages.
        imbalance: Less work than the busiest rank.
        memory: Forwards that wait so that fewer microbatches are held.
        reduction: Sums over replicas that no pass hides.
    """

    dependency: int
    comm: int
    imbalance: int
    memory: int
    reduction: int

    @property
    def total(self) -> int:
        """The sum of all causes, in ns."""
        return sum(self)


@dataclass(frozen=True, slots=True, repr=False)
class Idle(Displayed):
    """The idle time of a schedule.

    Attributes:
        metric: The span or makespan in ns.
        ranks: The idle time of each rank by cause: `ranks[r].total` is `metric` minus the work of rank r.
    """

    metric: Metric
    ranks: tuple[Causes, ...]

    def _summary(self) -> str:
        causes = ", ".join(f"{name} {show_ms(time)}" for name, time in self.overall._asdict().items() if time or name != "reduction")
        return f"time against the {self.metric} of {counted(len(self.ranks), 'rank')}: {causes}"

    def _details(self) -> Iterator[str]:
        for rank, causes in enumerate(self.ranks):
            yield f"rank {rank}: " + ", ".join(f"{name} {show_ms(time)}" for name, time in causes._asdict().items())

    @property
    def overall(self) -> Causes:
        """The sums over the ranks."""
        return Causes(*map(sum, zip(*self.ranks, strict=True)))


@takes(schedule=Schedule, costs=Costs)
@garbage_collection_paused()
def attribute(schedule: Schedule, costs: Costs, metric: Metric = "makespan") -> Idle:
    """Splits the idle time of each rank of the simulated `schedule` by cause; the causes add up exactly.

    Args:
        schedule: The schedule.
        costs: The times under which it is simulated.
        metric: "makespan" or "span", the time of which idle time is a part.

    - reduction: disappears if sums over replicas take no time; it is the part of them that no pass hides.
    - comm: then disappears if messages take no time.
    - imbalance: how much less work a rank has than the busiest one; every schedule of the same cut has it.
    - memory: of the rest, the time before a rank's last forward in which a later forward of its row had its inputs but had to wait
      for its turn. Schedules delay forwards in this way to hold fewer microbatches.
    - dependency: all else; no forward was ready.

    Removing one delay can cause another, so comm of a rank may be negative. With the metric `span`, memory is idle time in the
    rank's own gaps, and the difference to the longest rank counts as dependency. Raises as `simulate` does,
    and `InputError` for another metric.

    >>> import zerobubble as zb
    >>> zb.explain.attribute(zb.make("1f1b", 4, 8), zb.Costs.uniform(4, times=(10, 10, 8), comm=0.5))
    <Idle time against the makespan of 4 ranks: dependency 228 ms, comm 32 ms, imbalance 0 ms, memory 108 ms>
    """
    if metric not in ("makespan", "span"):
        raise InputError("idle time is counted against 'makespan' or 'span', got {got!r}", got=metric)
    costs.require_schedule(schedule)
    graph, order = checked(schedule)
    silent = replace(costs, reduce=(), comm=(0,) * len(costs.comm))
    loud_play, silent_play = _plays(graph, order, (costs, silent))
    idle = [loud_play.idle(graph, costs, metric), loud_play.idle(graph, replace(costs, reduce=()), metric)]
    idle += [silent_play.idle(graph, silent, metric), silent_play.less_work]
    held_back = _held_back(graph, silent_play.played, metric)
    return Idle(metric, tuple(_causes(*times) for times in zip(*idle, held_back, strict=True)))


def _causes(whole: int, unsummed: int, quiet: int, imbalance: int, held_back: int) -> Causes:
    """The causes of a rank's idle time: all, without sums, without messages, less work, and time that the order holds back."""
    rest = quiet - imbalance
    memory = min(held_back, rest)
    return Causes(rest - memory, unsummed - quiet, imbalance, memory, whole - unsummed)


class _Play(NamedTuple):
    """Passes played in time, and how long each rank works."""

    played: Played
    work: list[int]

    def idle(self, graph: Graph, costs: Costs, metric: Metric) -> list[int]:
        """Returns the idle time of each rank, with the sums over replicas of `costs`."""
        whole: int = getattr(metrics_of(graph, self.played, costs), metric)
        return [whole - work for work in self.work]

    @property
    def less_work(self) -> list[int]:
        """Returns how much less work each rank has than the busiest one."""
        return [max(self.work) - work for work in self.work]


def _plays(graph: Graph, order: Sequence[int], several: Iterable[Costs]) -> Iterator[_Play]:
    """Yields the simulation under each of the costs, reused if passes and messages take as long as before."""
    before: tuple[list[int], list[int]] | None = None
    for costs in several:
        takes, delays = times = pass_times(graph, costs)
        if times != before:
            before = times
            play_now = _Play(play(graph, order, takes, delays), [sum(takes[first:stop]) for first, stop in pairwise(graph.first)])
        yield play_now


def _held_back(graph: Graph, played: Played, metric: Metric) -> list[int]:
    """Returns, for each rank, the idle time in which a later forward of its row had its inputs."""
    begin, end, _ = played
    forwards = kinds_making(ValueKind.ACTIVATION)
    held = []
    for first, stop in pairwise(graph.first):
        ready = [
            max([end[need] for need in graph.needs[number]], default=0) if graph.ops[number].kind in forwards else end[number]
            for number in range(first, stop)
        ]
        earliest = list(accumulate(reversed(ready), min))[::-1]
        free, total = 0 if metric == "makespan" or first == stop else begin[first], 0
        for start, last, since in zip(begin[first:stop], end[first:stop], earliest, strict=True):
            total += max(0, start - max(free, since))
            free = max(free, last)
        held.append(total)
    return held


def _last_pass(timeline: Timeline) -> Op | None:
    """The pass that sets the end of a timeline: it ends then, or the sums over replicas that end then begin during or after it."""
    end, rows = timeline.end, list(timeline.rows)
    for rank, row in enumerate(timeline.reductions):
        if row and row[-1].end == end and all(span.end < end for _, span in timeline.spans()):
            end = _begin_without_gaps(row)
            rows.insert(0, timeline.rows[rank])
            break
    return next((span.op for row in rows for span in row if span.end == end or span.start < end < span.end), None)


def _begin_without_gaps(row: Sequence[ReplicaSum]) -> int:
    """When the sums begin that stand one after another, without a gap, at the end of `row`."""
    begin = row[-1].start
    for before in reversed(row[:-1]):
        if before.end < begin:
            break
        begin = before.start
    return begin


@takes(timeline=Timeline)
def critical_path(timeline: Timeline) -> tuple[Span, ...]:
    """Returns the spans that determine the end of a simulated `timeline`. Each starts when the one before ends or its message arrives.

    Where a sum over replicas ends last, it is the chain of the passes that this sum, and those before it on its rank, waited for.
    Empty for a timeline without spans; raises `InputError` for a measured one, which does not say what a span waited for.
    """
    by_op = {span.op: span for _, span in timeline.spans()}
    op = _last_pass(timeline)
    path: list[Span] = []
    while op in by_op:
        span = by_op.pop(op)
        if span.why is None:
            message = "timeline {timeline!r} does not say what {op} waited for"
            raise InputError(message, timeline=timeline.name, op=str(op), remedy="simulate the schedule instead")
        path.append(span)
        op = span.why.op
    return tuple(reversed(path))
