"""Play a schedule against costs: every pass starts as soon as its rank is free and what it uses has arrived."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from zerobubble.bulk import in_bulk
from zerobubble.costs import Costs, Limits
from zerobubble.errors import Fault, InputError
from zerobubble.graph import Graph
from zerobubble.ir import Kind, Op, Schedule
from zerobubble.timeline import Cause, Span, Timeline, Why
from zerobubble.verify import checked


@in_bulk()
def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """The timeline of `schedule` under `costs`, each span with its `why`, each rank with its memory over time.

    A message takes `costs.comm` after its maker ended and never keeps a rank busy. The two passes of an overlapped step have the
    same span, as long as `costs.step_time` says. Raises `ScheduleError` with every fault when
    the schedule cannot run, `InputError` when the costs are for another number of stages.
    """
    if costs.num_stages != schedule.num_stages:
        raise InputError(f"schedule {schedule.name!r} has {schedule.num_stages} stages, the costs describe {costs.num_stages}")
    graph, order = checked(schedule)
    spans = _play(graph, order, costs)
    rows = tuple(tuple(spans[start:end]) for start, end in pairwise(graph.first))
    return Timeline(schedule.name, rows, tuple(memory_steps(row, costs) for row in rows))


def _play(graph: Graph, order: list[int], costs: Costs) -> list[Span]:
    """The span of every pass, by number."""
    ops, rank, needs, end = graph.ops, graph.rank, graph.needs, [0] * len(order)
    spans: list[Span] = [_UNPLAYED] * len(ops)
    times = {kind: [costs.time(kind, stage) for stage in range(costs.num_stages)] for kind in Kind}
    starts, pairs, comm = set(graph.first), graph.pairs, costs.comm
    for number in order:
        if spans[number] is not _UNPLAYED:
            continue
        kind, stage, _ = op = ops[number]
        begin, cause, last = (0, Cause.NOTHING, -1) if number in starts else (end[number - 1], Cause.ROW, number - 1)
        together = (number, number + 1) if number in pairs else (number,)
        for user in together:
            for need in needs[user]:
                arrival = end[need]
                if rank[need] != rank[number]:
                    arrival += comm[min(ops[user][1], ops[need][1])]
                if arrival > begin:
                    begin, cause, last = arrival, Cause.MESSAGE, need
        duration = times[kind][stage] if len(together) == 1 else costs.step_time((op, ops[number + 1]))
        why = Why(cause, ops[last] if last >= 0 else None)
        for user in together:
            end[user] = begin + duration
            spans[user] = Span(ops[user], begin, begin + duration, why)
    return spans


_UNPLAYED = Span(Op(Kind.F, 0, 0), 0, 0)


def memory_steps(row: Sequence[Span], costs: Costs) -> tuple[tuple[int, int], ...]:
    """Bytes held by one rank over time, (time, bytes) at each change: F takes at its start, other passes give back at their end."""
    held = _held([span.op for span in row], costs)
    steps = [(row[0].start, 0)] if row else []
    before = 0
    for span, now in zip(row, held, strict=True):
        if now != before:
            steps.append((span.start if span.op[0] is Kind.F else span.end, now))
        before = now
    return tuple(steps)


def peak_memory(schedule: Schedule, costs: Costs) -> tuple[int, ...]:
    """The most bytes of saved activations and pending weight work each rank holds; it depends on the order alone, not on times."""
    return tuple(max(_held(row, costs), default=0) for row in schedule.rows)


def memory_faults(schedule: Schedule, costs: Costs, limits: Limits) -> tuple[Fault, ...]:
    """One fault for each rank that holds more than `limits` allow, saying how much is missing.

    Raises `InputError` when the limits are for another number of ranks.
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


def _held(row: Sequence[Op], costs: Costs) -> list[int]:
    """Bytes held once each pass is done; inference forwards hold nothing."""
    if all(op[0] is Kind.F for op in row):
        return [0] * len(row)
    change = {kind: [costs.memory_change(kind, stage) for stage in range(costs.num_stages)] for kind in Kind}
    return list(accumulate(change[kind][stage] for kind, stage, _ in row))
