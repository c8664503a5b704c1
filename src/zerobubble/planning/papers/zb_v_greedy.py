"""The greedy scheduler of ZB-V for general times: two stages per rank in a V, within the memory."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, pairwise, product
from typing import NamedTuple

from zerobubble.errors import InputError
from zerobubble.ir import Kind, Placement, Schedule
from zerobubble.planning.papers.partial_schedule import PartialSchedule, StuckError, shortest
from zerobubble.planning.problem.problem import Problem, microbatch_bytes


class Fills(NamedTuple):
    """Whether W goes into a gap that is too short for it and that the rank cannot afford: before an F, before an outward B."""

    forward: bool
    backward: bool


def zb_v_greedy(problem: Problem) -> Schedule:
    """The schedule of the ZB-V greedy within the limits: the best of four, each repeated while that helps.

    Returns early if one meets the lower bound. Warm-up follows the times of the first microbatch. Then every rank alternates one B and one
    F, preferring those on the way back, with W in the gaps. Raises `InputError` for a placement other than the V, and if the limits hold no
    microbatch or too few for the rule, which needs the memory of p microbatches.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241 v1, section 6 and its public code.
    """
    placement = problem.placement
    if placement.routes != Placement.vee(placement.num_ranks).routes:
        raise InputError(
            "the greedy of ZB-V needs stages in a V, got the placement {name!r}", name=placement.name, remedy="choose the placement vee"
        )
    finished: list[PartialSchedule] = []
    least = problem.bound().time
    for fills in product((True, False), repeat=2):
        try:
            for partial in _improving(problem, Fills(*fills)):
                finished.append(partial)
                if partial.cost <= least:
                    return partial.schedule("zb-v-greedy")
        except StuckError as error:
            stuck = error
    if not finished:
        raise InputError(_refusal(problem, stuck))
    return shortest(finished).schedule("zb-v-greedy")


def _refusal(problem: Problem, stuck: StuckError) -> str:
    """The reason for no schedule: a rank has less memory than the rule needs."""
    p = problem.placement.num_ranks
    sizes = microbatch_bytes(problem.placement, problem.costs)
    for rank, (limit, whole) in enumerate(zip(problem.limits.memory, sizes, strict=True)):
        if limit < p * whole:
            counts = f"the greedy of ZB-V needs memory for {p} microbatches"
            return f"{counts}, rank {rank} has memory for {limit / whole:.4g}: raise its limit or choose another planner"
    return str(stuck)


def _improving(problem: Problem, fills: Fills) -> Iterator[PartialSchedule]:
    """Applies the rule, then repeats it with the idle times of the previous schedule while schedules get shorter."""
    partial = _play(problem, fills, [0] * problem.placement.num_ranks)
    while True:
        yield partial
        better = _play(problem, fills, partial.idle)
        if better.cost >= partial.cost:
            return
        partial = better


class _VeeState(NamedTuple):
    """A schedule under construction: `out[rank]` and `home[rank]` are the two stages in the order in which F runs them.

    `idled` is the idle time of each rank in the previous repetition, in ns.
    """

    partial: PartialSchedule
    fills: Fills
    out: tuple[int, ...]
    home: tuple[int, ...]
    idled: list[int]

    @property
    def ranks(self) -> range:
        return range(len(self.out))

    def count(self, stage: int) -> int:
        """The number of F of a stage that have run."""
        return len(self.partial.ends[Kind.F, stage])

    def run(self, kind: Kind, stage: int, fill: bool) -> None:
        """Runs a pass after the W that memory requires and those that fit into the wait for its message."""
        partial, rank = self.partial, self.partial.home[stage]
        partial.free_memory(kind, stage)
        spare = max(*partial.idle, max(self.idled) - self.idled[rank]) - partial.idle[rank]
        if partial.fill(kind, stage) > spare and fill:
            partial.run_weight(rank)
        partial.run(kind, stage)


def _play(problem: Problem, fills: Fills, idled: list[int]) -> PartialSchedule:
    stages = [problem.placement.stages(rank) for rank in range(problem.placement.num_ranks)]
    (out, home) = zip(*([stage for _, stage in both] for both in stages), strict=True)
    vee = _VeeState(PartialSchedule(problem), fills, out, home, idled)
    _first_microbatch(vee)
    _even_out(vee)
    for _ in range(2 * problem.num_microbatches):
        _backward_turn(vee)
        _forward_turn(vee)
    vee.partial.run_weights()
    return vee.partial


def _first_microbatch(vee: _VeeState) -> None:
    """F of the first microbatch on all stages. Before its F on the way home, each rank runs as many further F as time allows."""
    partial = vee.partial
    for stage in vee.out:
        partial.run(Kind.F, stage)
    for rank in reversed(vee.ranks):
        while _has_time(vee, rank):
            for stage in vee.out[: rank + 1]:
                if partial.left(Kind.F, stage):
                    partial.run(Kind.F, stage)
        partial.run(Kind.F, vee.home[rank])


def _has_time(vee: _VeeState, rank: int) -> bool:
    """Whether another outward F ends before the first F on the way home can start, with memory for those yet to come."""
    partial, stage = vee.partial, vee.out[rank]
    ends = partial.clock[rank] + partial.time[Kind.F, stage]
    fits = partial.held[rank] + (2 + 2 * rank) * partial.takes[Kind.F, stage] <= partial.problem.limits.memory[rank]
    return rank < vee.ranks[-1] and fits and partial.left(Kind.F, stage) and ends <= (partial.arrival(Kind.F, vee.home[rank]) or 0)


def _even_out(vee: _VeeState) -> None:
    """Outward and homeward F in turn until each rank has run as many as the one before it, and holds the last F of its next microbatch."""
    directions = cycle((vee.out, vee.home))
    microbatches = vee.partial.problem.num_microbatches
    for before, rank in pairwise(vee.ranks):
        while vee.count(vee.out[rank]) + vee.count(vee.home[rank]) < vee.count(vee.out[before]) + vee.count(vee.home[before]) or (
            vee.count(vee.home[rank]) <= vee.count(vee.home[before]) < microbatches
        ):
            for stage in next(directions)[: rank - len(vee.ranks) - 1 : -1]:
                if vee.partial.left(Kind.F, stage):
                    vee.partial.run(Kind.F, stage)


def _backward_turn(vee: _VeeState) -> None:
    """One B on every rank: homeward B from the last rank up where they have arrived, then outward B from the first rank down."""
    partial = vee.partial
    homeward = [not partial.left(Kind.B, vee.home[r]) or partial.arrival(Kind.B, vee.out[r]) is not None for r in vee.ranks]
    for rank in reversed(vee.ranks):
        if homeward[rank]:
            vee.run(Kind.B, vee.out[rank], fill=True)
    for rank in vee.ranks:
        if not homeward[rank]:
            vee.run(Kind.B, vee.home[rank], fill=vee.fills.backward)


def _forward_turn(vee: _VeeState) -> None:
    """One F on every rank that can run one, homeward if possible."""
    for rank in vee.ranks:
        for stage in (vee.home[rank], vee.out[rank]):
            if vee.partial.arrival(Kind.F, stage) is not None:
                vee.run(Kind.F, stage, vee.fills.forward)
                break
