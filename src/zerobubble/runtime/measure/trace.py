"""What every rank did, gathered on all of them as one measured timeline with aligned clocks."""

from __future__ import annotations

from time import perf_counter_ns

from zerobubble.ir import Op
from zerobubble.runtime.messages.transport import Transport
from zerobubble.timeline import Span, Timeline

PINGS = 8


def gather(name: str, spans: list[tuple[Op, int, int]], memory: list[tuple[int, int]], transport: Transport) -> Timeline:
    """The measured timeline of the last step; every rank of the pipeline must call it. Times start at the first pass."""
    shift = clock_shift(transport)
    mine = [(str(op), begin + shift, end + shift) for op, begin, end in spans]
    rows = transport.gather_objects((mine, [(t + shift, held) for t, held in memory]))
    origin = min((row[0][1] for row, _ in rows if row), default=0)
    parsed = tuple(tuple(Span(Op.parse(op), begin - origin, end - origin) for op, begin, end in row) for row, _ in rows)
    held = tuple(tuple((t - origin, b) for t, b in steps) for _, steps in rows)
    return Timeline(name, parsed, held if any(held) else (), "measured")


def clock_shift(transport: Transport) -> int:
    """Nanoseconds to add to this rank's clock to read rank 0's; 0 where the difference is within the error of measuring it.

    Rank 0 answers pings with its clock; the fastest round trip tells best. Ranks of one machine share a clock and get 0.
    """
    for peer in range(1, transport.size):
        if transport.rank == 0:
            for _ in range(PINGS):
                transport.listen(1, peer, 1)[0].wait()
                transport.tell([float(perf_counter_ns())], peer, 1)[0].wait()
        elif transport.rank == peer:
            trips = [_ping(transport) for _ in range(PINGS)]
            shift, trip = min(trips, key=lambda pair: pair[1])
            return shift if abs(shift) > trip else 0
    return 0


def _ping(transport: Transport) -> tuple[int, int]:
    begin = perf_counter_ns()
    transport.tell([0.0], 0, 1)[0].wait()
    work, answer = transport.listen(1, 0, 1)
    work.wait()
    end = perf_counter_ns()
    return int(answer.item()) - (begin + end) // 2, end - begin
