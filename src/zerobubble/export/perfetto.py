"""Timelines as a Chrome trace, for ui.perfetto.dev and chrome://tracing.

Each timeline is a process. Each rank has a thread for its passes, and a second one for overlapped passes, because slices of a thread must
not cross. Further threads have its messages, sums over replicas and copies to the host. Arrows are messages, and counters are memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any, TypeVar

from zerobubble.arguments import each, takes
from zerobubble.explain import Gap, WaitsFor
from zerobubble.ir import Op
from zerobubble.kinds import traits_of
from zerobubble.timeline import HostCopy, Mark, Message, ReplicaSum, Span, Timeline, lanes, messages

NS_PER_US = 1000
Event = dict[str, Any]
Threads = dict[Op, int]
Label = tuple[str, str, dict[str, Any]]
Boxed = TypeVar("Boxed", Mark, ReplicaSum, HostCopy)


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
        yield from _named_thread(process, thread, f"rank {timeline.number_of(rank)}{', overlapped' * lane}")
    for _, span in timeline.spans():
        yield _slice(timeline, process, threads[span.op], span)
    for message in messages(timeline):
        yield from _arrow(timeline, process, next(flow_ids), message, threads)
    yield from _below(timeline, process, 2, "messages and optimizer", timeline.marks, _of_mark)
    yield from _below(timeline, process, 3, "sums over replicas", timeline.reductions, _of_sum)
    yield from _below(timeline, process, 4, "copies", timeline.copies, _of_copy)
    for rank, steps in enumerate(timeline.memory):
        for time, held in steps:
            name = f"memory of rank {timeline.number_of(rank)}"
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


def _named_thread(process: int, thread: int, name: str) -> Iterator[Event]:
    """Yield the name of a thread, and its place among the others: they are in the order of their numbers."""
    yield _meta("thread_name", process, {"name": name}, thread)
    yield _meta("thread_sort_index", process, {"sort_index": thread}, thread)


def _box(timeline: Timeline, process: int, thread: int, box: Span | Gap | Mark | ReplicaSum | HostCopy, label: Label) -> Event:
    """Return the slice of what takes time, with the name, the category and the other fields of its label."""
    name, category, others = label
    times = {"ts": _us(timeline, box.start), "dur": (box.end - box.start) / NS_PER_US}
    return {"ph": "X", "pid": process, "tid": thread, "name": name, "cat": category, **times, **others}


def _slice(timeline: Timeline, process: int, thread: int, span: Span) -> Event:
    op = span.op
    args = {"stage": op.stage, "microbatch": op.microbatch, "kind": str(op.kind), "what": traits_of(op.kind).phrase}
    args |= {"why": str(span.why)} if span.why else {}
    return _box(timeline, process, thread, span, (str(op), str(op.kind), {"args": args}))


def _wait(timeline: Timeline, process: int, thread: int, gap: Gap) -> Event:
    """Return a slice of idle time, in the viewers' predefined gray, yellow or red."""
    color = {WaitsFor.PASS: "grey", WaitsFor.MESSAGE: "yellow", WaitsFor.HOST: "terrible"}[gap.waits_for]
    name = f"idle: waits for {'the host' if gap.waits_for is WaitsFor.HOST else f'a {gap.waits_for}'}"
    return _box(timeline, process, thread, gap, (name, "idle", {"cname": color, "args": {"before": str(gap.op)}}))


def _below(
    timeline: Timeline, process: int, place: int, what: str, rows: Sequence[Sequence[Boxed]], label: Callable[[Boxed], Label]
) -> Iterator[Event]:
    """Yield what ranks did outside their passes, each rank on a thread of its own below the threads of passes."""
    for rank, row in enumerate(rows):
        thread = place * timeline.num_ranks + rank + 1
        if row:
            yield from _named_thread(process, thread, f"rank {timeline.number_of(rank)}, {what}")
        for box in row:
            yield _box(timeline, process, thread, box, label(box))


def _of_mark(mark: Mark) -> Label:
    return f"{mark.doing} {mark.value}".strip(), mark.doing.value, {}


def _of_sum(replica_sum: ReplicaSum) -> Label:
    return f"sum of stage {replica_sum.stage}", "reduction", {"args": {"stage": replica_sum.stage}}


def _of_copy(copy: HostCopy) -> Label:
    return f"{copy.stage}F{copy.microbatch} {copy.copying}", "copy", {"args": {"stage": copy.stage, "microbatch": copy.microbatch}}


def _arrow(timeline: Timeline, process: int, number: int, message: Message, threads: Threads) -> Iterator[Event]:
    """Yield both ends of a message. It starts in the last nanosecond of its pass, because at the end the next slice has already begun."""
    maker, user = message.made, message.used
    common = {"cat": "message", "name": str(message.value), "id": number, "pid": process}
    yield common | {"ph": "s", "tid": threads[maker.op], "ts": _us(timeline, max(maker.start, maker.end - 1))}
    yield common | {"ph": "f", "bp": "e", "tid": threads[user.op], "ts": _us(timeline, user.start)}
