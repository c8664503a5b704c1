"""Timelines as a Chrome trace, for ui.perfetto.dev and chrome://tracing.

Each timeline is a process. Each rank has a thread for its passes, and a second one for overlapped passes, because slices of a thread must
not cross. Further threads have its messages, sums over replicas and copies to the host. Arrows are messages, and counters are memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from zerobubble.arguments import each, takes
from zerobubble.explain import Gap, WaitsFor
from zerobubble.ir import Op
from zerobubble.kinds import traits_of
from zerobubble.timeline import Copy, Mark, Message, Reduction, Span, Timeline, lanes, messages

NS_PER_US = 1000
Event = dict[str, Any]
Threads = dict[Op, int]


@takes(timelines=each(Timeline))
def perfetto_json(*timelines: Timeline, gaps: Sequence[Sequence[Sequence[Gap]]] = ()) -> str:
    """Return the trace of `timelines` as JSON text, with times in microseconds from the first start of each timeline.

    With the `gaps` of every timeline, idle time is shown by what a rank waits for.
    """
    flow_ids = count(1)
    events = [event for process, timeline in enumerate(timelines, 1) for event in _events(timeline, process, flow_ids)]
    for process, (timeline, rows) in enumerate(zip(timelines, gaps, strict=False), 1):
        events += [_wait(timeline, process, _thread(rank), gap) for rank, row in enumerate(rows) for gap in row]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}) + "\n"


def _events(timeline: Timeline, process: int, flow_ids: Iterator[int]) -> Iterator[Event]:
    yield _meta("process_name", process, {"name": f"{timeline.name} ({timeline.source})"})
    yield _meta("process_sort_index", process, {"sort_index": process})
    threads = _threads(timeline)
    for thread in sorted({_thread(rank) for rank in range(timeline.num_ranks)} | set(threads.values())):
        rank, lane = divmod(thread - 1, 2)
        yield _meta("thread_name", process, {"name": f"rank {rank}{', overlapped' * lane}"}, thread)
        yield _meta("thread_sort_index", process, {"sort_index": thread}, thread)
    for _, span in timeline.spans():
        yield _slice(timeline, process, threads[span.op], span)
    for message in messages(timeline):
        yield from _arrow(timeline, process, next(flow_ids), message, threads)
    for rank, marks in enumerate(timeline.marks):
        yield from _marked(timeline, process, rank, marks)
    for rank, row in enumerate(timeline.reductions):
        yield from _summed(timeline, process, rank, row)
    for rank, copies in enumerate(timeline.copies):
        yield from _copied(timeline, process, rank, copies)
    for rank, steps in enumerate(timeline.memory):
        for time, held in steps:
            name = f"memory of rank {rank}"
            yield {"ph": "C", "pid": process, "name": name, "ts": _us(timeline, time), "args": {"bytes": held}}


def _threads(timeline: Timeline) -> Threads:
    """Return the thread of each pass."""
    rows = enumerate(timeline.rows)
    return {span.op: _thread(rank, lane) for rank, row in rows for span, (lane, _) in zip(row, lanes(row), strict=True)}


def _thread(rank: int, lane: int = 0) -> int:
    """Return a thread number, counted from 1 because viewers treat thread 0 as the idle task."""
    return 2 * rank + lane + 1


def _us(timeline: Timeline, time: int) -> float:
    return (time - timeline.start) / NS_PER_US


def _meta(name: str, process: int, args: dict[str, Any], thread: int = 1) -> Event:
    return {"ph": "M", "pid": process, "tid": thread, "name": name, "args": args}


def _slice(timeline: Timeline, process: int, thread: int, span: Span) -> Event:
    op = span.op
    args = {"stage": op.stage, "microbatch": op.microbatch, "kind": str(op.kind), "what": traits_of(op.kind).phrase}
    return {
        "ph": "X",
        "pid": process,
        "tid": thread,
        "name": str(op),
        "cat": str(op.kind),
        "ts": _us(timeline, span.start),
        "dur": span.duration / NS_PER_US,
        "args": args | ({"why": str(span.why)} if span.why else {}),
    }


def _wait(timeline: Timeline, process: int, thread: int, gap: Gap) -> Event:
    """Return a slice of idle time, in the viewers' predefined gray, yellow or red."""
    color = {WaitsFor.PASS: "grey", WaitsFor.MESSAGE: "yellow", WaitsFor.HOST: "terrible"}[gap.waits_for]
    times = {"ts": _us(timeline, gap.start), "dur": (gap.end - gap.start) / NS_PER_US}
    name = f"idle: waits for {'the host' if gap.waits_for is WaitsFor.HOST else f'a {gap.waits_for}'}"
    common = {"ph": "X", "pid": process, "tid": thread, "name": name, "cat": "idle", "cname": color}
    return common | times | {"args": {"before": str(gap.op)}}


