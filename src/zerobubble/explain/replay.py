"""Plays a schedule's order with given times: a run is told apart from its plan by exchanging one part of the times after another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median_low
from typing import NamedTuple

from zerobubble.costs import Costs
from zerobubble.errors import InputError
from zerobubble.graph import Graph
from zerobubble.ir import Schedule
from zerobubble.rules import MOVES, makers, uses
from zerobubble.timeline import Doing, Timeline
from zerobubble.verify import checked

Times = Sequence[int]


@dataclass(frozen=True)
class Score:
    """A schedule ready to be played: its graph, an order of all passes, and the times of each pass by its number, in ns.

    `takes` is the time of the step that begins with a pass. `delays` is how long after a pass its message is with the rank that uses
    it. `lags` is how long a step starts after its rank is free and its messages are there.
    """

    graph: Graph
    order: Sequence[int]
    takes: Times
    delays: Times
    lags: Times

    def steps(self) -> Iterator[tuple[int, ...]]:
        """The numbers of the passes of each step, row after row."""
        pairs = self.graph.pairs
        for number in range(len(self.graph.ops)):
            if number - 1 not in pairs:
                yield (number, number + 1) if number in pairs else (number,)

    def messages(self, step: Sequence[int]) -> Iterator[tuple[int, int]]:
        """The messages that a step waits for, as (user, maker)."""
        rank = self.graph.rank
        return ((user, need) for user in step for need in self.graph.needs[user] if rank[need] != rank[user])

    def work(self) -> list[int]:
        """The time each rank is busy."""
        busy = [0] * (len(self.graph.first) - 1)
        for step in self.steps():
            busy[self.graph.rank[step[0]]] += self.takes[step[0]]
        return busy


class Played(NamedTuple):
    """When each pass begins and ends, by number."""

    begin: list[int]
    end: list[int]

    @property
    def makespan(self) -> int:
        return max(self.end, default=0) - min(self.begin, default=0)


def planned(schedule: Schedule, costs: Costs) -> Score:
    """The score of `schedule` with the times of `costs`. Raises as `simulate` does."""
    costs.require_fit(schedule.placement, f"schedule {schedule.name!r}")
    graph, order = checked(schedule)
    none = [0] * len(graph.ops)
    score = Score(graph, order, none, none, none)
    takes, delays = list(none), list(none)
    for step in score.steps():
        takes[step[0]] = costs.step_time(tuple(graph.ops[number] for number in step))
        for user, maker in score.messages(step):
            delays[maker] = costs.comm[min(graph.ops[user].stage, graph.ops[maker].stage)]
    return replace(score, takes=takes, delays=delays)


def measured(plan: Score, run: Timeline) -> Score:
    """The score of `plan` with the times of `run`: playing it gives the run back, to the ns.

    A message's delay is measured where its rank had nothing to do but wait for it: until it was taken, as the run's marks tell, or else
    until the step began. Any other message counts with the median delay of those measured between the same stages (with the plan's
    where there is none), but never as later than it was taken. What then lies between a step's start and the moment from which it
    could run is its lag.

    Raises `InputError` unless every rank ran the passes of the plan in the plan's order.
    """
    _require_same_passes(plan.graph, run)
    played = _spans(plan, run)
    takes = [end - begin for begin, end in zip(*played, strict=True)]
    delays = _delays(plan, played, _taken(plan.graph, run))
    exact = replace(plan, takes=takes, delays=delays)
    lags = [0] * len(takes)
    for step in exact.steps():
        lags[step[0]] = played.begin[step[0]] - ready(exact, played.end, step)
    return replace(exact, lags=lags)


def play(score: Score) -> Played:
    """Every pass as early as its row, its messages and its lag let it run."""
    played = Played([0] * len(score.graph.ops), [0] * len(score.graph.ops))
    begin, end = played
    pairs = score.graph.pairs
    for number in score.order:
        if number - 1 in pairs:
            begin[number], end[number] = begin[number - 1], end[number - 1]
            continue
        step = (number, number + 1) if number in pairs else (number,)
        begin[number] = ready(score, end, step) + score.lags[number]
        end[number] = begin[number] + score.takes[number]
    return played


def free(score: Score, end: Times, step: Sequence[int]) -> int:
    """When the rank of `step` is done with what comes before it."""
    return 0 if step[0] in score.graph.first else end[step[0] - 1]


def ready(score: Score, end: Times, step: Sequence[int]) -> int:
    """When the rank of `step` is free and every message it waits for is there."""
    return max(free(score, end, step), *(end[maker] + score.delays[maker] for _, maker in score.messages(step)), 0)


def _require_same_passes(graph: Graph, run: Timeline) -> None:
    rows = [graph.ops[first:stop] for first, stop in pairwise(graph.first)]
    if len(rows) != run.num_ranks:
        raise InputError(f"the plan has {len(rows)} ranks, the run {run.num_ranks}: compare a run with the schedule it ran")
    for rank, (row, spans) in enumerate(zip(rows, run.rows, strict=True)):
        ran = [span.op for span in spans]
        if ran != row:
            place = next((i for i, pair in enumerate(zip(row, ran, strict=False)) if pair[0] != pair[1]), min(len(row), len(ran)))
            wanted, got = (str(ops[place]) if place < len(ops) else "nothing more" for ops in (row, ran))
            raise InputError(
                f"rank {rank} of the plan runs {wanted} at place {place}, the run ran {got}: compare a run with the schedule it ran"
            )


def _spans(plan: Score, run: Timeline) -> Played:
    """When the passes ran, from the run's first start; the passes of a step have the times of the step."""
    begin = [span.start - run.start for row in run.rows for span in row]
    end = [span.end - run.start for row in run.rows for span in row]
    for step in plan.steps():
        whole = min(begin[number] for number in step), max(end[number] for number in step)
        for number in step:
            begin[number], end[number] = whole
    return Played(begin, end)


def _taken(graph: Graph, run: Timeline) -> dict[int, int]:
    """By its maker, when each message was taken, as far as the run's marks tell."""
    number_of = {op: number for number, op in enumerate(graph.ops)}
    num_stages = 1 + max((op.stage for op in graph.ops), default=0)
    maker_of = {
        str(value): number_of[maker]
        for op in graph.ops
        for value in uses(op, num_stages)
        if value.stuff in MOVES
        for maker in makers(value)
        if maker in number_of
    }
    marks = (mark for row in run.marks for mark in row if mark.doing is Doing.WAIT)
    return {maker_of[mark.value]: mark.end - run.start for mark in marks if mark.value in maker_of}


def _delays(plan: Score, played: Played, taken: Mapping[int, int]) -> list[int]:
    delays, ops = list(plan.delays), plan.graph.ops
    known: dict[tuple[int, int], list[int]] = defaultdict(list)
    bounded: list[tuple[int, tuple[int, int]]] = []
    for step in plan.steps():
        found = list(plan.messages(step))
        last = max((played.end[maker] for _, maker in found), default=0)
        for user, maker in found:
            made, link = played.end[maker], (ops[maker].stage, ops[user].stage)
            delays[maker] = taken.get(maker, played.begin[step[0]]) - made
            if made >= free(plan, played.end, step) and (maker in taken or made == last):
                known[link].append(delays[maker])
            else:
                bounded.append((maker, link))
    for maker, link in bounded:
        delays[maker] = min(delays[maker], median_low(known[link]) if link in known else plan.delays[maker])
    return delays
