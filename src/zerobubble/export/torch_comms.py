"""PyTorch's schedule CSV with messages, which its runtime executes cell by cell, and with cells that gather and reduce weights.

PyTorch matches the messages from one rank to another by order alone, and on NCCL each message of a rank waits for the ones before it. Both
ends therefore use one global order: that in which messages are sent in a simulation with equal times. This cannot deadlock, because a rank
that reaches a message has completed everything before it in that order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from zerobubble.arguments import takes, wrong
from zerobubble.costs import Costs
from zerobubble.export.torch_cells import MessageEnd, SendWait, WeightAction, Weights, require_expressible, step_cell
from zerobubble.ir import Schedule, Step
from zerobubble.kinds import ValueKind, kinds_making, traits_of
from zerobubble.rules import Value
from zerobubble.simulation import simulate
from zerobubble.timeline import Timeline, messages

MOST_UNSHARDED = 3
"""The number of stages per rank that PyTorch keeps gathered when it adds these cells itself."""

SEND_WAITS = (2, 15)
"""The first version of PyTorch whose runtime requires a wait for each send and each reduction in the CSV."""

_MESSAGE, _REDUCE, _WAIT, _STEP = range(4)


class _Event(NamedTuple):
    """Cells of a row, sorted by time. At equal times messages come first, by number, then reductions and waits, and steps last."""

    time: int
    what: int
    number: int
    cells: tuple[str, ...]


@takes(schedule=Schedule)
def to_torch_comms_csv(schedule: Schedule, torch: str, unsharded: int = 0) -> str:
    """Return the CSV of `schedule` with its messages, in format `compute_comms` for `_load_csv` of PyTorch version `torch`.

    REDUCE_GRAD follows the last backward of each stage; PyTorch then also divides the gradients by the number of microbatches. Raises
    `InputError` for a schedule that PyTorch cannot run (see `to_torch_csv`), a malformed version or a negative `unsharded`, and
    `ScheduleError` for a schedule that is not legal.

    Arguments:
        schedule: the schedule to write.
        torch: the version of PyTorch that will read the CSV, such as "2.13". From 2.15 on, the CSV has a wait for each send, after the
            backward that proves its arrival or at the end of the row, and one for each reduction. Older versions do not support these.
        unsharded: for FSDP, the number of stages of a rank that are gathered at a time, those it runs next (at least the two of an
            overlapped step). They are gathered by UNSHARD and freed by RESHARD cells; 0 for none.
    """
    return "".join(",".join(row) + "\n" for row in torch_rows(schedule, torch, unsharded))


def torch_rows(schedule: Schedule, torch: str, unsharded: int = 0) -> list[list[str]]:
    """Return the cells of `to_torch_comms_csv`, a list for each rank."""
    require_expressible(schedule)
    waits = _version(torch) >= SEND_WAITS
    if unsharded < 0:
        raise wrong("unsharded", unsharded, "a number of stages >= 0")
    timeline = simulate(schedule, Costs.uniform(schedule.num_stages))
    rows = [list(_cells_of_rank(steps, timeline, rank, unsharded, waits=waits)) for rank, steps in enumerate(schedule.steps)]
    for number, (value, source, maker, destination, user) in enumerate(messages(timeline)):
        for is_send, rank, op in ((True, source, maker.op), (False, destination, user.op)):
            end = MessageEnd(is_send, value.value_kind, op.stage, op.microbatch)
            rows[rank].append(_Event(maker.end, _MESSAGE, number, (str(end),)))
        if waits:
            rows[source].append(_send_wait(value, timeline, source, number))
    return [[cell for event in sorted(row) for cell in event.cells] for row in rows]


def _version(torch: str) -> tuple[int, int]:
    """Return the first two numbers of a version such as "2.13" or "2.15.0+cpu"."""
    match = re.match(r"([0-9]+)\.([0-9]+)", torch)
    if match is None:
        raise wrong("torch", torch, "the version of PyTorch that will read the CSV, such as '2.13'")
    return int(match[1]), int(match[2])


def _send_wait(value: Value, timeline: Timeline, rank: int, number: int) -> _Event:
    """Return the wait for a send.

    The wait for an activation comes after the backward of its stage, whose gradient was computed from the activation. So the activation has
    arrived by then and the wait does not block. For a gradient there is no such pass, so its wait comes at the end of the row.
    """
    cell = (str(SendWait(*value)),)
    if value.value_kind is ValueKind.ACTIVATION:
        for op, _, end, _ in timeline.rows[rank]:
            if (op.stage, op.microbatch) == value[1:] and op.kind in kinds_making(ValueKind.GRADIENT):
                return _Event(end, _WAIT, number, cell)
    return _Event(timeline.end, _WAIT, number, cell)


def _cells_of_rank(steps: Sequence[Step], timeline: Timeline, rank: int, unsharded: int, *, waits: bool) -> Iterator[_Event]:
    """Yield the cells of a row other than messages and their waits."""
    spans = {span.op: span for span in timeline.rows[rank]}
    *gathering, at_end = _gathering(steps, unsharded)
    for number, (step, weights) in enumerate(zip(steps, gathering, strict=True)):
        yield _Event(spans[step[0]].start, _STEP, number, (*weights, step_cell(step)))
    last_backwards = {op.stage: op for step in steps for op in step if traits_of(op.kind).adds_gradients}
    for stage, op in last_backwards.items():
        actions = (WeightAction.REDUCE_GRAD, WeightAction.WAIT_REDUCE_GRAD) if waits else (WeightAction.REDUCE_GRAD,)
        yield _Event(spans[op].end, _REDUCE, stage, tuple(str(Weights(action, stage)) for action in actions))
    yield _Event(timeline.end, _STEP, len(steps), at_end)


def _gathering(steps: Sequence[Step], most: int) -> Iterator[tuple[str, ...]]:
    """Yield the cells that free and gather stages before each step, and after the last one. Frees come first, to limit the peak."""
    wanted = [stages[: max(most, len({op.stage for op in step}))] for step, stages in zip(steps, _ahead(steps), strict=True)]
    for held, keep in pairwise([(), *wanted, ()]):
        cells = [Weights(WeightAction.RESHARD, stage) for stage in held if stage not in keep]
        cells += [Weights(WeightAction.UNSHARD, stage) for stage in keep if stage not in held]
        yield tuple(map(str, cells)) if most else ()


def _ahead(steps: Sequence[Step]) -> list[tuple[int, ...]]:
    """Return, for each step, the stages of the row from there on in the order of their next use."""
    stages: list[tuple[int, ...]] = [()]
    for step in reversed(steps):
        now = tuple(dict.fromkeys(op.stage for op in step))
        stages.append((*now, *(stage for stage in stages[-1] if stage not in now)))
    return stages[:0:-1]
