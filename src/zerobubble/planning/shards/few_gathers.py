"""Schedules with few gathers of sharded weights: among the nearly fastest schedules, the one that gathers the fewest bytes.

Candidates are what the search without gathers found on each placement, the published schedules, and groups of microbatches that pass the
stages of a rank one after another. Random moves place passes of the best candidates next to others of their stage, so that weights stay
gathered. Each candidate is simulated with its own optimal plan of gathers, so the comparison is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from random import Random
from textwrap import fill
from time import perf_counter
from typing import Any

from zerobubble.errors import InputError, ScheduleError
from zerobubble.ir import Kind, Op, Placement, Schedule
from zerobubble.kinds import traits_of
from zerobubble.planning.answer import Plan, Saving
from zerobubble.planning.attempt import PASSES_WITHOUT_CLOCK, Attempt, Budget
from zerobubble.planning.problem.problem import Problem
from zerobubble.planning.problem.sharded import Sharded
from zerobubble.planning.seeds import fit_to_memory, ranked_seeds
from zerobubble.planning.shards.plan_with_gathers import PlanWithGathers, min_gathers, min_time_with_gathers, sharding
from zerobubble.planning.table import NOTE_WIDTH
from zerobubble.planning.transforms import with_recompute_passes, with_row
from zerobubble.units import ms, show_bytes, show_ms, show_percent

Price = Callable[[PlanWithGathers], tuple[int, ...]]
"""Sort key of a schedule with its gathers; less is better."""
MOST_EVALUATIONS = 2_000
"""Orders that the search for fewer gathers tries; each is played in plain Python."""


@dataclass(frozen=True, repr=False)
class FewGathers(Saving):
    """The choice: the `quickest` schedule with its gathers, and the `chosen` one, which gathers least among those nearly as quick.

    Attributes:
        axis: "gathers".
        sharded: The weights that are gathered.
        plain: The shortest plan if gathers are ignored.
        quickest: The quickest schedule with its gathers.
        chosen: The schedule that gathers least among those nearly as quick.
        least_time: A lower bound on the time of all schedules on the placement of the chosen one, in ns.
        least_gathers: A lower bound on their number of gathers.
    """

    axis = "gathers"

    sharded: Sharded
    plain: PlanWithGathers
    quickest: PlanWithGathers
    chosen: PlanWithGathers
    least_time: int
    least_gathers: int

    def for_order(self, priced: PlanWithGathers) -> FewGathers:
        """Returns the choice for the order of `priced`, a plan replayed with other costs, with this order as the only candidate."""
        return _choice(priced, priced, priced)

    def _summary(self) -> str:
        return f"{self.chosen.plan.how} on {self.chosen.plan.problem.placement.name}: {self.chosen.num_gathers} gathers"

    def __str__(self) -> str:
        chosen, quickest, problem = self.chosen, self.quickest, self.chosen.plan.problem
        over = f"{show_percent(chosen.time / self.least_time - 1)} over its bound" if self.least_time else "no bound above 0"
        lines = [f"Sharded {self.sharded._summary()}."]
        for name, one in (("shortest without gathers", self.plain), ("quickest with them", quickest), ("winner", chosen)):
            where = f"{one.plan.how} on {one.plan.problem.placement.name}"
            figures = f"{problem.objective} with gathers {show_ms(one.time)}, {one.num_gathers} gathers of {show_bytes(one.gathered_bytes)}"
            lines.append(f"{name}: {where}: {figures}, this order needs at least {one.bound}")
        lines.append(
            f"No schedule on {problem.placement.name} has fewer than {self.least_gathers} gathers, and the winner's {problem.objective} is "
            f"{over}, {show_ms(self.least_time)}. It takes {show_percent(chosen.time / quickest.time - 1)} longer than the quickest."
        )
        return "\n".join(fill(line, NOTE_WIDTH, subsequent_indent="  ", break_on_hyphens=False) for line in lines)

    def to_dict(self) -> dict[str, Any]:
        """The figures of the three schedules, times in ms."""
        named = {"shortest_without_gathers": self.plain, "quickest": self.quickest, "winner": self.chosen}
        figures = {
            name: {
                "placement": one.plan.problem.placement.name,
                "how": one.plan.how,
                "ms_with_gathers": ms(one.time),
                "num_gathers": one.num_gathers,
                "bound": one.bound,
                "gathered_bytes": one.gathered_bytes,
            }
            for name, one in named.items()
        }
        return figures | {"least_ms_with_gathers": ms(self.least_time), "least_gathers_of_any_order": self.least_gathers}


def few_gathers(attempts: Iterable[Attempt], budget: Budget, seed: int = 0, *, published: bool = True) -> FewGathers | None:
    """The choice among schedules of `attempts` and those that a search within `budget` finds; None if no schedule fits.

    With `published`, published schedules are candidates, too. Raises `InputError` if the weights of a stage exceed the memory for them on
    every placement.
    """
    started = perf_counter()
    feasible = list(_with_headroom(attempts))
    found = [PlanWithGathers.from_plan(plan) for attempt in feasible for plan in _candidates(attempt, published)]
    if not found:
        return None
    plain = min((one for one in found if any(one.plan is attempt.plan for attempt in feasible)), key=lambda one: one.plan.time or 0)
    tries = MOST_EVALUATIONS if budget.evaluations is None else min(budget.evaluations, MOST_EVALUATIONS)
    clock = _Tries(0 if budget.is_empty else tries // 2, started + budget.seconds / 2 if budget.evaluations is None else None)
    rng = Random(seed)
    quickest = _improved(min(found, key=_by_time), _by_time, None, clock, rng)
    sharded = sharding(quickest.plan.problem)
    most = int(quickest.time * (1 + sharded.within))
    clock = _Tries(clock.left + tries // 2 if not budget.is_empty else 0, started + budget.seconds if budget.evaluations is None else None)
    fewest = min((one for one in (*found, quickest) if one.time <= most), key=_by_bytes)
    chosen = _improved(fewest, _by_bytes, most, clock, rng)
    return _choice(plain, quickest, chosen)


def _choice(plain: PlanWithGathers, quickest: PlanWithGathers, chosen: PlanWithGathers) -> FewGathers:
    """The choice, with the bounds on the placement of the chosen plan."""
    problem = chosen.plan.problem
    least = min_time_with_gathers(problem, chosen.plan.bound.time)
    return FewGathers(sharding(problem), plain, quickest, chosen, least, min_gathers(problem))


def _with_headroom(attempts: Iterable[Attempt]) -> Iterator[Attempt]:
    """The attempts whose stages fit one at a time; raises `InputError` with the largest stage if there is none."""
    known = list(attempts)
    memory = sharding(known[0].plan.problem).memory
    largest = {attempt.name: max(sharding(attempt.plan.problem).sizes(attempt.plan.problem.placement)) for attempt in known}
    yield from (attempt for attempt in known if memory is None or largest[attempt.name] <= memory)
    if memory is not None and min(largest.values()) > memory:
        name = min(largest, key=largest.__getitem__)
        raise InputError(
            "gathered weights need {needed} on placement {placement}, the best one, but a rank has {limit} for them",
            needed=show_bytes(largest[name]),
            placement=name,
            limit=show_bytes(memory),
            remedy="give more memory, or more stages",
        )


def _by_time(one: PlanWithGathers) -> tuple[int, int, int]:
    return one.time, one.gathered_bytes, one.num_gathers


def _by_bytes(one: PlanWithGathers) -> tuple[int, int, int]:
    return one.gathered_bytes, one.num_gathers, one.time


def _candidates(attempt: Attempt, with_published: bool) -> Iterator[Plan]:
    """Every schedule known on the placement of an attempt, the published ones, and the groups that fit its memory.

    With a divided head or offloads, only the attempt's own schedule has their passes.
    """
    best = attempt.plan
    if best.order is None:
        return
    yield best
    problem = best.problem
    if problem.has_divided_head or problem.host is not None or not with_published:
        return
    known = {best.schedule.rows}
    published = ranked_seeds(problem) if problem.num_passes <= PASSES_WITHOUT_CLOCK else ()
    for schedule in (*attempt.seeds, *fit_to_memory(published, problem), *_groups(problem)):
        if schedule.rows not in known:
            known.add(schedule.rows)
            with suppress(ScheduleError):  # it exceeds the memory
                yield Plan.from_schedule(problem, best.bound, schedule, 0.0, schedule.name)


def _groups(problem: Problem) -> Iterator[Schedule]:
    """Groups of 1, 2, 4 and so on microbatches, each through all stages of a rank, W after each B or after all B's of its stage."""
    size, num_microbatches = 1, problem.num_microbatches
    while size < 2 * num_microbatches:
        for waits in (False, True):
            yield with_recompute_passes(grouped(problem.placement, num_microbatches, min(size, num_microbatches), waits=waits), problem)
        size *= 2


