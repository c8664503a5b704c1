"""Play a schedule against costs: every pass starts as soon as its rank is free and what it uses has arrived."""

from __future__ import annotations

from zerobubble.costs import Costs
from zerobubble.errors import InputError, ScheduleError
from zerobubble.graph import Graph, resolve, walk
from zerobubble.ir import Kind, Schedule
from zerobubble.timeline import Cause, Span, Timeline, Why
from zerobubble.verify import schedule_faults


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """The timeline of `schedule` under `costs`, each span with its `why`, each rank with its memory over time.

    A message takes `costs.comm` after its maker ended and never keeps a rank busy. Raises `ScheduleError` with every fault when
    the schedule cannot run, `InputError` when the costs are for another number of stages.
    """
    if costs.num_stages != schedule.num_stages:
        raise InputError(f"schedule {schedule.name!r} has {schedule.num_stages} stages, the costs describe {costs.num_stages}")
    graph = _legal(schedule)
    order, _ = walk(graph)
    start, end, why = [0] * len(order), [0] * len(order), [Why(Cause.NOTHING)] * len(order)
    times = {kind: [costs.time(kind, stage) for stage in range(costs.num_stages)] for kind in Kind}
    ops, rank, first = graph.ops, graph.rank, graph.first
    for number in order:
        kind, stage, _ = ops[number]
        here = rank[number]
        begin = end[number - 1] if number > first[here] else 0
        reason = Why(Cause.ROW, ops[number - 1]) if number > first[here] else Why(Cause.NOTHING)
        for need in graph.needs[number]:
            remote = rank[need] != here
            arrival = end[need] + (costs.comm[min(stage, ops[need].stage)] if remote else 0)
            if arrival > begin:
                begin, reason = arrival, Why(Cause.MESSAGE if remote else Cause.LOCAL, ops[need])
        start[number], end[number], why[number] = begin, begin + times[kind][stage], reason
    rows = tuple(tuple(Span(ops[i], start[i], end[i], why[i]) for i in range(first[r], first[r + 1])) for r in range(schedule.num_ranks))
    return Timeline(schedule.name, rows, tuple(memory_steps(row, costs) for row in rows))


def _legal(schedule: Schedule) -> Graph:
    faults = schedule_faults(schedule)
    if faults:
        raise ScheduleError(faults, schedule.name)
    return resolve(schedule)


def memory_steps(row: tuple[Span, ...], costs: Costs) -> tuple[tuple[int, int], ...]:
    """Bytes held by one rank over time, (time, bytes) at each change: F takes at its start, other passes give back at their end."""
    held = 0
    current: dict[tuple[int, int], int] = {}
    steps = [(row[0].start, 0)] if row else []
    backward = any(span.op.kind is not Kind.F for span in row)
    for span in row:
        kind, stage, microbatch = span.op
        after = costs.memory_after(kind, stage) if backward else 0
        change = after - current.get((stage, microbatch), 0)
        current[stage, microbatch] = after
        if change:
            held += change
            steps.append((span.start if kind is Kind.F else span.end, held))
    return tuple(steps)


def peak_memory(schedule: Schedule, costs: Costs) -> tuple[int, ...]:
    """The most bytes of saved activations and pending weight work each rank holds; it depends on the order alone, not on times."""
    rows = (tuple(Span(op, i, i + 1) for i, op in enumerate(row)) for row in schedule.rows)
    return tuple(max((held for _, held in memory_steps(row, costs)), default=0) for row in rows)
