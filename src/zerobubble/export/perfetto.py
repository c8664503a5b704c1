"""Timelines as a Chrome trace, which ui.perfetto.dev and chrome://tracing open.

One process per timeline, one thread per rank, an arrow for each message between ranks, a counter for each rank's memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from typing import Any

from zerobubble.ir import Op
from zerobubble.rules import MOVES, RULES, Value, makers, uses
from zerobubble.timeline import Span, Timeline

NS_PER_US = 1000
Event = dict[str, Any]
Where = dict[Op, tuple[int, Span]]


def perfetto_json(*timelines: Timeline) -> str:
    """The trace of `timelines` as JSON text; times in microseconds, each timeline counted from its own first start."""
    flow_ids = count(1)
    events = [event for process, timeline in enumerate(timelines, 1) for event in _events(timeline, process, flow_ids)]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}) + "\n"


def _events(timeline: Timeline, process: int, flow_ids: Iterator[int]) -> Iterator[Event]:
    yield _meta("process_name", process, {"name": f"{timeline.name} ({timeline.source})"})
    yield _meta("process_sort_index", process, {"sort_index": process})
    for rank in range(timeline.num_ranks):
        yield _meta("thread_name", process, {"name": f"rank {rank}"}, rank)
        yield _meta("thread_sort_index", process, {"sort_index": rank}, rank)
    for rank, span in timeline.spans():
        yield _slice(timeline, process, rank, span)
    yield from _flows(timeline, process, flow_ids)
    for rank, steps in enumerate(timeline.memory):
        for time, held in steps:
            name = f"memory of rank {rank}"
            yield {"ph": "C", "pid": process, "name": name, "ts": _us(timeline, time), "args": {"bytes": held}}


def _us(timeline: Timeline, time: int) -> float:
    return (time - timeline.start) / NS_PER_US


def _thread(rank: int) -> int:
    """Threads count from 1: viewers take thread 0 for the idle task."""
    return rank + 1


def _meta(name: str, process: int, args: dict[str, Any], rank: int = 0) -> Event:
    return {"ph": "M", "pid": process, "tid": _thread(rank), "name": name, "args": args}


def _slice(timeline: Timeline, process: int, rank: int, span: Span) -> Event:
    op = span.op
    args = {"stage": op.stage, "microbatch": op.microbatch, "kind": op.kind.value, "what": RULES[op.kind].phrase}
    return {
        "ph": "X",
        "pid": process,
        "tid": _thread(rank),
        "name": str(op),
        "cat": op.kind.value,
        "ts": _us(timeline, span.start),
        "dur": span.duration / NS_PER_US,
        "args": args | ({"why": str(span.why)} if span.why else {}),
    }


def _flows(timeline: Timeline, process: int, flow_ids: Iterator[int]) -> Iterator[Event]:
    where: Where = {span.op: (rank, span) for rank, span in timeline.spans()}
    num_stages = 1 + max((op.stage for op in where), default=0)
    for op, (rank, span) in where.items():
        for value in uses(op, num_stages):
            source = _maker(value, where)
            if value.stuff in MOVES and source is not None and source[0] != rank:
                yield from _arrow(timeline, process, next(flow_ids), (value, source, (rank, span)))


def _maker(value: Value, where: Where) -> tuple[int, Span] | None:
    return next((where[op] for op in makers(value) if op in where), None)


def _arrow(timeline: Timeline, process: int, number: int, message: tuple[Value, tuple[int, Span], tuple[int, Span]]) -> Iterator[Event]:
    """Both ends of a message. It leaves in its maker's last nanosecond, because at the end the next slice has already begun."""
    value, (source, made), (destination, used) = message
    common = {"cat": "message", "name": str(value), "id": number, "pid": process}
    yield common | {"ph": "s", "tid": _thread(source), "ts": _us(timeline, max(made.start, made.end - 1))}
    yield common | {"ph": "f", "bp": "e", "tid": _thread(destination), "ts": _us(timeline, used.start)}
