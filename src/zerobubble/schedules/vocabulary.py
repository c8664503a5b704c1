"""A divided head for any schedule of one route: each rank computes a part of the vocabulary.

Source: Vocabulary Parallelism, arXiv 2411.05288. The output layer and the loss are often as large as several layers, so a last stage
that computes them alone slows the whole pipeline down.
"""

from __future__ import annotations

from operator import itemgetter

from zerobubble.arguments import WHOLE, optional, takes, wrong
from zerobubble.costs import Costs
from zerobubble.errors import InputError
from zerobubble.ir import Op, Placement, Schedule
from zerobubble.kinds import Kind, ValueKind, kinds_making
from zerobubble.simulation import simulate
from zerobubble.timeline import Timeline

PASSES: dict[int, tuple[Kind, Kind]] = {1: (Kind.SL, Kind.TX), 2: (Kind.S, Kind.T)}
"""The two passes of a part of the head, by the paper's number for the algorithm."""
EXTRA: dict[int, int] = {1: 2, 2: 1}
"""Delay of backwards, in microbatches: one for each collective between the forward and the backward of the last stage."""


@takes(schedule=Schedule, algorithm=WHOLE, costs=optional(Costs))
def with_vocabulary(schedule: Schedule, algorithm: int = 2, costs: Costs | None = None) -> Schedule:
    """Return `schedule` with the head divided over its ranks: each computes a part of the vocabulary, in two passes per microbatch.

    The part of a rank is named after the first stage on that rank, so the passes on rank r of a linear or vee placement are `rS0` and
    `rT0`. Backward passes are delayed to hide the collectives: by one microbatch with algorithm 2 (S and T), whose S computes everything
    that the last stage's backward needs, and by two with algorithm 1 (SL and TX), which computes less but needs one more collective
    first. So a rank holds p + 1 or p + 2 microbatches instead of the p of 1F1B.

    The order on every rank comes from one simulation of `schedule` with `costs` and delayed backwards. In it every pass follows all
    passes that it depends on, so the result cannot deadlock. Raises `ScheduleError` for a schedule that cannot run. Raises `InputError`
    for a schedule without backwards, with several routes, with overlapped steps or with a divided head, for an unknown algorithm, and
    for costs with another number of stages.

    Arguments:
        schedule: the schedule of the stages; the last stage excludes the head and the loss.
        algorithm: 2 for S and T, or 1 for SL and TX.
        costs: times of the passes of `schedule`, which decide where S and T are placed; equal times by default.

    >>> import zerobubble as zb
    >>> for row in zb.schedules.with_vocabulary(zb.make("1f1b", 2, 3)).rows:
    ...     print(*row)
    0F0 0F1 0S0 0T0 0S1 0F2 0T1 0BW0 0S2 0T2 0BW1 0BW2
    1F0 1S0 1T0 1F1 1BW0 1S1 1T1 1F2 1BW1 1S2 1T2 1BW2
    """
    if algorithm not in PASSES:
        raise wrong("algorithm", algorithm, "1 or 2")
    _require_plain(schedule)
    timeline = simulate(schedule, costs or Costs.uniform(schedule.num_stages).completed_for(schedule))
    backwards_late = EXTRA[algorithm] * _period(timeline, schedule.num_stages)
    done = {span.op.microbatch: span.end for _, span in timeline.spans() if _is_last(span.op, ValueKind.ACTIVATION, schedule.num_stages)}
    rows = []
    for rank, row in enumerate(timeline.rows):
        plain = [(span.start + (0 if span.op.kind in kinds_making(ValueKind.ACTIVATION) else backwards_late), span.op) for span in row]
        first, second = (
            [(time + wait, Op(kind, part_of(schedule.placement, rank), microbatch)) for microbatch, time in done.items()]
            for kind, wait in zip(PASSES[algorithm], (0, backwards_late // 2), strict=True)
        )
        rows.append(tuple(op for _, op in sorted([*plain, *first, *second], key=itemgetter(0))))
    name = f"{schedule.name}, vocabulary {algorithm}"
    return Schedule(name, schedule.placement, schedule.num_microbatches, tuple(rows), slices=schedule.slices)


def algorithm_of(schedule: Schedule) -> int:
    """Return the algorithm, 1 or 2, by which `schedule` divides its head. The schedule must have a divided head."""
    kinds = {op.kind for row in schedule.rows for op in row}
    return next(algorithm for algorithm, passes in PASSES.items() if not kinds.isdisjoint(passes))


def _is_last(op: Op, value_kind: ValueKind, num_stages: int) -> bool:
    return op.stage == num_stages - 1 and op.kind in kinds_making(value_kind)


def _period(timeline: Timeline, num_stages: int) -> int:
    """Return the mean time between two backwards of the last stage, at least 2 ns so that half of it is not zero."""
    starts = [span.start for _, span in timeline.spans() if _is_last(span.op, ValueKind.GRADIENT, num_stages)]
    period = (max(starts) - min(starts)) // (len(starts) - 1) if len(starts) > 1 else timeline.makespan
    return max(2, period)


def part_of(placement: Placement, rank: int) -> int:
    """Return the stage that names the part of the vocabulary on `rank`: its first one."""
    return min(stage for _, stage in placement.stages(rank))


def _require_plain(schedule: Schedule) -> None:
    reasons = {
        "has no backward passes": schedule.is_forward_only,
        "already has a divided head": schedule.has_divided_head,
        f"has {len(schedule.placement.routes)} routes with separate last stages": len(schedule.placement.routes) > 1,
        "has overlapped steps": bool(schedule.overlaps),
    }
    causes = " and ".join(reason for reason, holds in reasons.items() if holds)
    if causes:
        message = "the head of schedule {schedule!r} cannot be divided because it {found}"
        raise InputError(message, schedule=schedule.name, found=causes, remedy="pass a plain schedule of one route")
