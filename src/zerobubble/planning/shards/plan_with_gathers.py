"""A plan with the gathers of its sharded weights, and lower bounds on the number of gathers and on the time with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zerobubble.display import Displayed
from zerobubble.gathers import RankGathers, gathers_of, plan_gathers, play_gathers
from zerobubble.ir import Kind, Op, Placement, Schedule
from zerobubble.offload.copies import copy_works
from zerobubble.planning.answer import Plan
from zerobubble.planning.problem.problem import Objective, Problem
from zerobubble.planning.problem.sharded import Sharded
from zerobubble.units import show_bytes


@dataclass(frozen=True, repr=False)
class PlanWithGathers(Displayed):
    """A schedule with its gathers.

    Attributes:
        plan: The plan of the schedule without gathers.
        gathers: The gathers of each rank.
        time: The objective including gathers, in ns.
        gathered_bytes: The bytes gathered in a step on all ranks.
    """

    plan: Plan
    gathers: tuple[RankGathers, ...]
    time: int
    gathered_bytes: int

    @classmethod
    def from_plan(cls, plan: Plan) -> PlanWithGathers:
        """Plans the gathers of `plan`, as few as possible; raises `InputError` if the weights of a step do not fit."""
        schedule, problem = plan.schedule, plan.problem
        sharded = sharding(problem)
        sizes = sharded.sizes(problem.placement)
        plans = plan_gathers(schedule, sizes, sharded.memory)
        copies = copy_works(schedule, problem.costs, plan.offloads, problem.host) if problem.host and plan.offloads else ()
        time = problem.objective.measure(play_gathers(schedule, problem.costs, plans, sharded.times(problem.placement), copies).metrics)
        return cls(plan, plans, time, sum(sizes[gather.stage] for rank in plans for gather in rank.gathers))

    @property
    def schedule(self) -> Schedule:
        """The schedule of the plan."""
        return self.plan.schedule

    @property
    def num_gathers(self) -> int:
        """The number of gathers per step, on all ranks."""
        return sum(len(plan.gathers) for plan in self.gathers)

    @property
    def bound(self) -> int:
        """Lower bound on `num_gathers` for this order of passes."""
        return sum(plan.bound for plan in self.gathers)

    def _summary(self) -> str:
        return f"{self.plan.how}: {self.num_gathers} gathers of at least {self.bound}, {show_bytes(self.gathered_bytes)}"


def sharding(problem: Problem) -> Sharded:
    """Returns the sharded weights of `problem`, which must have them."""
    assert problem.sharded is not None, "only sharded weights are gathered"
    return problem.sharded


def min_gathers(problem: Problem) -> int:
    """Computes a lower bound on the gathers of all ranks, for any order of passes on the placement within its limits.

    The larger of two bounds counts for each rank. First, every order contains the passes of one microbatch in their only possible order, so
    gathers for all passes also serve these. Second, if the gathered weights of only one stage fit at a time, the memory for activations
    limits how many microbatches can use them before the next stage is gathered.

    >>> import zerobubble as zb
    >>> place, costs, limits = zb.Placement.vee(2), zb.Costs.uniform(4), zb.Limits((5_000_000,) * 2)
    >>> [min_gathers(zb.planning.Problem(place, 8, costs, limits, sharded=Sharded(12, memory))) for memory in (None, 6)]
    [4, 10]
    """
    sharded, placement = sharding(problem), problem.placement
    sizes = dict(enumerate(sharded.sizes(placement)))
    return sum(
        max(
            _one_microbatch_gathers(_chain(placement, rank), sizes, sharded.memory, rank).bound,
            _turns_bound(problem, sizes, sharded.memory, rank),
        )
        for rank in range(placement.num_ranks)
    )


def _chain(placement: Placement, rank: int) -> list[Op]:
    """Returns the passes of one microbatch on a rank that use weights, in their only possible order."""
    stages = [stage for stage, home in enumerate(placement.routes[0]) if home == rank]
    return [*(Op(Kind.F, stage, 0) for stage in stages), *(Op(Kind.B, stage, 0) for stage in reversed(stages))]


def _one_microbatch_gathers(chain: Sequence[Op], sizes: dict[int, int], memory: int | None, rank: int) -> RankGathers:
    here = {op.stage: sizes[op.stage] for op in chain}
    memory_left = sum(here.values()) if memory is None else memory
    return gathers_of([(op,) for op in chain], here, [memory_left] * len(chain), f"rank {rank}")


def _turns_bound(problem: Problem, sizes: dict[int, int], memory: int | None, rank: int) -> int:
    """Computes a lower bound on the gathers of a rank whose stages take turns; 0 if the weights of two stages fit together.

    A turn is a period in which the weights of one stage are gathered. The turns of the rank's last stage divide the passes of each earlier
    stage into groups. Between its F and its B of an earlier stage, a microbatch visits the last stage, so its B is in a later group than
    its F.

    During a turn of the last stage, at most k microbatches wait for their B of the earlier stage: one that holds activations in all stages,
    and those that fit in the remaining memory. A group can run B only for microbatches that already wait when it begins, and at most k may
    wait when it ends, so it has at most k F's. Hence at least m / k groups have F's, one more follows with the last B's, and turns of the
    last stage separate them.
    """
    stages = [stage for stage, home in enumerate(problem.placement.routes[0]) if home == rank]
    if problem.recomputation is not None or problem.host is not None or problem.costs.shares:
        return 0
    if memory is None or len(stages) < 2 or sum(sorted(sizes[stage] for stage in stages)[:2]) <= memory:
        return 0
    held, memory_left = problem.costs.held_after_f, problem.limits.memory[rank]
    spare = memory_left - sum(held[stage] for stage in stages)
    groups = [-(-problem.num_microbatches // (1 + max(0, spare) // held[stage])) if held[stage] else 1 for stage in stages[:-1]]
    return sum(groups) + len(groups) + max(groups)


def min_time_with_gathers(problem: Problem, bound: int) -> int:
    """Computes a lower bound in ns on the time of any schedule with gathers, given a `bound` for schedules without.

    The makespan begins with the gather of stage 0, and each rank gathers its stages one after another. A span begins with one gather.
    """
    times, home = sharding(problem).times(problem.placement), problem.placement.routes[0]
    if problem.objective is Objective.PERIOD:
        return bound + min(times)
    loads = [sum(time for time, rank in zip(times, home, strict=True) if rank == here) for here in range(problem.placement.num_ranks)]
    return max(bound + times[0], *loads)
