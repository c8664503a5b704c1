"""Small random problems with recomputation, microbatches of unequal cost, or both, and their optima by a constraint program.

The program uses no bound of ours. Stages take microbatches in any order, and each forward of a stage has any allowed level.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import gcd
from random import Random

from ortools.sat.python import cp_model

from zerobubble.costs import FULL, NONE, SELECTIVE, Costs, Level, Limits
from zerobubble.ir import Kind
from zerobubble.planning.placements import family
from zerobubble.planning.problem.problem import Objective, Problem
from zerobubble.planning.problem.recomputation import Recomputation

MS = 1_000_000

AXES = ("recompute", "shares", "both")

SHARES = {
    "two sizes": lambda dice: dice.choice((1.0, 1.0, 1.0, 4.0)),
    "few sizes": lambda dice: dice.choice((0.5, 1.0, 1.5, 2.0)),
    "all different": lambda dice: round(4 * 8 ** dice.random()) / 4,
}
"""How the shares of microbatches are drawn: in quarters, of which all times and bytes are multiples."""

OFFERED: tuple[tuple[Level, ...], ...] = ((NONE, FULL), (NONE, FULL), (NONE, SELECTIVE, FULL), (NONE, Level("half", 0.5, 0.5)), (FULL,))
"""The levels of which the forwards of a problem may have any."""

MOST_PASSES = {"recompute": 48, "shares": 54, "both": 36}
"""Passes F, B and W of a small problem: beyond them few optima are proven in `PROOF`."""

PROOF = 20
"""CP-SAT's deterministic seconds for an optimum."""


def small_problem(axis: str, seed: int) -> Problem:
    """A problem of 2 to 4 ranks and 2 to 8 microbatches on any placement, with memory for one microbatch or for several."""
    dice = Random(f"{axis} {seed}")
    while True:
        ranks, microbatches = dice.randint(2, 4), dice.randint(2, 8)
        where = family(dice.choice(("linear", "linear", "vee", "looped-2")), ranks)
        if 3 * microbatches * where.num_stages <= MOST_PASSES[axis]:
            break
    stages = where.num_stages
    alike = dice.random() < 0.4
    columns = [[4 * dice.randint(1, 9)] * stages if alike else [4 * dice.randint(1, 9) for _ in range(stages)] for _ in range(3)]
    saved = [400 * dice.randint(2, 8)] * stages if alike else [400 * dice.randint(2, 8) for _ in range(stages)]
    left = dice.choice((0.25, 0.5, 1))
    comm = [dice.choice((0, 0, 1, 3))] * (stages - 1)
    times = [tuple(time * MS for time in column) for column in (*columns, comm)]
    costs = replace(Costs(*times, tuple(saved), tuple(round(held * left) for held in saved)), placement=where)
    largest = 1.0
    if axis != "recompute":
        drawn = SHARES[dice.choice(list(SHARES))]
        costs = replace(costs, shares=tuple(drawn(dice) for _ in range(microbatches)))
        largest = max(costs.shares)
    room = dice.uniform(1.05, 1.2 * ranks) * largest
    held = [sum(saved[stage] for _, stage in where.stages(rank)) for rank in range(ranks)]
    problem = Problem(where, microbatches, costs, Limits(tuple(round(room * each) for each in held)), dice.choice(list(Objective)))
    return problem if axis == "shares" else with_levels(problem, dice.choice(OFFERED))


def with_levels(problem: Problem, offered: tuple[Level, ...]) -> Problem:
    """The problem where each forward may have one of these levels."""
    chosen = (offered[-1],) * problem.placement.num_stages
    again = Recomputation(offered, chosen)
    return replace(problem, costs=problem.costs.with_recompute(chosen), recomputation=again)


def optimum(problem: Problem) -> int | None:
    """The least time (ns) of the objective over all orders and levels of single forwards; None where it is not proven in time.

    A rank's first pass starts when what it needs has come, as when it is played: a later start would make the rank's span look shorter.
    """
    return _Program(problem).optimum()


