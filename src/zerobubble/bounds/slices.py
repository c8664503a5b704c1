"""Lower bounds for schedules over slices of a sequence: slices become microbatches of their own, with a delay behind the last F.

On the last stage, the first B of a microbatch waits for the F of all its n slices. Pair the F of slice k with the B of slice n-1-k: between
the two, that stage runs the n-1-k later F of the microbatch and k of its B. So each pair has at least n-1 passes of F or B in between, and
a schedule over slices is one of microbatches as short as the shortest slice with that delay. It holds as many slices at any time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from zerobubble.arguments import wrong
from zerobubble.bounds.bound import Bound, Bounds, strongest
from zerobubble.bounds.certificate import bounds_with_delay
from zerobubble.bounds.chain import first_starts, total_time
from zerobubble.bounds.overlap import saves_time
from zerobubble.bounds.reasons import work_reason
from zerobubble.bounds.sums import with_sums
from zerobubble.costs import Costs, Limits
from zerobubble.ir import Kind, Placement
from zerobubble.units import show_ms


def bounds_with_slices(placement: Placement, num_microbatches: int, costs: Costs, limits: Limits | None) -> Bounds:
    """Computes lower bounds for `num_microbatches`, which count slices, with the slices of `costs`. The work of each rank counts in full.

    Raises `InputError` as `lower_bounds` does, and for shares.

    >>> import zerobubble as zb
    >>> whole = zb.Costs.uniform(4, times=(10, 10, 10))
    >>> zb.bounds.lower_bounds(zb.Placement.linear(4), 2, whole, None).makespan.time / 1e6
    110.0
    >>> bounds_with_slices(zb.Placement.linear(4), 8, whole.sliced(4), None).makespan.time / 1e6
    67.5
    """
    costs.require_equal("a bound for slices")
    if num_microbatches % len(costs.slices):
        raise wrong("num_microbatches", num_microbatches, f"a multiple of the {len(costs.slices)} slices of a microbatch")
    least, last = costs.least_slice, placement.num_stages - 1
    delay = (len(costs.slices) - 1) * min(least.time(Kind.F, last), least.time(Kind.B, last))
    passes = bounds_with_delay(placement, num_microbatches, least, limits, delay)
    if not saves_time(costs):
        passes = strongest([passes, *_works(placement, num_microbatches, costs), *_turns(placement, num_microbatches, costs)])
    return with_sums(passes, placement, num_microbatches, least)


def _works(placement: Placement, num_microbatches: int, costs: Costs) -> Iterator[Bounds]:
    """The work of each rank, and that work after the earliest start of its first pass."""
    kinds = (Kind.F, Kind.B, Kind.W)
    stages = [sum(total_time(costs, kind, stage, num_microbatches) for kind in kinds) for stage in range(placement.num_stages)]
    works = zip(placement.rank_sums(stages), first_starts(placement, costs.least_slice), strict=True)
    for rank, (work, begin) in enumerate(works):
        yield Bounds(Bound(work, work_reason(rank, work, 0)), Bound(begin + work, work_reason(rank, work, begin)))


def _turns(placement: Placement, num_microbatches: int, costs: Costs) -> Iterator[Bounds]:
    """For each rank, the time around the turn of a microbatch at the last stage, which all its slices pass one after the other.

    The first B of a stage comes after the F of a whole microbatch on all later stages, and all B and W of the stages up to this one come
    after it. Likewise, all F of these stages come before the last F of a stage, and the B of that whole microbatch after it.
    """
    last = len(costs.slices) - 1
    forward, backward, weight = ([costs.times(kind, stage) for stage in range(placement.num_stages)] for kind in (Kind.F, Kind.B, Kind.W))
    message = _messages(placement, costs)
    starts = first_starts(placement, costs.least_slice)
    for rank in range(placement.num_ranks):
        stages = [stage for _, stage in placement.stages(rank)]
        path = range(stages[0], placement.num_stages)
        there = _through([forward[stage] for stage in path], 0, last) + sum(message[stages[0] :])
        back = _through([backward[stage] for stage in reversed(path)], last, 0) + sum(message[stages[0] :]) + weight[stages[0]][0]
        for at, stage in enumerate(stages):
            later = path[path.index(stage) :][1:]
            before = there + sum(backward[other][last] for other in later) + sum(message[stage:])
            behind = sum(forward[other][last] for other in later) + sum(message[stage:]) + back
            some = stages[: at + 1]
            until = before + sum(total_time(costs, kind, other, num_microbatches) for other in some for kind in (Kind.B, Kind.W))
            after = behind + sum(total_time(costs, Kind.F, other, num_microbatches) for other in some)
            where = f"of rank {rank} up to stage {stage}"
            yield _of_rank(until, starts[rank], f"B and W {where} wait {show_ms(before)} for the first B of stage {stage}")
            yield _of_rank(after, starts[rank], f"F {where} end {show_ms(behind)} before the last W of stage {stages[0]}")


def _through(times: Sequence[Sequence[int]], first: int, last: int) -> int:
    """The least ns in which all slices run through stages with these `times` of each slice, in order: the `first` to the `last`.

    On one stage they all run; before it at least the first one ran, and after it the last one.
    """
    before = accumulate((stage_times[first] for stage_times in times), initial=0)
    after = [*accumulate((stage_times[last] for stage_times in reversed(times)), initial=0)][-2::-1]
    return max(early + sum(stage_times) + late for early, stage_times, late in zip(before, times, after, strict=False))


def _messages(placement: Placement, costs: Costs) -> list[int]:
    """The ns of the shortest message from each stage to the next one, 0 on a rank."""
    home, least = placement.routes[0], costs.least_slice.comm
    return [time if here != there else 0 for time, (here, there) in zip(least, pairwise(home), strict=True)]


def _of_rank(time: int, begin: int, reason: str) -> Bounds:
    """The bounds of a rank that takes `time` ns from its first pass on, which begins after `begin` ns."""
    return Bounds(Bound(time, reason), Bound(begin + time, f"{reason}, and it cannot begin before {show_ms(begin)}" if begin else reason))
