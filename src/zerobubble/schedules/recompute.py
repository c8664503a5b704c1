"""Recomputation for any schedule: forwards save only their inputs, and R recomputes them right before the backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from zerobubble.arguments import WHOLE, each, optional, takes
from zerobubble.errors import InputError
from zerobubble.ir import Op, Schedule, Step
from zerobubble.kinds import Kind, ValueKind, kinds_making
from zerobubble.rules import recomputed


@takes(schedule=Schedule, stages=optional(each(WHOLE)), microbatches=optional(each(WHOLE)))
def with_recompute(schedule: Schedule, stages: Iterable[int] | None = None, microbatches: Iterable[int] | None = None) -> Schedule:
    """Return `schedule` with an R before each backward of `stages` and `microbatches` (default: all). Their F then saves only its input.

    R waits for no message, so it runs while its rank waits for the gradient of the backward. A forward that is followed immediately by
    its backward is unchanged, since recomputing it would save no memory. Raises `InputError` for stages and microbatches that the
    schedule does not have, for a schedule that already recomputes, and for one without backwards.

    >>> import zerobubble as zb
    >>> print(zb.picture(zb.schedules.with_recompute(zb.make("1f1b", 2, 2))))
    F0 F1 R0 .  BW0   R1 BW1
    .  F0 BW0   F1 BW1   .  .
    """
    _require_plain(schedule)
    chosen = [
        _chosen("stage", stages, schedule.num_stages),
        _chosen("microbatch", microbatches, schedule.num_microbatches),
    ]
    rows = [list(_with_recompute(row, *chosen)) for row in schedule.steps]
    name = f"{schedule.name}, recomputed"
    return Schedule.of_steps(name, schedule.placement, schedule.num_microbatches, rows, schedule.microbatch_routes, schedule.slices)


def _require_plain(schedule: Schedule) -> None:
    first = next((entry for row in schedule.rows for entry in recomputed(row).items()), None)
    if first is not None:
        (stage, microbatch), kind = first
        message = "schedule {schedule!r} already has {op}"
        raise InputError(
            message, schedule=schedule.name, op=str(Op(kind, stage, microbatch)), remedy="pass the schedule without such passes"
        )
    if schedule.is_forward_only:
        message = "schedule {schedule!r} has no backward passes, so there is nothing to recompute"
        raise InputError(message, schedule=schedule.name, remedy="pass one that trains")


def _chosen(noun: str, numbers: Iterable[int] | None, count: int) -> frozenset[int]:
    """Return `numbers` as a set, by default all below `count`."""
    chosen = frozenset(range(count) if numbers is None else numbers)
    beyond = sorted(number for number in chosen if not 0 <= number < count)
    if beyond:
        raise InputError("there is no {noun} {got} to recompute: the schedule has 0 to {last}", noun=noun, got=beyond[0], last=count - 1)
    return chosen


def _with_recompute(row: Iterable[Step], stages: frozenset[int], microbatches: frozenset[int]) -> Iterator[Step]:
    """Yield the steps of `row` with R before each chosen backward."""
    backwards = kinds_making(ValueKind.GRADIENT)
    before: Step = ()
    for step in row:
        for kind, stage, microbatch in step:
            is_chosen = kind in backwards and stage in stages and microbatch in microbatches
            if is_chosen and Op(Kind.F, stage, microbatch) not in before:
                yield (Op(Kind.R, stage, microbatch),)
        yield step
        before = step