class _Program:
    """The constraint program of a problem, times in the greatest unit that fits them all."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.model, self.home = problem, cp_model.CpModel(), problem.placement.routes[0]
        self.stages, self.microbatches = range(problem.placement.num_stages), range(problem.num_microbatches)
        offered = problem.recomputation.offered if problem.recomputation else (NONE,)
        self.by_level = [problem.costs.with_recompute(level) for level in offered]
        self.costs = self.by_level[0]
        units = list(product(self.stages, self.microbatches))
        self.time = {(kind, s, j): self.costs.time(Kind(kind), s, self._of(j)) for kind in "FBW" for s, j in units}
        self.again = {(n, s, j): own.time(Kind.R, s, self._of(j)) for n, own in enumerate(self.by_level) for s, j in units}
        times = [*self.time.values(), *self.again.values()]
        self.unit = gcd(*times, *self.costs.comm)
        self.horizon = (sum(times) + 2 * len(self.microbatches) * sum(self.costs.comm)) // self.unit
        self.start = {key: self._any(f"{key}") for key in self.time}
        self.busy: list[list[cp_model.IntervalVar]] = [[] for _ in range(problem.placement.num_ranks)]
        self.held: list[list[tuple[cp_model.IntervalVar, int]]] = [[] for _ in range(problem.placement.num_ranks)]

    def _of(self, microbatch: int) -> int | None:
        return microbatch if self.problem.costs.shares else None

    def _any(self, name: str) -> cp_model.IntVar:
        return self.model.new_int_var(0, self.horizon, name)

    def _end(self, kind: str, stage: int, j: int) -> cp_model.LinearExprT:
        return self.start[kind, stage, j] + self.time[kind, stage, j] // self.unit

    def optimum(self) -> int | None:
        """See above."""
        for stage in self.stages:
            for j in self.microbatches:
                self._add_passes(stage, j)
        self._order_those_alike()
        for rank in range(self.problem.placement.num_ranks):
            self.model.add_no_overlap(self.busy[rank])
            intervals, sizes = zip(*self.held[rank], strict=True)
            self.model.add_cumulative(intervals, sizes, self.problem.limits.memory[rank])
        self.model.minimize(self._longest())
        solver = cp_model.CpSolver()
        solver.parameters.max_deterministic_time, solver.parameters.num_workers = PROOF, 1
        return round(solver.objective_value) * self.unit if solver.solve(self.model) == cp_model.OPTIMAL else None

    def _add_passes(self, stage: int, j: int) -> None:
        """The passes of a stage for a microbatch, what they wait for, and what they hold at each level."""
        model, rank = self.model, self.home[stage]
        for kind in "FBW":
            fixed = self.time[kind, stage, j] // self.unit
            self.busy[rank].append(model.new_fixed_size_interval_var(self.start[kind, stage, j], fixed, f"{kind}{stage}.{j}"))
        model.add(self.start["B", stage, j] >= self._end("F", stage, j))
        model.add(self.start["W", stage, j] >= self._end("B", stage, j))
        if stage + 1 < len(self.stages):
            lag = self._lag(stage)
            model.add(self.start["F", stage + 1, j] >= self._end("F", stage, j) + lag)
            model.add(self.start["B", stage, j] >= self._end("B", stage + 1, j) + lag)
        has = [model.new_bool_var(f"level {n} of {stage}.{j}") for n in range(len(self.by_level))]
        model.add_exactly_one(has)
        first, last = self.start["F", stage, j], self._end("B", stage, j)
        microbatch = self._of(j)
        share = 1 if microbatch is None else self.problem.costs.shares[microbatch]
        saved, pending = (round(column[stage] * share) for column in (self.costs.held_after_f, self.costs.held_after_b))
        self._hold(rank, last, self._end("W", stage, j), pending, 1)
        for n, here in enumerate(has):
            kept = round(self.by_level[n].column("held_input")[stage] * share)
            if not (takes := self.again[n, stage, j] // self.unit) and kept == saved:
                self._hold(rank, first, last, saved, here)
                continue
            begin = self._any(f"R{n} {stage}.{j}")
            self.busy[rank].append(model.new_optional_fixed_size_interval_var(begin, takes, here, f"R{n} {stage}.{j}"))
            model.add(begin >= self._end("F", stage, j)).only_enforce_if(here)
            model.add(self.start["B", stage, j] >= begin + takes).only_enforce_if(here)
            self._hold(rank, first, begin, kept, here)
            self._hold(rank, begin, last, saved, here)

    def _lag(self, stage: int) -> int:
        return self.costs.comm[stage] // self.unit if self.home[stage] != self.home[stage + 1] else 0

    def _hold(self, rank: int, begin: cp_model.LinearExprT, stop: cp_model.LinearExprT, size: int, when: cp_model.LiteralT) -> None:
        length = self._any("length")
        self.held[rank].append((self.model.new_optional_interval_var(begin, length, stop, when, "held"), size))

    def _order_those_alike(self) -> None:
        """Microbatches of one share come to the first stage in the order of their numbers."""
        shares = self.problem.costs.shares or (1,) * len(self.microbatches)
        for a in self.microbatches:
            for b in self.microbatches:
                if a < b and shares[a] == shares[b]:
                    self.model.add(self.start["F", 0, a] + self.time["F", 0, a] // self.unit <= self.start["F", 0, b])

    def _longest(self) -> cp_model.IntVar:
        """The objective, where each rank begins as early as its first pass can."""
        longest, model = self._any("longest"), self.model
        for rank in range(self.problem.placement.num_ranks):
            own = [stage for stage in self.stages if self.home[stage] == rank]
            begin = self._any(f"begin {rank}")
            first = [model.new_bool_var(f"{rank} begins with {j}") for j in self.microbatches]
            model.add_exactly_one(first)
            for j, here in enumerate(first):
                at = self.start["F", own[0], j]
                model.add(begin <= at)
                model.add(begin == at).only_enforce_if(here)
                ready = self._end("F", own[0] - 1, j) + self._lag(own[0] - 1) if own[0] else 0
                model.add(begin == ready).only_enforce_if(here)
            since = begin if self.problem.objective is Objective.PERIOD else 0
            for stage in own:
                for j in self.microbatches:
                    model.add(longest >= self._end("W", stage, j) - since)
        return longest
