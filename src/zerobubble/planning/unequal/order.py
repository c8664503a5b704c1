"""Assigns microbatches of unequal cost to the places of a schedule. Gradients do not depend on the assignment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zerobubble.arguments import NUMBER, WHOLE, optional, takes
from zerobubble.costs import MAX_LIMIT, Costs, Limits
from zerobubble.errors import InputError
from zerobubble.garbage_pause import garbage_collection_paused
from zerobubble.ir import Kind, Schedule
from zerobubble.microbatch_order import numbers_by_place, require_orderable, with_numbers
from zerobubble.planning.kernels import load_kernels
from zerobubble.planning.problem.problem import Objective, Problem
from zerobubble.planning.transforms import fits_memory
from zerobubble.simulation import metrics

SECONDS = 0.02
"""Default time of the search, enough for some hundreds of orders of 64 microbatches on 8 ranks."""

_NONE_FITS = "no order of the microbatches that was tried fits the memory limits: raise them, or choose a schedule that holds less"


@takes(
    schedule=Schedule,
    costs=Costs,
    limits=optional(Limits),
    objective=str,
    seconds=NUMBER,
    evaluations=optional(WHOLE),
    seed=WHOLE,
)
@garbage_collection_paused()
def order_microbatches(
    schedule: Schedule,
    costs: Costs,
    *,
    limits: Limits | None = None,
    objective: str = Objective.PERIOD,
    seconds: float = SECONDS,
    evaluations: int | None = None,
    seed: int = 0,
) -> Schedule:
    """Returns `schedule` with its microbatches in the shortest order found, by the shares of `costs`; never longer than as given.

    The order of passes stays the same; only the numbers of microbatches change. The search starts with the shortest microbatches at both
    ends and the longest in the middle, which gives most of the gain. Then it exchanges two at a time, for some `seconds`, or for a number
    of `evaluations`, which makes the result reproducible. Raises `InputError` for a schedule with several routes, with overlapped passes,
    or whose stages take the microbatches in different orders, if no order found fits `limits`, and if llvmlite is missing.

    Arguments:
        schedule: the order of passes.
        costs: the costs of the stages, with a share for each microbatch.
        limits: bytes of activations that each rank may hold; None for unlimited memory.
        objective: "period" to minimize the longest span of a rank, or "makespan".
        seconds: how long to search.
        evaluations: how many orders to simulate instead of searching for `seconds`.
        seed: the seed of the random choices.

    >>> import zerobubble as zb
    >>> schedule = zb.make("zb-h1", 2, 4)
    >>> costs = zb.Costs(*[(10, 10)] * 3, (0,), (1, 1), (1, 1), shares=(1, 4, 4, 1))
    >>> ordered = zb.planning.order_microbatches(schedule, costs, evaluations=200)
    >>> zb.simulate(ordered, costs).span <= zb.simulate(schedule, costs).span
    True
    """
    costs.require_schedule(schedule)
    require_orderable(schedule)
    boundless = Limits((MAX_LIMIT,) * schedule.num_ranks)
    problem = Problem(schedule.placement, schedule.num_microbatches, costs, limits or boundless, Objective.named(objective))
    if not costs.shares:
        return schedule
    kernels, numbers, kinds = load_kernels(), numbers_by_place(schedule), {op.kind for row in schedule.rows for op in row}
    # The compiled simulator supports R only in plans. Without R, forwards hold everything they save, so the limits are checked below.
    tables = kernels.tables_of(replace(problem, limits=boundless) if Kind.R in kinds else problem)
    starts = kernels.first_orders(tables, kernels.order_of(schedule), [numbers, *first_choices(costs.shares)])
    if not starts:
        raise InputError(_NONE_FITS)
    best, budget = min(starts, key=lambda start: start.time), kernels.BudgetMeter(seconds, evaluations)
    best = kernels.improve_jointly(tables, best, 0, budget, seed, moves_passes=False)
    found = with_numbers(schedule, dict(zip(numbers, best.assignment.tolist(), strict=True)))
    if not any(costs.reduce) and kinds.isdisjoint({Kind.BW, Kind.R}):
        return found  # the compiled simulator is exact for these costs, and has compared it with the given schedule
    fitting = [each for each in (schedule, found) if limits is None or fits_memory(each, problem)]
    if not fitting:
        raise InputError(_NONE_FITS)
    return min(fitting, key=lambda each: problem.objective.measure(metrics(each, costs)))


def first_choices(shares: Sequence[float]) -> list[list[int]]:
    """Returns orders of microbatches to start from: the shortest at both ends, shortest first, longest first."""
    shortest_first = sorted(range(len(shares)), key=lambda microbatch: shares[microbatch])
    return [shortest_first[::2] + shortest_first[1::2][::-1], shortest_first, shortest_first[::-1]]
