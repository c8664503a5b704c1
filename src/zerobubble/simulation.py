"""Simulation of a schedule under costs: times, memory, and the period of consecutive steps.

For the timeline of a schedule, call `zb.simulate`, which is `simulate` here. The other functions return memory, metrics and the period.

Every pass starts as soon as its rank is free and the values that it uses have arrived; see `graph.play`. Times are whole nanoseconds, so a
simulation is exact and two of them can be compared for equality. Memory depends on the order of the passes alone: within a rank, passes run
one after another, so times only stretch the curve. A forward allocates at its start and other passes release at their end, which makes the
peak an upper bound at any moment in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from math import ceil
from typing import NamedTuple

from zerobubble.arguments import WHOLE, each, optional, takes, wrong
from zerobubble.costs import Costs, Limits
from zerobubble.errors import Fault, InputError
from zerobubble.garbage_pause import garbage_collection_paused
from zerobubble.graph import Graph, Played, play
from zerobubble.ir import Op, Schedule
from zerobubble.kinds import KINDS, ByKind, Kind, ValueKind, kinds_making
from zerobubble.listing import listing
from zerobubble.reductions import RankSums, planned_sums, play_sums
from zerobubble.rules import recomputed
from zerobubble.timeline import Awaited, Span, Timeline, Why
from zerobubble.verify import checked

__all__ = ["Metrics", "memory_faults", "memory_steps", "metrics", "peak_memory", "period", "simulate"]

__dir__ = listing(__all__)


@takes(schedule=Schedule, costs=Costs)
@garbage_collection_paused()
def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Return the timeline of `schedule` under `costs`: a span with its cause for every pass, and the memory of each rank over time.

    A message arrives `costs.comm` after its pass ends. Messages and sums over replicas (`costs.reduce`) do not keep ranks busy. The two
    passes of an overlapped step have the same span, of length `costs.step_time`. Raises `ScheduleError` with every fault if the schedule
    cannot run, and `InputError` if the costs are for another number of stages or another placement.

    Arguments:
        schedule: the order to simulate.
        costs: times of passes and messages, and bytes, one entry per stage.

    >>> import zerobubble as zb
    >>> timeline = zb.simulate(zb.make("1f1b", 4, 8), zb.Costs.uniform(4, times=(10, 10, 8), comm=0.5))
    >>> timeline
    <Timeline 1f1b (simulated): 4 ranks, 64 spans, makespan 316 ms, bubble 29.11 % of the makespan>
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
    """Duration of a schedule, in ns: `span` and `makespan` as in its timeline."""

    span: int
    makespan: int


@takes(schedule=Schedule, costs=Costs)
@garbage_collection_paused()
def metrics(schedule: Schedule, costs: Costs) -> Metrics:
    """Return how long `schedule` takes under `costs`. Like `simulate` but faster, since it builds no timeline; raises the same errors."""
    graph, played = _played(schedule, costs)
    return metrics_of(graph, played, costs)


def metrics_of(graph: Graph, played: Played, costs: Costs, before: Sequence[int] = ()) -> Metrics:
    """Return how long `played` passes and the sums over replicas of `costs` take, with the ns of each rank `before` its first pass."""
    busy, before = busy_times(graph, played, planned_sums(graph, costs)), before or [0] * len(graph.first)
    return Metrics(max(last - first + before[rank] for rank, (first, last) in busy.items()), max(last for _, last in busy.values()))


def busy_times(graph: Graph, played: Played, planned: RankSums) -> dict[int, tuple[int, int]]:
    """Return when each rank with passes begins the first, and ends the last one and the last of its sums over replicas, in ns."""
    rows = enumerate(zip(pairwise(graph.first), play_sums(planned, played.end), strict=True))
    return {
        rank: (played.begin[first], max([played.end[stop - 1], *(stage_sum.end for stage_sum in sums)]))
        for rank, ((first, stop), sums) in rows
        if first < stop
    }


@takes(schedule=Schedule, costs=Costs, meets_at=each(optional(WHOLE)))
@garbage_collection_paused()
def period(schedule: Schedule, costs: Costs, meets_at: Sequence[int | None] = ()) -> int:
    """Return the time per step, in ns and rounded up, of consecutive steps of `schedule` under `costs`.

    A rank begins the next step as soon as it has finished its own part of this one, so steps overlap unless ranks synchronize in between,
    for example to compute the norm of all gradients. In max-plus algebra, a matrix maps the times at which ranks begin a step to the times
    at which they begin the next. The period is the largest mean weight of a cycle in it (Baccelli et al., Synchronization and Linearity,
    1992).

    Without synchronization the period is at most the longest span of a rank in a single step. It is rarely less, and never below the lower
    bound on spans. If all ranks synchronize before every step, the period is the makespan. Raises as `simulate` does, and `InputError` for
    a position outside its row.

    Arguments:
        schedule: the order of each step.
        costs: times of passes and messages, one entry per stage. Sums over replicas end before the next step of their rank.
        meets_at: for each rank, the position of the pass that waits until all ranks have finished the step before; None if no pass does.
            It is 0 if the optimizer needs the norm of all gradients, and the rollback point with post-update validation. By default no
            pass waits.

    >>> import zerobubble as zb
    >>> schedule, costs = zb.make("zb-v", 4, 8), zb.Costs.uniform(8, times=(10, 10, 8), comm=0.5, stages_per_rank=2)
    >>> zb.simulation.period(schedule, costs), zb.simulation.period(schedule, costs, [0] * 4)
    (238000000, 245500000)
    """
    costs.require_schedule(schedule)
    graph, order = checked(schedule)
    steps = _Steps(graph, order, costs, _meeting(schedule, meets_at))
    history = [steps.begins]
    for _ in steps.ranks:
        history.append(steps.ends(history[-1]))
        grown = {after - before for before, after in zip(history[-2], history[-1], strict=True)}
        if len(grown) == 1:  # the largest mean lies between the least and the most that a step adds
            return grown.pop()
    return _largest_mean(history)


def _largest_mean(history: Sequence[Sequence[int]]) -> int:
    """Return the largest mean weight of a cycle, rounded up, by Karp's formula. `history[k]` has the longest walk of k steps to each rank.

    The means are fractions, since a mean rounded before the comparison could select another cycle.
    """
    *before, last = history
    steps = len(before)
    means = [min(Fraction(last[rank] - ends[rank], steps - k) for k, ends in enumerate(before)) for rank in range(len(last))]
    return ceil(max(means))


def _meeting(schedule: Schedule, meets_at: Sequence[int | None]) -> Sequence[int | None]:
    if meets_at and len(meets_at) != schedule.num_ranks:
        message = "meets_at has {num_meets_at} positions, but the schedule has {schedule_ranks} ranks"
        raise InputError(message, num_meets_at=len(meets_at), schedule_ranks=schedule.num_ranks, remedy="pass one for each")
    for rank, (place, row) in enumerate(zip(meets_at, schedule.rows, strict=False)):
        if place is not None and not 0 <= place <= len(row):
            raise wrong(f"meets_at of rank {rank}", place, f"a position in its row, 0 to {len(row)}, or None")
    return meets_at or (None,) * schedule.num_ranks


class _Steps:
    """Plays a step, given the times at which ranks are free. `ranks` are those with passes."""

    def __init__(self, graph: Graph, order: Sequence[int], costs: Costs, meets_at: Sequence[int | None]) -> None:
        self._graph, self._order, self._costs = graph, order, costs
        self._takes, self._delays = pass_times(graph, costs)
        rows = list(pairwise(graph.first))
        self.ranks = [rank for rank, (first, stop) in enumerate(rows) if first < stop]
        self._firsts = [rows[rank][0] for rank in self.ranks]
        self._meets = {rows[rank][0] + place for rank, place in enumerate(meets_at) if place is not None}

    @property
    def begins(self) -> list[int]:
        """The time at which each of `ranks` begins the first step, in ns."""
        played = self._play([0] * len(self.ranks))
        return [played.begin[first] for first in self._firsts]

    def _play(self, free: Sequence[int]) -> Played:
        begins, last = dict(zip(self._firsts, free, strict=True)), max(free)

        def earliest(number: int, _: Sequence[int]) -> int:
            return max(begins.get(number, 0), last if number in self._meets else 0)

        return play(self._graph, self._order, self._takes, self._delays, earliest=earliest)

    def ends(self, free: Sequence[int]) -> list[int]:
        """Return when each of `ranks` finishes a step, in ns, if it may begin the step at the time in `free`."""
        return [last for _, last in busy_times(self._graph, self._play(free), planned_sums(self._graph, self._costs)).values()]


def _played(schedule: Schedule, costs: Costs) -> tuple[Graph, Played]:
    """Return the graph of `schedule` and the earliest times of its passes."""
    costs.require_schedule(schedule)
    graph, order = checked(schedule)
    return graph, play(graph, order, *pass_times(graph, costs))


def pass_times(graph: Graph, costs: Costs) -> tuple[list[int], list[int]]:
    """Return the duration of each step and the latency of each message, by pass number and in ns, as `graph.play` takes them."""
    stages = range(costs.num_stages)
    times = ByKind(lambda kind: [costs.time(kind, stage) for stage in stages])
    count = costs.num_different
    messages = ByKind(lambda kind: [costs.message_time(kind, stage) for stage in stages])
    if costs.are_alike:
        takes = [times[kind][stage] for kind, stage, _ in graph.ops]
    else:
        by_microbatch = ByKind(lambda kind: [costs.times(kind, stage) for stage in stages])
        takes = [by_microbatch[kind][stage][microbatch % count] for kind, stage, microbatch in graph.ops]
    delays = [costs.message_time(*op) for op in graph.ops] if costs.slices else [messages[kind][stage] for kind, stage, _ in graph.ops]
    for first in graph.pairs:
        takes[first], takes[first + 1] = costs.step_time((graph.ops[first], graph.ops[first + 1])), 0
    return takes, delays


def whys(graph: Graph, after: list[int]) -> Iterator[Why]:
    """Yield the reason why each pass did not start earlier."""
    ops, rank, nothing = graph.ops, graph.rank, Why(Awaited.NOTHING)
    for here, last in zip(rank, after, strict=True):
        yield nothing if last < 0 else Why(Awaited.ROW if rank[last] == here else Awaited.MESSAGE, ops[last])


@takes()
def memory_steps(row: Sequence[Span], costs: Costs) -> tuple[tuple[int, int], ...]:
    """Return the bytes held by one rank, whose passes are `row`, over time under `costs`, as (time, bytes) at each change.

    Forwards allocate at their start, other passes release at their end.
    """
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
    """Return the peak bytes of saved activations and pending weight work of `schedule` under `costs` on each rank; times do not matter.

    Raises `InputError` for costs that do not match the placement.

    >>> import zerobubble as zb
    >>> zb.simulation.peak_memory(zb.make("1f1b", 3, 6), zb.Costs.uniform(3))
    (3000000, 2000000, 1000000)
    """
    costs.require_schedule(schedule)
    changes = _changes(costs)
    return tuple(max(_held(row, changes), default=0) for row in schedule.rows)


@takes(schedule=Schedule, costs=Costs, limits=Limits)
def memory_faults(schedule: Schedule, costs: Costs, limits: Limits) -> tuple[Fault, ...]:
    """Return one fault for each rank that exceeds its limit of `limits` in `schedule` under `costs`, with the bytes in excess.

    Raises `InputError` if the limits are for another number of ranks.

    >>> import zerobubble as zb
    >>> limits = zb.Limits((2_000_000,) * 3)
    >>> [fault] = zb.simulation.memory_faults(zb.make("1f1b", 3, 6), zb.Costs.uniform(3), limits)
    >>> print(fault)
    rank 0 holds up to 3000000 bytes, 1000000 more than its limit of 2000000: choose a schedule that holds less
    """
    limits.require_ranks(schedule.num_ranks, f"schedule {schedule.name!r}")
    faults = []
    for rank, (peak, limit) in enumerate(zip(peak_memory(schedule, costs), limits.memory, strict=True)):
        if peak > limit:
            message = (
                f"rank {rank} holds up to {peak} bytes, {peak - limit} more than its limit of {limit}: choose a schedule that holds less"
            )
            faults.append(Fault("memory", message, rank))
    return tuple(faults)


def held_bytes(row: Sequence[Op], costs: Costs) -> list[int]:
    """Return the bytes that a rank holds after each pass of its row. In a row of forwards only, for inference, they are 0."""
    return _held(row, _changes(costs))


class _Changes(NamedTuple):
    """Changes of the bytes held by a rank, by kind of pass, stage and microbatch.

    `checkpointed` has the changes by recomputed forwards, by the kind of R. If all microbatches are equal, one entry stands for all.
    """

    plain: ByKind[list[list[int]]]
    checkpointed: ByKind[list[list[int]]]
    num_shares: int


def _changes(costs: Costs) -> _Changes:
    def by_stage(kind: Kind, recomputed_by: Kind | None = None) -> list[list[int]]:
        stages = range(costs.num_stages)
        if costs.are_alike:
            return [[costs.memory_change(kind, stage, recomputed_by)] for stage in stages]
        return [costs.memory_changes(kind, stage, recomputed_by) for stage in stages]

    return _Changes(ByKind(by_stage), ByKind(lambda recomputed_by: by_stage(Kind.F, recomputed_by)), costs.num_different)


def _held(row: Sequence[Op], changes: _Changes) -> list[int]:
    """Return the bytes held after each pass; forwards of inference hold nothing."""
    forwards = kinds_making(ValueKind.ACTIVATION)
    if all(op[0] in forwards for op in row):
        return [0] * len(row)
    plain, checkpointed, count = changes
    kinds = recomputed(row)
    if not kinds:
        return list(accumulate([plain[kind][stage][j % count] for kind, stage, j in row]))
    return list(
        accumulate(
            (checkpointed[kinds[stage, j]] if kind in forwards and (stage, j) in kinds else plain[kind])[stage][j % count]
            for kind, stage, j in row
        )
    )
