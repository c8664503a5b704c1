"""Play a schedule against costs: every pass starts as soon as its rank is free and what it uses has arrived."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from zerobubble.arguments import takes
from zerobubble.costs import Costs, Limits
from zerobubble.errors import Fault, InputError
from zerobubble.garbage_pause import garbage_collection_paused
from zerobubble.graph import Graph, Played, play
from zerobubble.ir import Op, Schedule
from zerobubble.kinds import KINDS, ByKind, Kind, Stuff, kinds_making
from zerobubble.reductions import planned_sums, play_sums
from zerobubble.rules import recomputed
from zerobubble.timeline import Cause, Span, Timeline, Why
from zerobubble.verify import checked

__all__ = ["Metrics", "memory_faults", "memory_steps", "metrics", "peak_memory", "simulate"]


@takes(schedule=Schedule, costs=Costs)
@garbage_collection_paused()
def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """The timeline of `schedule` under `costs`, each span with its `why`, each rank with its memory over time.

    A message takes `costs.comm` after its maker ended and never keeps a rank busy, and nor do the sums over replicas (`costs.reduce`).
    The two passes of an overlapped step have the same span, as long as `costs.step_time` says. Raises `ScheduleError` with every fault when
    the schedule cannot run, `InputError` when the costs are for another number of stages or another placement.

    Arguments:
        schedule: the order to play.
        costs: what its passes and messages take, one entry per stage.

    >>> import zerobubble as zb
    >>> timeline = zb.simulate(zb.make("1f1b", 4, 8), zb.Costs.uniform(4, times=(10, 10, 8), comm=0.5))
    >>> timeline
    <Timeline 1f1b (simulated): 4 ranks, 64 spans, makespan 316 ms, bubble 29.1 %>
    >>> timeline.rows[1][0].start
    10500000
    """
    graph, played = _played(schedule, costs)
    spans = list(map(Span, graph.ops, played.begin, played.end, whys(graph, played.after)))
    rows = tuple(tuple(spans[start:end]) for start, end in pairwise(graph.first))
    changes = _changes(costs)
    sums = play_sums(planned_sums(graph, costs), played.end)
    return Timeline(schedule.name, rows, tuple(_steps(row, changes) for row in rows), reductions=sums if any(sums) else ())


class Metrics(NamedTuple):
    """How long a schedule takes, in ns: `span` and `makespan` are those of its timeline."""

    span: int
    makespan: int


@takes(schedule=Schedule, costs=Costs)
@garbage_collection_paused()
def metrics(schedule: Schedule, costs: Costs) -> Metrics:
    """How long `schedule` takes under `costs`: `simulate` without the spans, and with the same errors."""
    graph, played = _played(schedule, costs)
    return metrics_of(graph, played, costs)


def metrics_of(graph: Graph, played: Played, costs: Costs) -> Metrics:
    """How long passes that were `played` take with the sums over replicas of `costs` beside them."""
    begin, end, _ = played
    sums = play_sums(planned_sums(graph, costs), end)
    rows = [
        (begin[first], max([end[stop - 1], *(one.end for one in summed)]))
        for (first, stop), summed in zip(pairwise(graph.first), sums, strict=True)
        if first < stop
    ]
    start = min((first for first, _ in rows), default=0)
    return Metrics(max((last - first for first, last in rows), default=0), max((last for _, last in rows), default=0) - start)


def _played(schedule: Schedule, costs: Costs) -> tuple[Graph, Played]:
    """The graph of `schedule`, and its passes as early as they can be."""
    costs.require_schedule(schedule)
    graph, order = checked(schedule)
    return graph, play(graph, order, *pass_times(graph, costs))


def pass_times(graph: Graph, costs: Costs) -> tuple[list[int], list[int]]:
    """By pass number and in ns, how long each step takes and how long messages are on their way: what `graph.play` wants."""
    stages = range(costs.num_stages)
    times = ByKind(lambda kind: [costs.time(kind, stage) for stage in stages])
    messages = ByKind(lambda kind: [costs.message_time(kind, stage) for stage in stages])
    if costs.shares:
        by_microbatch = ByKind(lambda kind: [costs.times(kind, stage) for stage in stages])
        takes = [by_microbatch[kind][stage][microbatch] for kind, stage, microbatch in graph.ops]
    else:
        takes = [times[kind][stage] for kind, stage, _ in graph.ops]
    delays = [messages[kind][stage] for kind, stage, _ in graph.ops]
    for first in graph.pairs:
        takes[first], takes[first + 1] = costs.step_time((graph.ops[first], graph.ops[first + 1])), 0
    return takes, delays


def whys(graph: Graph, after: list[int]) -> Iterator[Why]:
    """The reason each pass did not start earlier."""
    ops, rank, nothing = graph.ops, graph.rank, Why(Cause.NOTHING)
    for here, last in zip(rank, after, strict=True):
        yield nothing if last < 0 else Why(Cause.ROW if rank[last] == here else Cause.MESSAGE, ops[last])


def memory_steps(row: Sequence[Span], costs: Costs) -> tuple[tuple[int, int], ...]:
    """Bytes held by one rank over time, (time, bytes) at each change: forwards take at their start, other passes give back at their end."""
    return _steps(row, _changes(costs))


def _steps(row: Sequence[Span], changes: _Changes) -> tuple[tuple[int, int], ...]:
    held = _held([span[0] for span in row], changes)
    steps = [(row[0].start, 0)] if row else []
    before, from_start = 0, {kind for kind, traits in KINDS.items() if traits.fills_from_start}
    for (op, start, end, _), now in zip(row, held, strict=True):
        if now != before:
            steps.append((start if op[0] in from_start else end, now))
        before = now
    return tuple(steps)


@takes(schedule=Schedule, costs=Costs)
def peak_memory(schedule: Schedule, costs: Costs) -> tuple[int, ...]:
    """The most bytes of saved activations and pending weight work each rank holds; it depends on the order alone, not on times.

    Raises `InputError` for costs that do not fit the placement.

    >>> import zerobubble as zb
    >>> zb.simulation.peak_memory(zb.make("1f1b", 3, 6), zb.Costs.uniform(3))
    (3000000, 2000000, 1000000)
    """
    costs.require_schedule(schedule)
    changes = _changes(costs)
    return tuple(max(_held(row, changes), default=0) for row in schedule.rows)


@takes(schedule=Schedule, costs=Costs, limits=Limits)
def memory_faults(schedule: Schedule, costs: Costs, limits: Limits) -> tuple[Fault, ...]:
    """One fault for each rank that holds more than `limits` allow, saying how much is missing.

    Raises `InputError` when the limits are for another number of ranks.

    >>> import zerobubble as zb
    >>> limits = zb.Limits((2_000_000,) * 3)
    >>> [fault] = zb.simulation.memory_faults(zb.make("1f1b", 3, 6), zb.Costs.uniform(3), limits)
    >>> print(fault)
    rank 0 holds up to 3000000 bytes, 1000000 more than its limit of 2000000: choose a schedule that holds less
    """
    if len(limits.memory) != schedule.num_ranks:
        raise InputError(f"schedule {schedule.name!r} has {schedule.num_ranks} ranks, the limits describe {len(limits.memory)}")
    faults = []
    for rank, (peak, limit) in enumerate(zip(peak_memory(schedule, costs), limits.memory, strict=True)):
        if peak > limit:
            message = (
                f"rank {rank} holds up to {peak} bytes, {peak - limit} more than its limit of {limit}: choose a schedule that holds less"
            )
            faults.append(Fault("memory", message, rank))
    return tuple(faults)


def held_bytes(row: Sequence[Op], costs: Costs) -> list[int]:
    """The bytes that a rank holds once each pass of its row is done; forwards of a row that has nothing else hold nothing."""
    return _held(row, _changes(costs))


class _Changes(NamedTuple):
    """By how many bytes passes change what their rank holds; `lean` are forwards that a pass of such a kind computes again.

    By kind, stage and microbatch, of which there is only one where all are alike.
    """

    plain: ByKind[list[list[int]]]
    lean: ByKind[list[list[int]]]
    num_shares: int


def _changes(costs: Costs) -> _Changes:
    def by_stage(kind: Kind, again: Kind | None = None) -> list[list[int]]:
        stages = range(costs.num_stages)
        if costs.shares:
            return [costs.memory_changes(kind, stage, again) for stage in stages]
        return [[costs.memory_change(kind, stage, again)] for stage in stages]

    return _Changes(ByKind(by_stage), ByKind(lambda again: by_stage(Kind.F, again)), len(costs.shares) or 1)


def _held(row: Sequence[Op], changes: _Changes) -> list[int]:
    """Bytes held once each pass is done; inference forwards hold nothing."""
    forwards = kinds_making(Stuff.ACTIVATION)
    if all(op[0] in forwards for op in row):
        return [0] * len(row)
    plain, lean, count = changes
    again = recomputed(row)
    if not again:
        return list(accumulate([plain[kind][stage][j % count] for kind, stage, j in row]))
    return list(
        accumulate(
            (lean[again[stage, j]] if kind in forwards and (stage, j) in again else plain[kind])[stage][j % count] for kind, stage, j in row
        )
    )
