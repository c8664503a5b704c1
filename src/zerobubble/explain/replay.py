"""Play a schedule's order with given times.

Replacing one part of the planned times after another explains how a run differs from its plan.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median_low

from zerobubble.costs import Costs
from zerobubble.errors import InputError
from zerobubble.graph import Graph, Played, play
from zerobubble.ir import Schedule
from zerobubble.reductions import RankSums, measured_sums, planned_sums, play_sums, stage_sums
from zerobubble.rules import SENT_BETWEEN_STAGES, makers, uses
from zerobubble.simulation import pass_times
from zerobubble.timeline import Doing, Timeline
from zerobubble.verify import checked


@dataclass(frozen=True)
class TimedOrder:
    """A schedule with the times of its passes, by pass number in ns, in an order in which they can be played.

    `takes` is the time of the step that begins with a pass, 0 for the second pass of a step. `delays` is how long after a pass its
    message is with the rank that uses it. `lags` is how long a step starts after its rank is free and its messages are there. `sums`
    are the sums over replicas of each rank.
    """

    graph: Graph
    order: Sequence[int]
    takes: Sequence[int]
    delays: Sequence[int]
    lags: Sequence[int]
    sums: RankSums

    def messages(self, step: Sequence[int]) -> Iterator[tuple[int, int]]:
        """The messages that a step waits for, as (user, maker)."""
        rank = self.graph.rank
        return ((user, need) for user in step for need in self.graph.needs[user] if rank[need] != rank[user])

    def play(self) -> Played:
        """Every pass as early as its row, its messages and its lag let it run."""
        return play(self.graph, self.order, self.takes, self.delays, self.lags)

    @property
    def makespan(self) -> int:
        """From the first begin to the last end, in ns."""
        played = self.play()
        sums = [total.end for row in play_sums(self.sums, played.end) for total in row]
        return max([*played.end, *sums], default=0) - min(played.begin, default=0)

    def work(self) -> list[int]:
        """The time each rank is busy."""
        busy = [0] * (len(self.graph.first) - 1)
        for step in self.graph.steps():
            busy[self.graph.rank[step[0]]] += self.takes[step[0]]
        return busy


def planned(schedule: Schedule, costs: Costs) -> TimedOrder:
    """`schedule` with the times of `costs`. Raises as `simulate` does."""
    costs.require_schedule(schedule)
    graph, order = checked(schedule)
    takes, delays = pass_times(graph, costs)
    return TimedOrder(graph, order, takes, delays, [0] * len(takes), planned_sums(graph, costs))


def measured(plan: TimedOrder, run: Timeline) -> TimedOrder:
    """The order of `plan` with the times of `run`: playing it gives the run back, to the ns.

    A message's delay is measured where its rank had nothing to do but wait for it: until it was taken, as the run's marks say, or else
    until the step began. Any other message counts with the median delay of those measured between the same stages (with the plan's
    where there is none), but never as later than it was taken. What then lies between a step's start and the moment from which it
    could run is its lag.

    Raises `InputError` unless every rank ran the passes of the plan in the plan's order.
    """
    _require_same_passes(plan.graph, run)
    begin, end = _spans(plan, run)
    takes, lags = [0] * len(begin), [0] * len(begin)
    for first, *_ in plan.graph.steps():
        takes[first] = end[first] - begin[first]
    exact = replace(plan, takes=takes, delays=_delays(plan, begin, end, _taken(plan.graph, run)))
    for step in exact.graph.steps():
        lags[step[0]] = begin[step[0]] - ready(exact, end, step)
    return replace(exact, lags=lags, sums=_sums(plan.graph, run, end))


def _sums(graph: Graph, run: Timeline, end: Sequence[int]) -> RankSums:
    rows = run.reductions or ((),) * run.num_ranks
    for rank, (row, planned) in enumerate(zip(rows, stage_sums(graph), strict=True)):
        foreign = sorted({part.stage for part in row} - {part.stage for part in planned})
        if foreign:
            summed = f"the run sums stage {foreign[0]} on rank {rank}, which does not train it"
            raise InputError("{fault}", fault=summed, remedy="compare a run with the schedule it ran")
    return measured_sums(graph, rows, end, run.start)


def waits_for_copies(exact: TimedOrder, run: Timeline) -> list[int]:
    """For each step of `run`, the part of its `measured` lag before the end of the last copy of its rank that ended within the lag.

    A run does not record which step waited for which copy.
    """
    waits = [0] * len(exact.lags)
    begin = exact.play().begin
    ends = [sorted(copy.end - run.start for copy in run.copies_of(rank)) for rank in range(run.num_ranks)]
    for first, *_ in exact.graph.steps():
        mine, lag = ends[exact.graph.rank[first]], exact.lags[first]
        ended = bisect_right(mine, begin[first])
        waits[first] = max(0, mine[ended - 1] - begin[first] + lag) if ended else 0
    return waits


def free(timed: TimedOrder, end: Sequence[int], step: Sequence[int]) -> int:
    """When the rank of `step` is done with what comes before it."""
    return 0 if step[0] in timed.graph.first else end[step[0] - 1]


def ready(timed: TimedOrder, end: Sequence[int], step: Sequence[int]) -> int:
    """When the rank of `step` is free and every message it waits for is there."""
    return max(free(timed, end, step), *(end[maker] + timed.delays[maker] for _, maker in timed.messages(step)), 0)


def _require_same_passes(graph: Graph, run: Timeline) -> None:
    rows = [graph.ops[first:stop] for first, stop in pairwise(graph.first)]
    if len(rows) != run.num_ranks:
        raise InputError(
            "the plan has {num_ranks} ranks, the run {got}: compare a run with the schedule it ran", num_ranks=len(rows), got=run.num_ranks
        )
    for rank, (row, spans) in enumerate(zip(rows, run.rows, strict=True)):
        ran = [span.op for span in spans]
        if ran != row:
            place = next((i for i, pair in enumerate(zip(row, ran, strict=False)) if pair[0] != pair[1]), min(len(row), len(ran)))
            wanted, got = (str(ops[place]) if place < len(ops) else "nothing more" for ops in (row, ran))
            message = "rank {rank} of the plan runs {wanted} at place {place}, the run ran {got}"
            raise InputError(message, rank=rank, wanted=wanted, place=place, got=got, remedy="compare a run with the schedule it ran")


def _spans(plan: TimedOrder, run: Timeline) -> tuple[list[int], list[int]]:
    """When the passes began and ended, from the run's first start; the passes of a step have the times of the step."""
    begin = [span.start - run.start for row in run.rows for span in row]
    end = [span.end - run.start for row in run.rows for span in row]
    for step in plan.graph.steps():
        whole = min(begin[number] for number in step), max(end[number] for number in step)
        for number in step:
            begin[number], end[number] = whole
    return begin, end


