"""A schedule under construction: passes are appended one at a time, and clock, memory and idle time of each rank are updated."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from zerobubble.errors import InputError
from zerobubble.ir import Kind, Op, Schedule
from zerobubble.planning.problem.problem import Objective, Problem
from zerobubble.rules import makers, uses

SPLIT = (Kind.F, Kind.B, Kind.W)
"""The kinds of passes with a split backward."""

Pass = tuple[Kind, int]
"""A kind and a stage. Microbatches are equal, so each kind takes them in order without loss."""


def pass_needs(num_stages: int) -> dict[Pass, tuple[Pass, ...]]:
    """The passes whose outputs each pass of a microbatch uses, with a split backward."""
    passes = [Op(kind, stage, 0) for kind in SPLIT for stage in range(num_stages)]
    made = {op: [maker for value in uses(op, num_stages) for maker in makers(value)] for op in passes}
    return {(op.kind, op.stage): tuple((m.kind, m.stage) for m in made[op] if m.kind in SPLIT) for op in passes}


class StuckError(InputError):
    """A planner's rule runs a pass that cannot run."""


class PartialSchedule:
    """The rows so far, each pass as early as possible.

    Per rank: `clock` is when it is free, `held` the bytes it holds, `idle` how long it has waited since its first pass, `waiting` the
    stages of the W that it may run, in order of their B. `ends[kind, stage][microbatch]` are in ns. Raises `InputError` if the limits hold
    no microbatch.
    """

    def __init__(self, problem: Problem) -> None:
        check_memory(problem)
        ranks, stages = problem.placement.num_ranks, problem.placement.num_stages
        self.problem = problem
        self.home = problem.placement.routes[0]
        self.needs = pass_needs(stages)
        self.time = {(kind, stage): problem.costs.time(kind, stage) for kind, stage in self.needs}
        self.takes = {(kind, stage): problem.costs.memory_change(kind, stage) for kind, stage in self.needs}
        self.rows: list[list[Op]] = [[] for _ in range(ranks)]
        self.clock, self.held, self.idle, self.first = ([0] * ranks for _ in range(4))
        self.waiting: list[deque[int]] = [deque() for _ in range(ranks)]
        self.ends: dict[Pass, list[int]] = {one: [] for one in self.needs}
        self._sources = {one: [(self.ends[need], self._link(one[1], need[1])) for need in needs] for one, needs in self.needs.items()}

    def _link(self, stage: int, other: int) -> int:
        """The time of a message between two stages, in ns."""
        return 0 if self.home[stage] == self.home[other] else self.problem.costs.comm[min(stage, other)]

    def left(self, kind: Kind, stage: int) -> bool:
        """Whether some microbatch has yet to run this pass."""
        return len(self.ends[kind, stage]) < self.problem.num_microbatches

    def arrival(self, kind: Kind, stage: int) -> int | None:
        """When the inputs of the next microbatch's pass have arrived; None if some do not exist yet or no microbatch is left."""
        if not self.left(kind, stage):
            return None
        microbatch, latest = len(self.ends[kind, stage]), 0
        for ends, link in self._sources[kind, stage]:
            if len(ends) <= microbatch:
                return None
            latest = max(latest, ends[microbatch] + link)
        return latest

    def fits(self, kind: Kind, stage: int) -> bool:
        """Whether the rank has memory for this pass."""
        rank = self.home[stage]
        return self.held[rank] + self.takes[kind, stage] <= self.problem.limits.memory[rank]

    def slack(self, rank: int) -> int:
        """The idle time of the rank that idled most minus the idle time of this rank, in ns."""
        return max(self.idle) - self.idle[rank]

    def run(self, kind: Kind, stage: int) -> None:
        """Runs the pass for the next microbatch; raises `StuckError` if it cannot run."""
        rank, arrival = self.home[stage], self.arrival(kind, stage)
        op = Op(kind, stage, len(self.ends[kind, stage]))
        if arrival is None:
            raise StuckError(f"the rule runs {op} on rank {rank} before its inputs: choose another planner")
        if not self.fits(kind, stage):
            over = self.held[rank] + self.takes[kind, stage] - self.problem.limits.memory[rank]
            raise StuckError(f"the rule runs {op} when rank {rank} lacks {over} bytes: raise its limit or choose another planner")
        begin = max(self.clock[rank], arrival)
        if self.rows[rank]:
            self.idle[rank] += begin - self.clock[rank]
        else:
            self.first[rank] = begin
        self.rows[rank].append(op)
        self.clock[rank] = begin + self.time[kind, stage]
        self.held[rank] += self.takes[kind, stage]
        self.ends[kind, stage].append(self.clock[rank])
        if kind is Kind.B:
            self.waiting[rank].append(stage)

    def run_weight(self, rank: int) -> None:
        """Runs the oldest waiting W of a rank."""
        self.run(Kind.W, self.waiting[rank].popleft())

    def run_weights(self) -> None:
        """Runs every waiting W."""
        for rank, waiting in enumerate(self.waiting):
            while waiting:
                self.run_weight(rank)

    def free_memory(self, kind: Kind, stage: int) -> None:
        """Runs W until the pass fits or none waits."""
        rank = self.home[stage]
        while self.waiting[rank] and not self.fits(kind, stage):
            self.run_weight(rank)

    def fill(self, kind: Kind, stage: int) -> int:
        """Runs the W that end before the pass can start; returns the ns left until then, 0 if no W is left."""
        rank, arrival = self.home[stage], self.arrival(kind, stage) or 0
        waiting = self.waiting[rank]
        while waiting and self.clock[rank] + self.time[Kind.W, waiting[0]] <= arrival:
            self.run_weight(rank)
        return max(0, arrival - self.clock[rank]) if waiting else 0

    @property
    def cost(self) -> int:
        """The problem's objective for the passes that have run, in ns."""
        makespan = self.problem.objective is Objective.MAKESPAN
        return max(end - (0 if makespan else begin) for begin, end in zip(self.first, self.clock, strict=True))

    def schedule(self, name: str) -> Schedule:
        """The rows as a schedule."""
        return Schedule(name, self.problem.placement, self.problem.num_microbatches, tuple(map(tuple, self.rows)))


def check_memory(problem: Problem) -> None:
    """Raises `InputError` if no schedule fits the limits, with the memory that each rank lacks."""
    if problem.shortage_reason:
        raise InputError(problem.shortage_reason)


def shortest(finished: Iterable[PartialSchedule]) -> PartialSchedule:
    """Returns the finished schedule of the smallest cost, the first one if several are equal."""
    return min(finished, key=lambda partial: partial.cost)