def grouped(placement: Placement, num_microbatches: int, size: int, *, waits: bool) -> Schedule:
    """Groups of `size` microbatches: F of a group in one stage after the other, then B likewise, from the last stage on.

    A W follows its B or, with `waits`, all B's of the group in its stage.

    >>> print(grouped(Placement.looped(1, 2), 2, 2, waits=True))
    Schedule groups of 2, W behind: 2 stages on 1 rank (looped), 2 microbatches, 12 passes
    rank 0: 0F0 0F1 1F0 1F1 1B0 1B1 1W0 1W1 0B0 0B1 0W0 0W1
    """
    stages = range(placement.num_stages)
    passes: list[Op] = []
    for start in range(0, num_microbatches, size):
        group = range(start, min(start + size, num_microbatches))
        passes += [Op(Kind.F, stage, j) for stage in stages for j in group]
        for stage in reversed(stages):
            together = [Op(kind, stage, j) for kind in (Kind.B, Kind.W) for j in group]
            passes += together if waits else [Op(kind, stage, j) for j in group for kind in (Kind.B, Kind.W)]
    home = placement.routes[0]
    rows = tuple(tuple(op for op in passes if home[op.stage] == rank) for rank in range(placement.num_ranks))
    return Schedule(f"groups of {size}{', W behind' if waits else ''}", placement, num_microbatches, rows)