def _marked(timeline: Timeline, process: int, rank: int, marks: Sequence[Mark]) -> Iterator[Event]:
    """Yield what a rank did outside its passes, on a thread below all ranks."""
    thread = 2 * timeline.num_ranks + rank + 1
    if marks:
        yield _meta("thread_name", process, {"name": f"rank {rank}, messages and optimizer"}, thread)
        yield _meta("thread_sort_index", process, {"sort_index": thread}, thread)
    for mark in marks:
        name = f"{mark.doing} {mark.value}".strip()
        times = {"ts": _us(timeline, mark.start), "dur": mark.duration / NS_PER_US}
        yield {"ph": "X", "pid": process, "tid": thread, "name": name, "cat": mark.doing.value} | times


def _summed(timeline: Timeline, process: int, rank: int, row: Sequence[Reduction]) -> Iterator[Event]:
    """Yield the sums over replicas of a rank, on a thread below those of messages."""
    thread = 3 * timeline.num_ranks + rank + 1
    if row:
        yield _meta("thread_name", process, {"name": f"rank {rank}, sums over replicas"}, thread)
        yield _meta("thread_sort_index", process, {"sort_index": thread}, thread)
    for one in row:
        times = {"ts": _us(timeline, one.start), "dur": one.duration / NS_PER_US}
        name = f"sum of stage {one.stage}"
        yield {"ph": "X", "pid": process, "tid": thread, "name": name, "cat": "reduction"} | times | {"args": {"stage": one.stage}}


def _copied(timeline: Timeline, process: int, rank: int, lane: Sequence[Copy]) -> Iterator[Event]:
    """Yield the copies of a rank to the host and back, on a thread below those of sums over replicas."""
    thread = 4 * timeline.num_ranks + rank + 1
    if lane:
        yield _meta("thread_name", process, {"name": f"rank {rank}, copies"}, thread)
        yield _meta("thread_sort_index", process, {"sort_index": thread}, thread)
    for copy in lane:
        times = {"ts": _us(timeline, copy.start), "dur": copy.duration / NS_PER_US}
        name, args = f"{copy.stage}F{copy.microbatch} {copy.copying}", {"stage": copy.stage, "microbatch": copy.microbatch}
        yield {"ph": "X", "pid": process, "tid": thread, "name": name, "cat": "copy"} | times | {"args": args}


def _arrow(timeline: Timeline, process: int, number: int, message: Message, threads: Threads) -> Iterator[Event]:
    """Yield both ends of a message. It starts in the last nanosecond of its pass, because at the end the next slice has already begun."""
    made, used = message.made, message.used
    common = {"cat": "message", "name": str(message.value), "id": number, "pid": process}
    yield common | {"ph": "s", "tid": threads[made.op], "ts": _us(timeline, max(made.start, made.end - 1))}
    yield common | {"ph": "f", "bp": "e", "tid": threads[used.op], "ts": _us(timeline, used.start)}
