"""Finds what a rank waited for at every moment of a run or of its plan, for pictures."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from zerobubble.arguments import takes
from zerobubble.costs import Costs
from zerobubble.explain.replay import TimedOrder, free, measured, planned
from zerobubble.graph import Played
from zerobubble.ir import Op, Schedule
from zerobubble.timeline import Timeline


class WaitsFor(StrEnum):
    """The cause of an idle rank's wait: an unfinished pass on another rank, a message in transit, or the host."""

    PASS = "pass"
    MESSAGE = "message"
    HOST = "host"


class Gap(NamedTuple):
    """Idle time of a rank for one reason.

    Attributes:
        start: The beginning in ns from the timeline's origin.
        end: The end in ns from there.
        waits_for: What the rank waits for.
        op: The pass that it runs next.
    """

    start: int
    end: int
    waits_for: WaitsFor
    op: Op


@takes()
def gaps(schedule: Schedule, costs: Costs, run: Timeline) -> tuple[tuple[Gap, ...], ...]:
    """Per rank, all idle time of `run` before its last pass, cut where the reason changes: the pass, then its message, then the host.

    Args:
        schedule: The schedule.
        costs: The planned times.
        run: A measured timeline of the schedule, or the simulated one.

    Delays of messages and errors are as in `zb.diff`.
    """
    timed = measured(planned(schedule, costs), run)
    played = timed.play()
    by_rank: list[list[Gap]] = [[] for _ in run.rows]
    for step in timed.graph.steps():
        by_rank[timed.graph.rank[step[0]]] += _before(timed, played, step, run.start)
    return tuple(map(tuple, by_rank))


def _before(timed: TimedOrder, played: Played, step: tuple[int, ...], origin: int) -> list[Gap]:
    """The gaps before `step`; a reason that took no time is left out."""
    start, stop = free(timed, played.end, step), played.begin[step[0]]
    sent = max((played.end[maker] for _, maker in timed.messages(step)), default=start)
    arrived = max((played.end[maker] + timed.delays[maker] for _, maker in timed.messages(step)), default=start)
    edges = ((sent, WaitsFor.PASS), (arrived, WaitsFor.MESSAGE), (stop, WaitsFor.HOST))
    before = []
    for edge, waiting in edges:
        end = min(max(start, edge), stop)
        if end > start:
            before.append(Gap(origin + start, origin + end, waiting, timed.graph.ops[step[0]]))
        start = max(start, end)
    return before
