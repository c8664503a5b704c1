"""A schedule drawn as plain text, for docstrings, terminals and issues."""

from __future__ import annotations

from itertools import groupby

from zerobubble.arguments import takes
from zerobubble.costs import NS_PER_MS, Costs
from zerobubble.ir import Op, Schedule
from zerobubble.simulation import simulate
from zerobubble.timeline import Span

Box = tuple[int, int, str]


@takes(schedule=Schedule)
def picture(schedule: Schedule) -> str:
    """Draw `schedule` at unit times, one line per rank. F, B, W and added kinds take 1, BW takes 2, messages take no time.

    A pass is shown as its kind and microbatch, in lower case on later stages of a rank; overlapped passes are joined by `&`. A dot is an
    idle unit of time. Raises `ScheduleError` if the schedule cannot run.

    >>> import zerobubble as zb
    >>> print(zb.picture(zb.make("zb-h1", 3, 3)))
    F0 F1 F2 .  .  B0 W0 B1 W1 B2 W2
    .  F0 F1 .  B0 F2 B1 W0 B2 W1 W2
    .  .  F0 B0 F1 B1 F2 B2 W0 W1 W2
    """
    timeline = simulate(schedule, Costs.unit(schedule.num_stages))
    rows = [_boxes(schedule, rank, row) for rank, row in enumerate(timeline.rows)]
    column = max(-(-(len(name) + 1) // (end - start)) for row in rows for start, end, name in row)
    return "\n".join(_line(row, timeline.makespan // NS_PER_MS, column) for row in rows)


def _boxes(schedule: Schedule, rank: int, row: tuple[Span, ...]) -> list[Box]:
    """Return the boxes on a rank's line, as (start, end, name) in units of time."""
    _, first = schedule.placement.stages(rank)[0]

    def name(op: Op) -> str:
        return f"{op.kind if op.stage == first else op.kind.lower()}{op.microbatch}"

    steps = groupby(row, lambda span: (span.start // NS_PER_MS, span.end // NS_PER_MS))
    return [(start, end, "&".join(name(span.op) for span in spans)) for (start, end), spans in steps]


def _line(row: list[Box], makespan: int, column: int) -> str:
    line, now = "", 0
    for start, end, name in [*row, (makespan, makespan, "")]:
        line += ".".ljust(column) * (start - now) + name.ljust(column * (end - start))
        now = end
    return line.rstrip()
