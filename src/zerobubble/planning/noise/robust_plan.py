"""Plans with a robust winner: by the compiled search where passes alone take time, and by moves of passes with any other axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf
from random import Random
from time import perf_counter
from typing import NamedTuple

from zerobubble.errors import InputError, ScheduleError
from zerobubble.gathers import RankGathers
from zerobubble.ir import Op, Schedule
from zerobubble.offload import Offload, RankOffloads
from zerobubble.offload.offloads import rank_offloads
from zerobubble.planning.answer import Plan
from zerobubble.planning.noise.plan_player import PlanPlayer
from zerobubble.planning.noise.robust_order import NoisyObjective, RobustOrder, most_robust_order
from zerobubble.planning.noise.sensitivity import check_error_share
from zerobubble.planning.shards.few_gathers import FewGathers
from zerobubble.planning.shards.priced import Priced
from zerobubble.rules import recomputed

SAMPLES, FRESH = 12, 48
"""On how many samples an order is changed, and on how many others it is judged."""

LONGEST_MOVE = 4
"""By how many places a pass moves at most."""

SECONDS = 3.0
"""How long to search where nobody says."""


def with_robust_winner(
    found: Plan, error: float, *, seconds: float = SECONDS, seed: int = 0, evaluations: int | None = None
) -> tuple[Plan, RobustOrder]:
    """The plan with its winner made robust, and what that gains; `error` and the budget as in `most_robust_order`.

    By the measured times the winner takes no longer, and with weights in shards it gathers no more. Where microbatches are of unequal cost,
    or with R, a divided head, offloads or gathers, passes are moved one at a time, and each order is played with all of that.
    """
    if _is_plain(found):
        robust = most_robust_order(found.problem, [found.schedule], error=error, seconds=seconds, seed=seed, evaluations=evaluations)
        if robust.gain > 0:
            how = f"{found.how}, made robust"
            found = _won(found, Plan.of(found.problem, found.bound, robust.schedule, found.seconds, how))
        return found, robust
    check_error_share(error)
    start = _Order.of(replace(found, choices=(), savings=()), found.saving(FewGathers))
    best = _searched(start, error, seconds, seed, evaluations)
    judges = _samples(start.plan.schedule, error, FRESH, seed + 1)
    before, after = (NoisyObjective(order.time, order.noisy(judges)) for order in (start, best))
    if after.noisy >= before.noisy:
        return found, RobustOrder(found.schedule, before, before)
    how = f"{found.how}, made robust"
    solved = replace(best.plan, how=how, order=replace(best.plan.schedule, name=how))
    found = _won(found, solved)
    if best.priced is not None:
        priced = replace(best.priced, solved=solved)
        savings = tuple(replace(saving, chosen=priced) if isinstance(saving, FewGathers) else saving for saving in found.savings)
        found = replace(found, savings=savings)
    return found, RobustOrder(solved.schedule, before, after)


def _is_plain(found: Plan) -> bool:
    """Whether the order of passes with times of their own is all there is."""
    problem = found.problem
    others = (problem.sharded, problem.host, problem.costs.shares or None, problem.costs.fused or None)
    return others == (None,) * 4 and not problem.has_divided_head and not any(map(recomputed, found.schedule.rows))


def _won(found: Plan, solved: Plan) -> Plan:
    """The plan with another winner of the same problem, in the place of the one it had."""
    first = found.choices[0] if found.choices else None
    kept = found.choices if first is None or first.plan.order is not found.order else (replace(first, plan=solved), *found.choices[1:])
    return replace(found.won_by(solved, *found.savings), choices=kept, simple=found.simple)


class _Order(NamedTuple):
    """A plan with its gathers, where weights are in shards, and the objective with all by the measured times, in ns."""

    plan: Plan
    priced: Priced | None
    time: int
    player: PlanPlayer

    @classmethod
    def of(cls, plan: Plan, gathers: FewGathers | None) -> _Order:
        problem = plan.problem
        priced = None if problem.sharded is None else gathers.chosen if gathers is not None else Priced.of(plan)
        taken = () if problem.sharded is None else problem.sharded.times(problem.placement)
        rows: Sequence[RankGathers] = () if priced is None else priced.gathers
        player = PlanPlayer(plan.schedule, plan.offloads, problem.host, rows, taken)
        return cls(plan, priced, (plan.time or 0) if priced is None else priced.time, player)

    def noisy(self, samples: Sequence[Mapping[Op, float]]) -> float:
        """The mean objective where every pass takes its own time."""
        objective, costs = self.plan.problem.objective, self.plan.costs
        return sum(self.player.time(objective, costs, factors=factors) for factors in samples) / len(samples)

    def moved(self, dice: Random) -> _Order | None:
        """The order with one pass in another place of its row; None where it cannot run, does not fit, takes longer or gathers more."""
        rank = dice.randrange(self.plan.schedule.num_ranks)
        row = list(self.plan.schedule.rows[rank])
        here = dice.randrange(len(row))
        there = max(0, min(len(row) - 1, here + dice.choice([-1, 1]) * dice.randint(1, LONGEST_MOVE)))
        if here == there:
            return None
        row.insert(there, row.pop(here))
        rows = list(self.plan.schedule.rows)
        rows[rank] = tuple(row)
        schedule, plan = replace(self.plan.schedule, rows=tuple(rows), overlaps=frozenset()), self.plan
        with suppress(ScheduleError, InputError):
            offloads = _offloads_of(plan.offloads, schedule, rank, plan)
            other = _Order.of(Plan.of(plan.problem, plan.bound, schedule, plan.seconds, plan.how, offloads), None)
            more = other.priced is not None and self.priced is not None and other.priced.gathered > self.priced.gathered
            return None if other.time > self.time or more else other
        return None


def _offloads_of(offloads: Sequence[RankOffloads], schedule: Schedule, rank: int, plan: Plan) -> tuple[RankOffloads, ...]:
    """The offloads where a row of passes is in another order: made and needed where these passes are now, away in the same steps."""
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
    gone = max(one.gone, made + 1)
    if gone >= needed:
        raise InputError(f"nothing of stage {one.stage} and microbatch {one.microbatch} can be away: its passes are side by side")
    return one._replace(made=made, needed=needed, gone=gone, back=min(max(gone + 1, one.back), needed))


def _samples(schedule: Schedule, error: float, count: int, seed: int) -> list[dict[Op, float]]:
    """Samples of a factor for each pass, whatever the order."""
    dice, ops = Random(seed), sorted(op for row in schedule.rows for op in row)
    return [{op: dice.gauss(1, error) for op in ops} for _ in range(count)]


def _searched(start: _Order, error: float, seconds: float, seed: int, evaluations: int | None) -> _Order:
    """The order that the moves lead to which make the mean over samples shorter, until the budget is spent or Ctrl-C ends it."""
    dice, samples = Random(seed), _samples(start.plan.schedule, error, SAMPLES, seed)
    best, mean = start, start.noisy(samples)
    ends = inf if evaluations is not None else perf_counter() + seconds
    left: float = inf if evaluations is None else evaluations // (SAMPLES + 1)
    with suppress(KeyboardInterrupt):
        while left > 0 and perf_counter() < ends:
            left -= 1
            other = best.moved(dice)
            if other is not None and (shorter := other.noisy(samples)) < mean:
                best, mean = other, shorter
    return best
