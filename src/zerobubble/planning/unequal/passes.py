"""Plans the passes of a schedule for the microbatches of one step, starting from the best order of the microbatches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from zerobubble.costs import Costs, Limits
from zerobubble.garbage_pause import garbage_collection_paused
from zerobubble.ir import Kind, Op, Schedule
from zerobubble.planning.kernels import load_kernels
from zerobubble.planning.problem.problem import Problem
from zerobubble.planning.transforms import fits_memory
from zerobubble.planning.unequal.order import first_choices, numbers_by_place
from zerobubble.rules import recomputed
from zerobubble.simulation import metrics, peak_memory

if TYPE_CHECKING:
    from zerobubble.planning.kernels.entry_points import JointOrder

WORTH = 0.01
"""The least share of the step that a plan must save: every rank has to compile it."""

MOVES = 50_000
"""Moves of passes and microbatches to try: some hundredths of a second for 4 ranks and 16 microbatches."""

MOST_LISTED, MOST_LISTED_PASSES = 2000, 600_000
"""List schedules to try, and the most passes in all of them: about a tenth of a second."""

STARTS = 2
"""The best list schedules to begin from, in addition to the order alone."""


@dataclass(frozen=True, repr=False)
class _Recomputing(Problem):
    """A problem whose stages `again` recompute all their microbatches, at the level that the costs have."""

    again: frozenset[int] = frozenset()

    def recomputes(self, stage: int) -> bool:
        return stage in self.again


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
    """`ordered` with passes and microbatches moved, where that shortens the step by at least the share `WORTH`, otherwise None.

    Neither the span nor the makespan is longer than that of `ordered`, and no rank holds more than its limit. Every stage keeps its kinds
    of passes: a BW stays a BW, and each R runs right before its B. A schedule that recomputes only some microbatches of a stage gives
    None. No clock is read: the answer is always the same unless `stops` ends the search.

    Arguments:
        ordered: the schedule with its microbatches where `order_microbatches` puts them.
        costs: what stages take, with a share for each microbatch.
        limits: bytes of activations that each rank may hold; by default the most that it holds in `ordered`.
        moves: how many moves to try.
        seed: another one makes other random choices.
        stops: asked every few milliseconds whether to end the search with what it has found so far.
    """
    again = Counter(stage for row in ordered.rows for stage, _ in recomputed(row))
    if any(count < ordered.num_microbatches for count in again.values()):
        return None
    room = Limits(peak_memory(ordered, costs)) if limits is None else limits
    whole = {op.stage for row in ordered.rows for op in row if op.kind is Kind.BW}
    problem = _Recomputing(ordered.placement, ordered.num_microbatches, costs, room, again=frozenset(again))
    kernels = load_kernels()
    tables, takers = kernels.tables_of(_folded(problem, whole)), numbers_by_place(ordered)

    def improved(start: JointOrder) -> JointOrder:
        meter = kernels.BudgetMeter(0.0, moves // (1 + STARTS), stops)
        best: JointOrder = kernels.improve_jointly(tables, start, 0, meter, seed, moves_passes=True)
        return best

    # The order comes first, so that a search that is stopped early has at least moved its passes.
    found = [improved(start) for start in kernels.first_orders(tables, kernels.order_of(ordered), [takers])]
    listing = kernels.BudgetMeter(0.0, min(MOST_LISTED, MOST_LISTED_PASSES // tables.size), stops)
    found += map(improved, kernels.search_takers(tables, [takers, *first_choices(costs.shares)], 0, listing, seed, STARTS))
    before, plans = metrics(ordered, costs), []
    for order in found:
        planned = kernels.schedule_of_order(f"{ordered.name}, planned", problem, tables, order.order, order.takers.tolist())
        planned = replace(planned, rows=tuple(_unfolded(row, whole) for row in planned.rows))
        after = metrics(planned, costs)
        if after.span <= (1 - WORTH) * before.span and after.makespan <= before.makespan and fits_memory(planned, problem):
            plans.append((after.span, planned))
    return min(plans, key=lambda plan: plan[0])[1] if plans else None


def _folded(problem: _Recomputing, whole: set[int]) -> _Recomputing:
    """The problem in which B of the stages `whole` takes the time of the BW and leaves nothing to W, which takes no time."""
    costs = problem.costs
    alone = replace(costs, shares=())
    backward, weight, after_b = list(costs.backward), list(costs.weight), list(costs.held_after_b)
    for stage in whole:
        backward[stage] = alone.time(Kind.BW, stage)
        weight[stage] = after_b[stage] = 0
    folded = replace(costs, backward=tuple(backward), weight=tuple(weight), held_after_b=tuple(after_b), reduce=())
    return replace(problem, costs=folded)


def _unfolded(row: tuple[Op, ...], whole: set[int]) -> tuple[Op, ...]:
    """A row with B and W of the stages `whole` in one piece again."""
    made = (op._replace(kind=Kind.BW) if op.stage in whole and op.kind is Kind.B else op for op in row)
    return tuple(op for op in made if op.stage not in whole or op.kind is not Kind.W)
