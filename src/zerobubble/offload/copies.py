"""Simulation of offloads: each rank copies to host memory and back on a lane that runs in parallel with its passes.

A rank has one lane for both directions, since copies both ways share its link. The lane runs its copies in a fixed order, by the step
before which each may begin. The runtime issues copies in the same order, so the simulation predicts which copies wait for which. Of copies
that may begin before the same step, the one that an earlier step needs comes first. No other order of these copies is quicker: the later
step waits for both copies anyway, and in the other order the earlier step would do so too. If the same step needs both, the copy to the
host comes first, because it frees the memory that the copy back then takes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from zerobubble.arguments import each, takes
from zerobubble.costs import Costs
from zerobubble.errors import InputError
from zerobubble.graph import Graph, Played, play
from zerobubble.ir import Schedule, Step
from zerobubble.kinds import traits_of
from zerobubble.lane import Lane, LaneWork, steps_of_ranks
from zerobubble.offload.offloads import HostLink, Offload, RankOffloads, SavedParts, offloadable_bytes, require_offloads, saved_parts
from zerobubble.reductions import planned_sums, play_sums
from zerobubble.simulation import busy_times, held_bytes, pass_times, whys
from zerobubble.timeline import Awaited, Copying, HostCopy, Span, Timeline, Why
from zerobubble.units import NS_PER_S
from zerobubble.verify import checked


class LaneCopy(NamedTuple):
    """A copy on a rank's lane; `earliest` and `needed` are as in `LaneWork`."""

    earliest: int
    copying: Copying
    needed: int
    stage: int
    microbatch: int


def copies_of(offloads: Sequence[Offload]) -> list[LaneCopy]:
    """Return the copies of a rank in lane order: by the step before which they may begin, then by the step that needs them."""
    away = [LaneCopy(offload.made + 1, Copying.TO_HOST, offload.freed, offload.stage, offload.microbatch) for offload in offloads]
    back = [LaneCopy(offload.back, Copying.FROM_HOST, offload.needed, offload.stage, offload.microbatch) for offload in offloads]
    return sorted([*away, *back], key=lambda copy: (copy.earliest, copy.needed, copy.copying is Copying.FROM_HOST, *copy[3:]))


def copy_works(schedule: Schedule, costs: Costs, plans: Sequence[RankOffloads], link: HostLink) -> list[list[LaneWork]]:
    """Return the copies of each rank as lane operations, to simulate them together with other lanes."""
    return [_works(copies_of(plan.offloads), saved_parts(steps, costs), link) for steps, plan in zip(schedule.steps, plans, strict=True)]


def _works(copies: Sequence[LaneCopy], parts: SavedParts, link: HostLink) -> list[LaneWork]:
    return [LaneWork(c.earliest, c.needed, link.time(parts[c.stage, c.microbatch].bytes, c.copying)) for c in copies]


@takes(schedule=Schedule, costs=Costs, plans=each(RankOffloads), link=HostLink)
def play_offloads(schedule: Schedule, costs: Costs, plans: Sequence[RankOffloads], link: HostLink) -> Timeline:
    """Return the timeline of `schedule` under `costs` with the offloads of `plans` over `link`, including copies and device memory.

    Raises as `simulate` does, and `InputError` for plans with `offload_faults`.

    >>> import zerobubble as zb
    >>> schedule, costs = zb.make("1f1b", 3, 6), zb.Costs.uniform(3)  # passes of 1 ms; a stage keeps 1 MB
    >>> link = zb.offload.HostLink(to_host=1e9, from_host=1e9)  # 1 MB takes 1 ms
    >>> plans = zb.offload.plan_offloads(schedule, costs, zb.Limits((2_000_000,) * 3), link)
    >>> timeline = zb.offload.play_offloads(schedule, costs, plans, link)
    >>> timeline.makespan, timeline.peak_bytes
    (24000000, 2000000)
    """
    costs.require_schedule(schedule)
    require_offloads(schedule, costs, plans)
    graph, order = checked(schedule)
    return OffloadPlayer(graph, order, schedule, costs, link).timeline([plan.offloads for plan in plans])