def _taken(graph: Graph, run: Timeline) -> dict[int, int]:
    """The time when each message was taken, by its maker, if the run's marks have it."""
    number_of = {op: number for number, op in enumerate(graph.ops)}
    num_stages = 1 + max((op.stage for op in graph.ops), default=0)
    maker_of = {
        str(value): number_of[maker]
        for op in graph.ops
        for value in uses(op, num_stages)
        if value.value_kind in SENT_BETWEEN_STAGES
        for maker in makers(value)
        if maker in number_of
    }
    marks = (mark for row in run.marks for mark in row if mark.doing is Doing.WAIT)
    return {maker_of[mark.value]: mark.end - run.start for mark in marks if mark.value in maker_of}


def _delays(plan: TimedOrder, begin: Sequence[int], end: Sequence[int], taken: Mapping[int, int]) -> list[int]:
    delays, ops = list(plan.delays), plan.graph.ops
    waited: dict[tuple[int, int], list[int]] = defaultdict(list)
    bounded: list[tuple[int, tuple[int, int]]] = []
    for step in plan.graph.steps():
        messages = list(plan.messages(step))
        last = max((end[maker] for _, maker in messages), default=0)
        for user, maker in messages:
            sent, link = end[maker], (ops[maker].stage, ops[user].stage)
            delays[maker] = taken.get(maker, begin[step[0]]) - sent
            if sent >= free(plan, end, step) and (maker in taken or sent == last):
                waited[link].append(delays[maker])
            else:
                bounded.append((maker, link))
    for maker, link in bounded:
        delays[maker] = min(delays[maker], median_low(waited[link]) if link in waited else plan.delays[maker])
    return delays
