"""Plans the passes of a schedule for the microbatches of one step, starting from the best order of the microbatches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from zerobubble.costs import Costs, Limits
from zerobubble.garbage_pause import garbage_collection_paused
from zerobubble.ir import Kind, Op, Schedule
from zerobubble.microbatch_order import numbers_by_place
from zerobubble.planning.kernels import load_kernels
from zerobubble.planning.problem.problem import Problem
from zerobubble.planning.transforms import fits_memory
from zerobubble.planning.unequal.order import first_choices
from zerobubble.rules import recomputed
from zerobubble.simulation import metrics, peak_memory

if TYPE_CHECKING:
    from zerobubble.planning.kernels.entry_points import JointOrder

WORTH = 0.01
"""Minimum fraction of the step that a plan must save, since every rank has to compile it."""

MOVES = 50_000
"""Default number of moves of passes and microbatches to try: some 10 ms for 4 ranks and 16 microbatches."""

MOST_LISTED, MOST_LISTED_PASSES = 2000, 600_000
"""Maximum number of list schedules to try, and of passes in all of them: about 0.1 s."""

STARTS = 2
"""Number of list schedules to start from, the best ones, in addition to the given order."""


@dataclass(frozen=True, repr=False)
class _Recomputing(Problem):
    """A problem whose stages `recomputing` recompute all their microbatches, at the level of the costs."""

    recomputing: frozenset[int] = frozenset()

    def recomputes(self, stage: int) -> bool:
        return stage in self.recomputing


@garbage_collection_paused()
def plan_passes(
    ordered: Schedule,
    costs: Costs,
    *,
    limits: Limits | None = None,
    moves: int = MOVES,
    seed: int = 0,
    stops: Callable[[], bool] = lambda: False,
) -> Schedule | None:
    """Returns `ordered` with passes and microbatches moved; None if that does not shorten the step by at least the fraction `WORTH`.

    Neither span nor makespan is longer than that of `ordered`, and no rank exceeds its limit. Every stage keeps its kinds of passes: a BW
    stays a BW, and each R runs right before its B. Returns None for a schedule that recomputes only some microbatches of a stage. No clock
    is read, so the result is reproducible unless `stops` ends the search.

    Arguments:
        ordered: the schedule with its microbatches in the order of `order_microbatches`.
        costs: the costs of the stages, with a share for each microbatch.
        limits: bytes of activations that each rank may hold; by default its peak in `ordered`.
        moves: the number of moves to try.
        seed: the seed of the random choices.
        stops: called every few milliseconds; the search ends with its best result if it returns True.
    """
    recomputing = Counter(stage for row in ordered.rows for stage, _ in recomputed(row))
    if any(count < ordered.num_microbatches for count in recomputing.values()):
        return None
    within = Limits(peak_memory(ordered, costs)) if limits is None else limits
    fused = {op.stage for row in ordered.rows for op in row if op.kind is Kind.BW}
    problem = _Recomputing(ordered.placement, ordered.num_microbatches, costs, within, recomputing=frozenset(recomputing))
    kernels = load_kernels()
    tables, assignment = kernels.tables_of(_folded(problem, fused)), numbers_by_place(ordered)

    def improved(start: JointOrder) -> JointOrder:
        meter = kernels.BudgetMeter(0.0, moves // (1 + STARTS), stops)
        best: JointOrder = kernels.improve_jointly(tables, start, 0, meter, seed, moves_passes=True)
        return best

    # The given order comes first, so that a search that is stopped early has at least moved its passes.
    found = [improved(start) for start in kernels.first_orders(tables, kernels.order_of(ordered), [assignment])]
    listing = kernels.BudgetMeter(0.0, min(MOST_LISTED, MOST_LISTED_PASSES // tables.size), stops)
    found += map(improved, kernels.search_assignments(tables, [assignment, *first_choices(costs.shares)], 0, listing, seed, STARTS))
    before, plans = metrics(ordered, costs), []
    for order in found:
        planned = kernels.schedule_of_order(f"{ordered.name}, planned", problem, tables, order.order, order.assignment.tolist())
        planned = replace(planned, rows=tuple(_unfolded(row, fused) for row in planned.rows))
        after = metrics(planned, costs)
        if after.span <= (1 - WORTH) * before.span and after.makespan <= before.makespan and fits_memory(planned, problem):
            plans.append((after.span, planned))
    return min(plans, key=lambda plan: plan[0])[1] if plans else None


def _folded(problem: _Recomputing, fused: set[int]) -> _Recomputing:
    """Returns the problem in which B of the stages `fused` takes the time of BW, and W takes no time and memory."""
    costs = problem.costs
    alone = replace(costs, shares=())
    backward, weight, after_b = list(costs.backward), list(costs.weight), list(costs.held_after_b)
    for stage in fused:
        backward[stage] = alone.time(Kind.BW, stage)
        weight[stage] = after_b[stage] = 0
    folded = replace(costs, backward=tuple(backward), weight=tuple(weight), held_after_b=tuple(after_b), reduce=())
    return replace(problem, costs=folded)


def _unfolded(row: tuple[Op, ...], fused: set[int]) -> tuple[Op, ...]:
    """Returns the row with B and W of the stages `fused` fused."""
    made = (op._replace(kind=Kind.BW) if op.stage in fused and op.kind is Kind.B else op for op in row)
    return tuple(op for op in made if op.stage not in fused or op.kind is not Kind.W)