class OffloadPlayer:
    """Plays one schedule with many choices of offloads, which must be legal. Anything independent of the choice is computed once."""

    def __init__(
        self, graph: Graph, order: Sequence[int], schedule: Schedule, costs: Costs, link: HostLink, *, by_span: bool = False
    ) -> None:
        self._graph, self._order, self._costs, self._by_span = graph, order, costs, by_span
        self._schedule, self._link = schedule, link
        self._times = pass_times(graph, costs)
        self._numbers = steps_of_ranks(graph)
        self._sums = planned_sums(graph, costs)
        self.parts: list[SavedParts] = [saved_parts(steps, costs) for steps in schedule.steps]

    def _played(self, offloads: Sequence[Sequence[Offload]]) -> tuple[Played, list[Lane], list[list[LaneCopy]]]:
        copies = [copies_of(row) for row in offloads]
        lanes = [
            Lane(_works(row, parts, self._link), numbers) for row, parts, numbers in zip(copies, self.parts, self._numbers, strict=True)
        ]
        rank = self._graph.rank

        def earliest(number: int, end: Sequence[int]) -> int:
            return lanes[rank[number]].ready(number, end)

        return play(self._graph, self._order, *self._times, earliest=earliest), lanes, copies

    def price(self, offloads: Sequence[Sequence[Offload]]) -> tuple[int, int]:
        """Return the makespan with these offloads (or the longest span of a rank), and the sum of the end times of all ranks, in ns.

        The sum lets a search prefer a change that helps some ranks but not yet the slowest.
        """
        busy = busy_times(self._graph, self._played(offloads)[0], self._sums).values()
        begins, ends = [first for first, _ in busy], [last for _, last in busy]
        if self._by_span:
            return max((last - first for first, last in busy), default=0), sum(ends)
        return max(ends, default=0) - min(begins, default=0), sum(ends)

    def timeline(self, offloads: Sequence[Sequence[Offload]]) -> Timeline:
        """Return the timeline with these offloads."""
        graph, costs = self._graph, self._costs
        played, lanes, copies = self._played(offloads)
        spans = list(map(Span, graph.ops, played.begin, played.end, self._whys(played)))
        rows = tuple(tuple(spans[first:stop]) for first, stop in pairwise(graph.first))
        lane_copies = tuple(
            tuple(HostCopy(c.copying, c.stage, c.microbatch, *times) for c, times in zip(row, lane.played, strict=True))
            for row, lane in zip(copies, lanes, strict=True)
        )
        memory = tuple(
            tuple(_memory(row, steps, mine, lane, parts, costs))
            for row, steps, mine, lane, parts in zip(rows, self._schedule.steps, copies, lane_copies, self.parts, strict=True)
        )
        sums = play_sums(self._sums, played.end)
        return Timeline(
            self._schedule.name, rows, memory, reductions=sums if any(sums) else (), copies=lane_copies if any(lane_copies) else ()
        )

    def _whys(self, played: Played) -> Iterator[Why]:
        graph, delays = self._graph, self._times[1]
        for number, (why, last) in enumerate(zip(whys(graph, played.after), played.after, strict=True)):
            sent = delays[last] if why.cause is Awaited.MESSAGE else 0
            overlaps = number - 1 in graph.pairs
            # A pass that starts later than its predecessor and its messages allow has waited for the lane.
            yield why if last < 0 or overlaps or played.begin[number] == played.end[last] + sent else Why(Awaited.COPY)


def _memory(
    row: Sequence[Span], steps: Sequence[Step], copies: Sequence[LaneCopy], played: Sequence[HostCopy], parts: SavedParts, costs: Costs
) -> Iterator[tuple[int, int]]:
    """Yield the bytes on the device over time as (time, bytes). Between steps, offloaded parts are freed before parts come back.

    The order matters for the peak: a part that comes back may take the memory of one that was just freed.
    """
    if not row:
        return
    freed: dict[int, list[tuple[int, int]]] = defaultdict(list)
    back: dict[int, int] = defaultdict(int)
    for copy, done in zip(copies, played, strict=True):
        size = parts[copy.stage, copy.microbatch].bytes
        if copy.copying is Copying.TO_HOST:
            freed[copy.needed].append((done.end, size))
        else:
            back[copy.earliest] += size
    held_after = iter(held_bytes([span.op for span in row], costs))
    spans = iter(row)
    now, plain, over = 0, 0, row[0].start
    yield over, now
    for number, step in enumerate(steps):
        for end, size in freed.get(number, ()):
            over, now = max(over, end), now - size
            yield over, now
        if number in back:
            now += back[number]
            yield over, now
        for _ in step:
            span, held = next(spans), next(held_after)
            if held != plain:
                now += held - plain
                yield (span.start if traits_of(span.op.kind).fills_from_start else span.end), now
            plain, over = held, span.end


@takes(timeline=Timeline, costs=Costs)
def fit_link(timeline: Timeline, costs: Costs) -> HostLink:
    """Return the link that reproduces the time of the median copy of `timeline` in each direction; `costs` have the bytes of copies.

    The latency is 0, since the rates include it. Raises `InputError` if there is no copy in one direction, or none that took time.

    >>> import zerobubble as zb
    >>> schedule, costs = zb.make("1f1b", 3, 6), zb.Costs.uniform(3)
    >>> link = zb.offload.HostLink(to_host=1e9, from_host=2e9)
    >>> plans = zb.offload.plan_offloads(schedule, costs, zb.Limits((2_000_000,) * 3), link)
    >>> zb.offload.fit_link(zb.offload.play_offloads(schedule, costs, plans, link), costs)
    HostLink(to_host=1000000000.0, from_host=2000000000.0, latency=0)
    """
    rates = {}
    for copying in Copying:
        copies = [copy for row in timeline.copies for copy in row if copy.copying is copying]
        sizes = [offloadable_bytes(costs, copy.stage, copy.microbatch) for copy in copies]
        speeds = [size * NS_PER_S / copy.duration for size, copy in zip(sizes, copies, strict=True) if size and copy.duration]
        if not speeds:
            message = "timeline {timeline!r} has no copy {copying} that took time"
            raise InputError(message, timeline=timeline.name, copying=copying, remedy="pass the timeline of a step with offloads")
        rates[copying] = median(speeds)
    return HostLink(rates[Copying.TO_HOST], rates[Copying.FROM_HOST])
