"""Orders that are robust to noise: as short by the measured times, and shorter on average where every pass takes its own time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import NamedTuple

from zerobubble.arguments import NUMBER, WHOLE, each, optional, takes
from zerobubble.display import Displayed
from zerobubble.errors import InputError
from zerobubble.ir import Schedule
from zerobubble.planning.noise.sensitivity import check_error_share
from zerobubble.planning.problem.problem import Problem
from zerobubble.planning.search import load_kernels
from zerobubble.planning.seeds import fits_memory, split
from zerobubble.planning.table import NOTE_WIDTH, percent
from zerobubble.rules import recomputed
from zerobubble.simulation import simulate


class NoisyObjective(NamedTuple):
    """The objective of an order in ns: by the measured times, and on average where every pass takes its own."""

    measured: int
    noisy: float


@dataclass(frozen=True, repr=False)
class RobustOrder(Displayed):
    """An order that is robust to noise; `before` is the objective of the shortest candidate, `after` that of this order."""

    schedule: Schedule
    before: NoisyObjective
    after: NoisyObjective

    def _summary(self) -> str:
        return f"{self.schedule.name}: {100 * self.gain:.2f} % shorter than before where every pass takes its own time"

    @property
    def gain(self) -> float:
        """How much shorter the objective is under noise, as a share."""
        return 1 - self.after.noisy / self.before.noisy if self.before.noisy else 0.0


def robust_order_dict(problem: Problem, robust: RobustOrder) -> dict[str, float]:
    """The bubble under noise before and after, and the gain as a share of the time."""
    before, after = (problem.bubble(objective.noisy) for objective in (robust.before, robust.after))
    return {"bubble_before": before, "bubble_after": after, "gain": robust.gain}


def robust_order_text(problem: Problem, robust: RobustOrder, error: float) -> str:
    """The same in a sentence."""
    before, after = (percent(problem.bubble(objective.noisy)) for objective in (robust.before, robust.after))
    noise = f"Where every pass varies by itself, with a standard deviation of {percent(error)}, the winner has a mean bubble of"
    if robust.gain == 0:
        return fill(f"{noise} {before}. No order that is as short by the measured times was found to have less.", NOTE_WIDTH)
    return fill(
        f"{noise} {after}: its order was changed for that, before it was {before}. By the measured times it is as short.", NOTE_WIDTH
    )


@takes(problem=Problem, candidates=each(Schedule), error=NUMBER, seconds=NUMBER, seed=WHOLE, evaluations=optional(WHOLE))
def most_robust_order(
    problem: Problem,
    candidates: Sequence[Schedule],
    *,
    error: float = 0.1,
    seconds: float = 3.0,
    seed: int = 0,
    evaluations: int | None = None,
) -> RobustOrder:
    """The order with the shortest mean objective where every pass takes its own time, `error` being the standard deviation as a share.

    By the measured times it takes no longer than the shortest of the `candidates` that fit the limits: slack moves where it is free. It
    is annealed for `seconds`, from the one of these that is best under noise, on samples drawn from `seed`; fresh ones judge it, and
    where it is no better on those, the first of the shortest is given back. With `evaluations`, the number of schedules to play,
    the result depends on `seed` alone. Ctrl-C ends it with the best so far. Backward passes in one piece and overlapped steps are taken
    apart. Raises `InputError` for an error outside 0 to 1, for weights in shards, for forwards that are computed again, for candidates of
    another placement or number of microbatches, where none fits and where llvmlite is missing, `ScheduleError` for one that cannot run.
    """
    check_error_share(error)
    may_recompute = any(map(problem.recomputes, range(problem.placement.num_stages)))
    others = {
        "weights in shards": problem.sharded is not None,
        "microbatches of unequal cost": bool(problem.costs.shares),
        "recomputation": may_recompute or any(recomputed(row) for each in candidates for row in each.rows),
        "a divided head": problem.has_divided_head,
        "a host": problem.host is not None,
    }
    if asked := [name for name, holds in others.items() if holds]:
        what = "most_robust_order moves passes that alone take time, and the problem has"
        raise InputError(f"{what} {' and '.join(asked)}: `zerobubble plan --noise` makes such plans robust")
    kernels = load_kernels()
    for other in candidates:
        if other.placement.routes != problem.placement.routes or other.num_microbatches != problem.num_microbatches:
            raise InputError(f"the candidate {other.name!r} is for another placement or number of microbatches: leave it out")
    fitting = [each for each in map(split, candidates) if fits_memory(each, problem)]
    if not fitting:
        raise InputError(f"none of the {len(candidates)} candidates fits the memory limits")
    tables = kernels.tables_of(problem)
    orders = [kernels.order_of(each) for each in fitting]
    found = kernels.most_robust(tables, orders, error, seconds=seconds, seed=seed, evaluations=evaluations)
    first = fitting[found.first]
    robust = first if found.order is None else kernels.schedule_of_order(f"{first.name}, made robust", problem, tables, found.order)
    times = (problem.objective.of(simulate(schedule, problem.costs)) for schedule in (first, robust))
    before, after = (NoisyObjective(time, judged.noisy) for time, judged in zip(times, (found.before, found.after), strict=True))
    return RobustOrder(robust, before, after)
