"""PyTorch's schedule CSV with messages, which its runtime plays cell by cell, and with the cells that gather and reduce weights.

PyTorch matches the messages from one rank to another by their order alone, and on NCCL each message of a rank waits for those before
it. So both ends follow one order for all ranks: that in which they are made when every pass takes the same time. Nothing can stop,
because a rank that comes to a message has done all that stands before it in that order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from zerobubble.arguments import takes
from zerobubble.costs import Costs
from zerobubble.errors import InputError
from zerobubble.export.messages import messages
from zerobubble.export.torch_cells import Care, End, SendWait, Weights, require_expressible, step_cell
from zerobubble.ir import Op, Schedule, Step
from zerobubble.kinds import Stuff, kinds_making, traits_of
from zerobubble.rules import Value
from zerobubble.simulation import simulate
from zerobubble.timeline import Timeline

MOST_UNSHARDED = 3
"""The stages of a rank that PyTorch keeps gathered when it adds these cells itself."""

SEND_WAITS = (2, 15)
"""The first version of PyTorch whose runtime wants a wait for each send and each reduction in the CSV."""

_MESSAGE, _REDUCE, _WAIT, _STEP = range(4)


class _Event(NamedTuple):
    """Cells of a row, in the order of their time; at one time messages come first, by their number, then what ends, and steps last."""

    time: int
    what: int
    number: int
    cells: tuple[str, ...]


@takes(schedule=Schedule)
def to_torch_comms_csv(schedule: Schedule, torch: str, unsharded: int = 0) -> str:
    """The CSV of `schedule` with its messages, which `_load_csv` of PyTorch version `torch`, such as "2.13", reads as `compute_comms`.

    After a stage's last backward comes REDUCE_GRAD, where PyTorch divides the gradients by the number of microbatches. With
    `unsharded` > 0 there are UNSHARD and RESHARD cells for FSDP: so many stages of a rank are gathered at a time, those it runs
    next (two where a step overlaps two). From version 2.15 on there is a wait for each send, after the backward pass that proves its
    arrival or at the end of the row, and one for each reduction; older versions do not know these cells. Raises `InputError` for a
    schedule that PyTorch cannot play (see `to_torch_csv`), a malformed version or a negative `unsharded`, `ScheduleError` for a schedule
    that is not legal.
    """
    require_expressible(schedule)
    waits = _version(torch) >= SEND_WAITS
    if unsharded < 0:
        raise InputError(f"unsharded counts the stages gathered at a time and must be >= 0, got {unsharded}")
    timeline = simulate(schedule, Costs.uniform(schedule.num_stages))
    rows = [list(_own(steps, timeline, rank, unsharded, waits=waits)) for rank, steps in enumerate(schedule.steps)]
    for number, (value, source, made, destination, used) in enumerate(messages(timeline)):
        for is_send, rank, op in ((True, source, made.op), (False, destination, used.op)):
            end = End(is_send, value.stuff, op.stage, op.microbatch)
            rows[rank].append(_Event(made.end, _MESSAGE, number, (str(end),)))
        if waits:
            rows[source].append(_send_wait(value, timeline, source, number))
    return "".join(",".join(cell for event in sorted(row) for cell in event.cells) + "\n" for row in rows)


def _version(torch: str) -> tuple[int, int]:
    """The first two numbers of a version such as "2.13" or "2.15.0+cpu"."""
    match = re.match(r"([0-9]+)\.([0-9]+)", torch)
    if match is None:
        raise InputError(f"torch is the version of PyTorch that will read the CSV, such as '2.13', got {torch!r}")
    return int(match[1]), int(match[2])


def _send_wait(value: Value, timeline: Timeline, rank: int, number: int) -> _Event:
    """The wait for a send. The backward of a stage uses a gradient that was made from its activation, which therefore has arrived."""
    cell = (str(SendWait(*value)),)
    if value.stuff is Stuff.ACTIVATION:
        for op, _, end, _ in timeline.rows[rank]:
            if (op.stage, op.microbatch) == value[1:] and op.kind in kinds_making(Stuff.GRADIENT):
                return _Event(end, _WAIT, number, cell)
    return _Event(timeline.end, _WAIT, number, cell)


def _own(steps: Sequence[Step], timeline: Timeline, rank: int, unsharded: int, *, waits: bool) -> Iterator[_Event]:
    """The cells of a row that need no other rank."""
    spans = {span.op: span for span in timeline.rows[rank]}
    gathering = list(_gathering(steps, unsharded))
    for number, (step, weights) in enumerate(zip(steps, gathering, strict=False)):
        yield _Event(spans[step[0]].start, _STEP, number, (*weights, step_cell(step)))
    for stage, op in _last_backwards(steps).items():
        care = (Care.REDUCE_GRAD, Care.WAIT_REDUCE_GRAD) if waits else (Care.REDUCE_GRAD,)
        yield _Event(spans[op].end, _REDUCE, stage, tuple(str(Weights(what, stage)) for what in care))
    yield _Event(timeline.end, _STEP, len(steps), gathering[-1])


def _last_backwards(steps: Sequence[Step]) -> dict[int, Op]:
    """The pass of each stage after which its weights' gradients are complete."""
    return {op.stage: op for step in steps for op in step if traits_of(op.kind).adds_gradients}


def _gathering(steps: Sequence[Step], most: int) -> Iterator[tuple[str, ...]]:
    """The cells that give up and gather stages before each step, and after the last one."""
    wanted = [stages[: max(most, len({op.stage for op in step}))] for step, stages in zip(steps, _ahead(steps), strict=True)]
    for held, keep in pairwise([(), *wanted, ()]):
        cells = [Weights(Care.RESHARD, stage) for stage in held if stage not in keep]
        cells += [Weights(Care.UNSHARD, stage) for stage in keep if stage not in held]
        yield tuple(map(str, cells)) if most else ()


def _ahead(steps: Sequence[Step]) -> list[tuple[int, ...]]:
    """At each step, the stages of the row from there on in the order of their next use."""
    stages: list[tuple[int, ...]] = [()]
    for step in reversed(steps):
        now = tuple(dict.fromkeys(op.stage for op in step))
        stages.append((*now, *(stage for stage in stages[-1] if stage not in now)))
    return stages[:0:-1]
