"""Any schedule of one route with its head divided over all ranks by the vocabulary (Vocabulary Parallelism, arXiv 2411.05288)."""

from __future__ import annotations

from operator import itemgetter

from zerobubble.arguments import WHOLE, optional, takes
from zerobubble.costs import Costs
from zerobubble.errors import InputError
from zerobubble.ir import Op, Placement, Schedule
from zerobubble.kinds import Kind, Stuff, kinds_making
from zerobubble.simulation import simulate
from zerobubble.timeline import Timeline

PASSES: dict[int, tuple[Kind, Kind]] = {1: (Kind.SL, Kind.TX), 2: (Kind.S, Kind.T)}
"""The two passes of a part of the head, by the paper's number of the algorithm."""
EXTRA: dict[int, int] = {1: 2, 2: 1}
"""By how many microbatches backwards are later: one for each collective between the last stage's forward and its backward."""


@takes(schedule=Schedule, algorithm=WHOLE, costs=optional(Costs))
def with_vocabulary(schedule: Schedule, algorithm: int = 2, costs: Costs | None = None) -> Schedule:
    """`schedule` with the head divided over its ranks: each computes a part of the vocabulary, in two passes for each microbatch.

    A rank's part goes by the first stage that it holds, so that the passes on rank r of a linear or vee placement are `rS0` and `rT0`.
    Backward passes move back to make room for the collectives in between: by one microbatch with algorithm 2 (S and T), whose S gives
    everything that the last stage's backward needs, and by two with algorithm 1 (SL and TX), which does less work and needs one more
    collective first. So a rank holds p + 1 or p + 2 microbatches instead of the p of 1F1B.

    All rows follow one order of time, in which every pass comes after what it uses and gathers: that of `schedule` played with `costs`,
    by default equal ones, with backwards late. So ranks never wait for each other in a circle. Raises `ScheduleError` for a schedule that
    cannot run, and `InputError` for one without backwards, with several routes or overlapped steps, or with a divided head already, for
    another algorithm, and for costs of other stages.

    Arguments:
        schedule: what trains the stages; the last one without the head and the loss.
        algorithm: 2 for S and T, or 1 for SL and TX.
        costs: what the passes of `schedule` take, which tells where S and T come among them.

    >>> import zerobubble as zb
    >>> for row in zb.schedules.with_vocabulary(zb.make("1f1b", 2, 3)).rows:
    ...     print(*row)
    0F0 0F1 0S0 0T0 0S1 0F2 0T1 0BW0 0S2 0T2 0BW1 0BW2
    1F0 1S0 1T0 1F1 1BW0 1S1 1T1 1F2 1BW1 1S2 1T2 1BW2
    """
    if algorithm not in PASSES:
        raise InputError(f"the vocabulary is divided by algorithm 1 or 2, got {algorithm}")
    _require_plain(schedule)
    timeline = simulate(schedule, costs or Costs.uniform(schedule.num_stages).completed_for(schedule))
    backwards_late = EXTRA[algorithm] * _period(timeline, schedule.num_stages)
    done = {span.op.microbatch: span.end for _, span in timeline.spans() if _is_last(span.op, Stuff.ACTIVATION, schedule.num_stages)}
    rows = []
    for rank, row in enumerate(timeline.rows):
        plain = [(span.start + (0 if span.op.kind in kinds_making(Stuff.ACTIVATION) else backwards_late), span.op) for span in row]
        first, second = (
            [(time + wait, Op(kind, part_of(schedule.placement, rank), microbatch)) for microbatch, time in done.items()]
            for kind, wait in zip(PASSES[algorithm], (0, backwards_late // 2), strict=True)
        )
        rows.append(tuple(op for _, op in sorted([*plain, *first, *second], key=itemgetter(0))))
    return Schedule(f"{schedule.name}, vocabulary {algorithm}", schedule.placement, schedule.num_microbatches, tuple(rows))


def algorithm_of(schedule: Schedule) -> int:
    """The algorithm, 1 or 2, by which `schedule` divides its head, as it does."""
    kinds = {op.kind for row in schedule.rows for op in row}
    return next(algorithm for algorithm, passes in PASSES.items() if not kinds.isdisjoint(passes))


def _is_last(op: Op, made: Stuff, num_stages: int) -> bool:
    return op.stage == num_stages - 1 and op.kind in kinds_making(made)


def _period(timeline: Timeline, num_stages: int) -> int:
    """The time between two backwards of the last stage on average, at least 2 ns: a half of it is still some time."""
    starts = [span.start for _, span in timeline.spans() if _is_last(span.op, Stuff.GRADIENT, num_stages)]
    period = (max(starts) - min(starts)) // (len(starts) - 1) if len(starts) > 1 else timeline.makespan
    return max(2, period)


def part_of(placement: Placement, rank: int) -> int:
    """The stage by which the part of the vocabulary on `rank` goes: the first one that it holds."""
    return min(stage for _, stage in placement.stages(rank))


def _require_plain(schedule: Schedule) -> None:
    reasons = {
        "has no backward, so that no loss is differentiated": schedule.is_forward_only,
        "has a divided head already": schedule.has_divided_head,
        f"has {len(schedule.placement.routes)} routes, each with a last stage of its own": len(schedule.placement.routes) > 1,
        "overlaps passes in steps, which would come apart": bool(schedule.overlaps),
    }
    found = " and ".join(reason for reason, holds in reasons.items() if holds)
    if found:
        raise InputError(
            f"the head of schedule {schedule.name!r} cannot be divided, as it {found}: give a schedule of one route that trains"
        )
