"""Orders that are robust to noise: as short by the measured times, and shorter on average if every pass takes a random time.

The mean objective over a fixed set of samples is minimized by annealing (compiled, if only passes take time) or by random moves of single
passes (with any other axis). Fresh samples judge the result, so an order that fits only the search's samples is rejected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from random import Random
from textwrap import fill
from time import perf_counter
from typing import NamedTuple

from zerobubble.arguments import NUMBER, WHOLE, each, optional, takes
from zerobubble.display import Displayed
from zerobubble.errors import InputError, ScheduleError
from zerobubble.gathers import RankGathers
from zerobubble.ir import Op, Schedule
from zerobubble.offload import Offload, RankOffloads
from zerobubble.offload.offloads import rank_offloads
from zerobubble.planning.answer import Plan
from zerobubble.planning.kernels import load_kernels
from zerobubble.planning.noise.plan_player import PlanPlayer
from zerobubble.planning.noise.sensitivity import check_error_share
from zerobubble.planning.problem.problem import Problem
from zerobubble.planning.shards.few_gathers import FewGathers
from zerobubble.planning.shards.plan_with_gathers import PlanWithGathers
from zerobubble.planning.table import NOTE_WIDTH
from zerobubble.planning.transforms import fits_memory, split, with_row
from zerobubble.rules import recomputed
from zerobubble.units import show_percent


class NoisyObjective(NamedTuple):
    """The objective of an order in ns: by the measured times, and its mean under noise."""

    measured: int
    noisy: float


@dataclass(frozen=True, repr=False)
class RobustOrder(Displayed):
    """An order that is robust to noise, with the objectives of the shortest candidate (`before`) and of this order (`after`)."""

    schedule: Schedule
    before: NoisyObjective
    after: NoisyObjective

    def _summary(self) -> str:
        return f"{self.schedule.name}: {show_percent(self.gain)} shorter than before under noise"

    @property
    def gain(self) -> float:
        """The reduction of the mean objective under noise, as a fraction."""
        return 1 - self.after.noisy / self.before.noisy if self.before.noisy else 0.0


def robust_order_dict(problem: Problem, robust: RobustOrder) -> dict[str, float]:
    """The mean bubble under noise before and after, and the gain as a share of the time."""
    before, after = (problem.bubble(objective.noisy) for objective in (robust.before, robust.after))
    return {"bubble_before": before, "bubble_after": after, "gain": robust.gain}


def robust_order_text(problem: Problem, robust: RobustOrder, error: float) -> str:
    """The same in a sentence."""
    before, after = (show_percent(problem.bubble(objective.noisy)) for objective in (robust.before, robust.after))
    noise = f"If the time of every pass varies with a standard deviation of {show_percent(error)}, the winner has a mean bubble of"
    if robust.gain == 0:
        return fill(f"{noise} {before}. No equally short order with a smaller one was found.", NOTE_WIDTH)
    return fill(f"{noise} {after}, down from {before} before reordering. By the measured times it is as short.", NOTE_WIDTH)


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
    """Finds the order with the shortest mean objective if every pass varies, `error` being its relative standard deviation.

    By the measured times it takes no longer than the shortest of the `candidates` that fit the limits; only slack moves. The search anneals
    the candidate that is best under noise for `seconds`, on samples drawn from `seed`. Fresh samples judge the result; if it is no better,
    the first of the shortest candidates is returned. With `evaluations`, the number of schedules to play, the result depends only on
    `seed`. Ctrl-C returns the best so far. Fused backward passes and overlapped steps are split. Raises `InputError` for an error outside 0
    to 1, for sharded weights, shares, recomputation, a divided head, a host or forwards only, for candidates of another placement or number
    of microbatches, if none fits, and if llvmlite is missing; `ScheduleError` for a candidate that cannot run.
    """
    check_error_share(error)
    others = {
        "weights in shards": problem.sharded is not None,
        "microbatches of unequal cost": bool(problem.costs.shares),
        "recomputation": problem.recomputes_any or any(recomputed(row) for each in candidates for row in each.rows),
        "a divided head": problem.has_divided_head,
        "a host": problem.host is not None,
        "forward passes only": any(each.is_forward_only for each in candidates),
    }
    if asked := [name for name, holds in others.items() if holds]:
        raise InputError("most_robust_order does not support {asked}", asked=" and ".join(asked), remedy="use `zerobubble plan --noise`")
    kernels = load_kernels()
    for other in candidates:
        problem.require_schedule(other, "candidate")
    fitting = [each for each in map(split, candidates) if fits_memory(each, problem)]
    if not fitting:
        raise InputError(
            "none of the {num_candidates} candidates fits the memory limits",
            num_candidates=len(candidates),
            remedy="raise them, or give other candidates",
        )
    tables = kernels.tables_of(problem)
    orders = [kernels.order_of(each) for each in fitting]
    found = kernels.most_robust(tables, orders, error, seconds=seconds, seed=seed, evaluations=evaluations)
    first = fitting[found.first]
    robust = first if found.order is None else kernels.schedule_of_order(f"{first.name}, made robust", problem, tables, found.order)
    before = NoisyObjective(problem.measure(first), found.before.noisy)
    return RobustOrder(robust, before, NoisyObjective(problem.measure(robust), found.after.noisy))


SAMPLES, FRESH = 12, 48
"""Samples on which an order is improved, and fresh ones on which it is judged."""

LONGEST_MOVE = 4
"""Maximum number of places that a pass moves."""

SECONDS = 3.0
"""Default seconds to search."""


def with_robust_winner(
    found: Plan, error: float, *, seconds: float = SECONDS, seed: int = 0, evaluations: int | None = None
) -> tuple[Plan, RobustOrder]:
    """The plan with its winner made robust, and the gain; `error` and the budget as in `most_robust_order`.

    By the measured times the winner takes no longer, and with sharded weights it gathers no more. With shares, R, a divided head, offloads
    or gathers, passes move one at a time, and each order is played with all of these.
    """
    if _is_plain(found):
        robust = most_robust_order(found.problem, [found.schedule], error=error, seconds=seconds, seed=seed, evaluations=evaluations)
        if robust.gain > 0:
            how = f"{found.how}, made robust"
            found = _won(found, Plan.from_schedule(found.problem, found.bound, robust.schedule, found.seconds, how))
        return found, robust
    check_error_share(error)
    start = _Order.from_plan(replace(found, choices=(), savings=()), found.saving(FewGathers))
    best = _searched(start, error, seconds, seed, evaluations)
    judges = _samples(start.plan.schedule, error, FRESH, seed + 1)
    before, after = (NoisyObjective(order.time, order.noisy(judges)) for order in (start, best))
    if after.noisy >= before.noisy:
        return found, RobustOrder(found.schedule, before, before)
    how = f"{found.how}, made robust"
    plan = replace(best.plan, how=how, order=replace(best.plan.schedule, name=how))
    found = _won(found, plan)
    if best.with_gathers is not None:
        with_gathers = replace(best.with_gathers, plan=plan)
        savings = tuple(replace(saving, chosen=with_gathers) if isinstance(saving, FewGathers) else saving for saving in found.savings)
        found = replace(found, savings=savings)
    return found, RobustOrder(plan.schedule, before, after)


def _is_plain(found: Plan) -> bool:
    """Whether only passes take time, forward and backward, one at a time and of equal microbatches."""
    problem = found.problem
    others = (problem.sharded, problem.host, problem.costs.shares or None, problem.costs.fused or None)
    is_simple = others == (None,) * 4 and not problem.has_divided_head and not found.schedule.is_forward_only
    return is_simple and not any(map(recomputed, found.schedule.rows))


def _won(found: Plan, plan: Plan) -> Plan:
    """The plan with another winner of the same problem in place of its own."""
    first = found.choices[0] if found.choices else None
    kept = found.choices if first is None or first.plan.order is not found.order else (replace(first, plan=plan), *found.choices[1:])
    return replace(found.with_winner(plan, *found.savings), choices=kept, simple=found.simple)


class _Order(NamedTuple):
    """A plan with its gathers, if weights are sharded, and its objective with everything by the measured times, in ns."""

    plan: Plan
    with_gathers: PlanWithGathers | None
    time: int
    player: PlanPlayer

    @classmethod
    def from_plan(cls, plan: Plan, gathers: FewGathers | None) -> _Order:
        problem = plan.problem
        with_gathers = None if problem.sharded is None else gathers.chosen if gathers is not None else PlanWithGathers.from_plan(plan)
        taken = () if problem.sharded is None else problem.sharded.times(problem.placement)
        rows: Sequence[RankGathers] = () if with_gathers is None else with_gathers.gathers
        player = PlanPlayer(plan.schedule, plan.offloads, problem.host, rows, taken)
        return cls(plan, with_gathers, (plan.time or 0) if with_gathers is None else with_gathers.time, player)

    def noisy(self, samples: Sequence[Mapping[Op, float]]) -> float:
        """The mean objective under noise."""
        objective, costs = self.plan.problem.objective, self.plan.costs
        return sum(self.player.time(objective, costs, factors=factors) for factors in samples) / len(samples)

    def moved(self, rng: Random) -> _Order | None:
        """The order with one pass moved in its row; None if it cannot run, does not fit, takes longer or gathers more."""
        rank = rng.randrange(self.plan.schedule.num_ranks)
        row = list(self.plan.schedule.rows[rank])
        here = rng.randrange(len(row))
        there = max(0, min(len(row) - 1, here + rng.choice([-1, 1]) * rng.randint(1, LONGEST_MOVE)))
        if here == there:
            return None
        row.insert(there, row.pop(here))
        schedule, plan = with_row(replace(self.plan.schedule, overlaps=frozenset()), rank, row), self.plan
        with suppress(ScheduleError, InputError):
            offloads = _offloads_of(plan.offloads, schedule, rank, plan)
            other = _Order.from_plan(Plan.from_schedule(plan.problem, plan.bound, schedule, plan.seconds, plan.how, offloads), None)
            more = (
                other.with_gathers is not None
                and self.with_gathers is not None
                and other.with_gathers.gathered_bytes > self.with_gathers.gathered_bytes
            )
            return None if other.time > self.time or more else other
        return None


def _offloads_of(offloads: Sequence[RankOffloads], schedule: Schedule, rank: int, plan: Plan) -> tuple[RankOffloads, ...]:
    """The offloads for a reordered row: made and needed at the new positions of their passes, on the host in the same steps."""
    if not offloads:
        return ()
    steps = schedule.steps[rank]
    place = {op: number for number, step in enumerate(steps) for op in step}
    before = plan.schedule.steps[rank]
    moved = [_placed(one, before, place) for one in offloads[rank].offloads]
    changed = rank_offloads(moved, steps, plan.costs, 0)
    return (*offloads[:rank], changed, *offloads[rank + 1 :])


def _placed(one: Offload, before: Sequence[Sequence[Op]], place: Mapping[Op, int]) -> Offload:
    made, needed = (place[before[step][0]] for step in (one.made, one.needed))
    freed = max(one.freed, made + 1)
    if freed >= needed:
        raise InputError(
            "stage {stage} cannot offload microbatch {microbatch}: no step lies between its passes",
            stage=one.stage,
            microbatch=one.microbatch,
        )
    return one._replace(made=made, needed=needed, freed=freed, back=min(max(freed + 1, one.back), needed))


def _samples(schedule: Schedule, error: float, count: int, seed: int) -> list[dict[Op, float]]:
    """Samples of a factor for each pass, independent of the order."""
    rng, ops = Random(seed), sorted(op for row in schedule.rows for op in row)
    return [{op: rng.gauss(1, error) for op in ops} for _ in range(count)]


def _searched(start: _Order, error: float, seconds: float, seed: int, evaluations: int | None) -> _Order:
    """The order after moves that shorten the mean over samples, until the budget is spent or Ctrl-C ends it."""
    rng, samples = Random(seed), _samples(start.plan.schedule, error, SAMPLES, seed)
    best, mean = start, start.noisy(samples)
    ends = inf if evaluations is not None else perf_counter() + seconds
    left: float = inf if evaluations is None else evaluations // (SAMPLES + 1)
    with suppress(KeyboardInterrupt):
        while left > 0 and perf_counter() < ends:
            left -= 1
            other = best.moved(rng)
            if other is not None and (shorter := other.noisy(samples)) < mean:
                best, mean = other, shorter
    return best
