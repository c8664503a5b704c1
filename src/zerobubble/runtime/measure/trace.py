"""Gathers what every rank did into one measured timeline with aligned clocks, on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from zerobubble.ir import Op
from zerobubble.rules import Value
from zerobubble.runtime.measure.clock import DeviceClock, HostClock, Instant
from zerobubble.runtime.transport.contact import exchanging
from zerobubble.runtime.transport.control import Topic
from zerobubble.runtime.transport.peers import Peers
from zerobubble.timeline import Copying, Doing, HostCopy, Mark, ReplicaSum, Span, Timeline

PINGS = 8


@dataclass(frozen=True, slots=True)
class ClockReading:
    """A reading of a rank's clock in nanoseconds; 0 in a ping, which asks for one."""

    topic: ClassVar[Topic] = Topic.CLOCK

    nanoseconds: int = 0

    def numbers(self) -> tuple[float]:
        return (float(self.nanoseconds),)

    @classmethod
    def read(cls, numbers: Tensor) -> ClockReading:
        return cls(int(numbers.item()))


class Records(NamedTuple):
    """What one rank recorded in a step, in `perf_counter_ns`.

    Passes; (time, bytes) held; messages; optimizer steps; (stage, begin, end) of sums over replicas; copies to and from the host, with
    stage and microbatch.
    """

    spans: Sequence[tuple[Op, int, int]]
    memory: Sequence[tuple[int, int]] = ()
    messages: Sequence[tuple[Doing, Value, int, int]] = ()
    optimizer: Sequence[tuple[int, int]] = ()
    reductions: Sequence[tuple[int, int, int]] = ()
    copies: Sequence[tuple[Copying, int, int, int, int]] = ()

    def shifted(self, shift: int) -> tuple[list[Any], list[Any], list[Any], list[Any], list[Any]]:
        """Returns spans, memory, marks, sums over replicas and copies as plain lists, `shift` ns later."""
        spans = [(str(op), begin + shift, end + shift) for op, begin, end in self.spans]
        messages = [(doing.value, begin + shift, end + shift, str(value)) for doing, value, begin, end in self.messages]
        optimizer = [(Doing.OPTIMIZER.value, begin + shift, end + shift, "") for begin, end in self.optimizer]
        sums = [(stage, begin + shift, end + shift) for stage, begin, end in self.reductions]
        copies = [(way.value, stage, microbatch, begin + shift, end + shift) for way, stage, microbatch, begin, end in self.copies]
        return spans, [(time + shift, held) for time, held in self.memory], messages + optimizer, sums, copies


class RawRecords(NamedTuple):
    """What an executor notes in a step, with instants of its clock, and microbatches by their place in the program, which `order` maps.

    Reading it takes far longer than noting it, so `Telemetry` reads it in another thread.
    """

    order: Sequence[int]
    spans: Sequence[tuple[Op, Instant, Instant]]
    memory: Sequence[tuple[Instant, int]]
    messages: Sequence[tuple[Doing, Value, Instant, Instant]]
    optimizer: Sequence[tuple[Instant, Instant]]
    reductions: Sequence[tuple[int, Instant, Instant]]
    copies: Sequence[tuple[Copying, int, int, tuple[Instant, Instant]]]

    def read(self, clock: HostClock | DeviceClock) -> Records:
        """Returns the records in host time, with microbatches in the order of the data; `clock` made the instants."""
        order, read = self.order, clock.read
        spans, memory, messages = self.spans, self.memory, self.messages
        if not isinstance(clock, HostClock):  # whose instants are host time
            spans = [(op, read(begin), read(end)) for op, begin, end in spans]
            memory = [(read(when), held) for when, held in memory]
            messages = [(doing, value, read(begin), read(end)) for doing, value, begin, end in messages]
        if order != range(len(order)):
            spans = [(op._replace(microbatch=order[op.microbatch]), begin, end) for op, begin, end in spans]
            messages = [(doing, value._replace(microbatch=order[value.microbatch]), *times) for doing, value, *times in messages]
        return Records(
            spans,
            memory,
            messages,
            [(read(begin), read(end)) for begin, end in self.optimizer],
            [(stage, read(begin), read(end)) for stage, begin, end in self.reductions],
            [(way, stage, order[place], read(begin), read(end)) for way, stage, place, (begin, end) in self.copies],
        )


def gather(name: str, records: Records, peers: Peers) -> Timeline:
    """Returns the measured timeline of the last step, whose times start at the first pass. Every rank of the pipeline must call it."""
    with peers.collective("gathering a timeline"):
        with exchanging():
            shift = clock_shift(peers)
        rows = peers.gather_objects(records.shifted(shift))
    origin = min((spans[0][1] for spans, *_ in rows if spans), default=0)
    parsed = tuple(tuple(Span(Op.parse(op), begin - origin, end - origin) for op, begin, end in spans) for spans, *_ in rows)
    memory = tuple(tuple((time - origin, held) for time, held in steps) for _, steps, *_ in rows)
    marks = tuple(tuple(Mark(Doing(d), begin - origin, end - origin, value) for d, begin, end, value in row) for _, _, row, *_ in rows)
    sums = tuple(tuple(ReplicaSum(stage, begin - origin, end - origin) for stage, begin, end in row) for *_, row, _ in rows)
    copies = tuple(
        tuple(HostCopy(Copying(way), stage, microbatch, begin - origin, end - origin) for way, stage, microbatch, begin, end in row)
        for *_, row in rows
    )

    def if_any(of_ranks: tuple[Any, ...]) -> tuple[Any, ...]:
        return of_ranks if any(of_ranks) else ()

    traced = {"reductions": if_any(sums), "copies": if_any(copies)}
    return Timeline(name, parsed, if_any(memory), "measured", if_any(marks), **traced, numbers=peers.survivors)


def clock_shift(peers: Peers) -> int:
    """Returns the nanoseconds to add to this rank's clock to read rank 0's; 0 if the difference is within the measurement error.

    Rank 0 answers pings with its clock, and the fastest round trip is the most accurate. Ranks of one machine share a clock and get 0.
    """
    for peer in range(1, peers.size):
        if peers.rank == 0:
            for _ in range(PINGS):
                peers.expect_control(ClockReading, 1, peer).wait()
                peers.send_control(ClockReading(perf_counter_ns()), peer).wait()
        elif peers.rank == peer:
            trips = [_ping(peers) for _ in range(PINGS)]
            shift, trip = min(trips, key=lambda pair: pair[1])
            return shift if abs(shift) > trip else 0
    return 0


def _ping(peers: Peers) -> tuple[int, int]:
    begin = perf_counter_ns()
    peers.send_control(ClockReading(), 0).wait()
    answer = peers.expect_control(ClockReading, 1, 0).wait()
    end = perf_counter_ns()
    return answer.nanoseconds - (begin + end) // 2, end - begin