class _Tries:
    """The number of orders left to try, and a deadline by `perf_counter`, None without a time limit."""

    def __init__(self, left: int, until: float | None) -> None:
        self.left, self._until = left, until

    def take(self) -> bool:
        """Uses up one try. Returns False if none was left."""
        if self.left <= 0 or (self._until is not None and perf_counter() > self._until):
            return False
        self.left -= 1
        return True


def _improved(best: PlanWithGathers, price: Price, most: int | None, tries: _Tries, rng: Random) -> PlanWithGathers:
    """`best` after random moves of passes, each kept if the price does not rise and the time stays within `most` ns.

    Offloads refer to steps of rows, and overlapped passes are next to each other, so nothing moves with them.
    """
    while not best.plan.offloads and not best.schedule.overlaps and tries.take():
        moved = _moved(best.schedule, rng)
        if moved is None:
            return best
        with suppress(ScheduleError):  # it cannot run, or exceeds the memory
            before = best.plan
            how = before.how if before.how.endswith(MOVED) else f"{before.how}{MOVED}"
            plan = Plan.from_schedule(before.problem, before.bound, replace(moved, name=how), before.seconds, how)
            one = PlanWithGathers.from_plan(plan)
            if price(one) <= price(best) and (most is None or one.time <= most):
                best = one
    return best


MOVED = ", moved for gathers"


def _moved(schedule: Schedule, rng: Random) -> Schedule | None:
    """The schedule with some passes of a rank moved next to others of their stage; None if each rank has one stage."""
    feasible = [rank for rank, row in enumerate(schedule.rows) if len({op.stage for op in row}) > 1]
    if not feasible:
        return None
    rank = rng.choice(feasible)
    return with_row(schedule, rank, _row_moved(schedule.rows[rank], rng))


def _row_moved(row: Sequence[Op], rng: Random) -> tuple[Op, ...]:
    """The row with the first passes of a run moved to an earlier run of its stage, or its last ones to a later run."""
    runs = _runs(row)
    here = rng.randrange(len(runs))
    others = [place for place, run in enumerate(runs) if place != here and row[run[0]].stage == row[runs[here][0]].stage]
    if not others:
        return tuple(row)
    there = min(others, key=lambda place: abs(place - here) + rng.random())
    count = rng.randint(1, len(runs[here]))
    taken, at = (runs[here][:count], runs[there][-1] + 1) if there < here else (runs[here][-count:], runs[there][0])
    before = [op for place, op in enumerate(row[:at]) if place not in taken]
    behind = [op for place, op in enumerate(row[at:], at) if place not in taken]
    return (*before, *(row[place] for place in taken), *behind)


def _runs(row: Sequence[Op]) -> list[list[int]]:
    """Runs: the positions of consecutive passes of one stage that use weights."""
    runs: list[list[int]] = []
    for place, op in enumerate(row):
        if traits_of(op.kind).uses_weights:
            if not runs or row[runs[-1][0]].stage != op.stage:
                runs.append([])
            runs[-1].append(place)
    return runs
