"""Schedules of forwards alone, for inference: list scheduling by a few priority rules, of which the best wins."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from heapq import heappop, heappush
from time import perf_counter

from zerobubble.ir import Kind, Op, Schedule
from zerobubble.planning.answer import Plan
from zerobubble.planning.attempt import Attempt
from zerobubble.planning.problem.problem import Problem
from zerobubble.rules import message_receiver

Rule = Callable[[int, int, int], tuple[int, ...]]
RULES: Mapping[str, Rule] = {
    "first microbatches first": lambda stage, microbatch, _: (microbatch, stage),
    "last stages first": lambda stage, microbatch, _: (-stage, microbatch),
    "first stages first": lambda stage, microbatch, _: (stage, microbatch),
    "rounds of microbatches": lambda stage, microbatch, ranks: (microbatch // ranks, stage, microbatch),
}
"""Priority of an arrived pass by stage, microbatch and number of ranks: the smallest runs first."""


def forward_attempts(problems: Mapping[str, Problem]) -> list[Attempt]:
    """The best schedule of forwards on each placement."""
    return [Attempt(name, _best(problem)) for name, problem in problems.items()]


def _best(problem: Problem) -> Plan:
    started, bound = perf_counter(), problem.bound()
    plans = [Plan.from_schedule(problem, bound, schedule, perf_counter() - started, schedule.name) for schedule in forward_orders(problem)]
    return min(plans, key=lambda plan: (plan.time or 0, plan.makespan or 0))


def forward_orders(problem: Problem) -> Iterator[Schedule]:
    """One schedule for each rule."""
    for name, rule in RULES.items():
        yield Schedule(f"forward only, {name}", problem.placement, problem.num_microbatches, _rows(problem, rule))


def _rows(problem: Problem, rule: Rule) -> tuple[tuple[Op, ...], ...]:
    """The rows of list scheduling: no rank waits while an input has arrived."""
    placement, costs = problem.placement, problem.costs
    home, ranks = placement.routes[0], placement.num_ranks
    coming: list[list[tuple[int, int, int]]] = [[] for _ in range(ranks)]
    coming[home[0]] = [(0, 0, microbatch) for microbatch in range(problem.num_microbatches)]
    here: list[list[tuple[tuple[int, ...], int, int]]] = [[] for _ in range(ranks)]
    rows: list[list[Op]] = [[] for _ in range(ranks)]
    free = [0] * ranks
    while any(coming) or any(here):
        rank = min((each for each in range(ranks) if coming[each] or here[each]), key=lambda each: _begin(free, coming, here, each))
        now = _begin(free, coming, here, rank)
        while coming[rank] and coming[rank][0][0] <= now:
            _, stage, microbatch = heappop(coming[rank])
            heappush(here[rank], (rule(stage, microbatch, ranks), stage, microbatch))
        _, stage, microbatch = heappop(here[rank])
        rows[rank].append(Op(Kind.F, stage, microbatch))
        free[rank] = now + costs.time(Kind.F, stage, microbatch)
        receiver = message_receiver(Kind.F, stage, len(home))
        if receiver is not None:
            hop = costs.message_time(Kind.F, stage) if home[receiver] != rank else 0
            heappush(coming[home[receiver]], (free[rank] + hop, receiver, microbatch))
    return tuple(map(tuple, rows))


def _begin(free: list[int], coming: list[list[tuple[int, int, int]]], here: list[list[tuple[tuple[int, ...], int, int]]], rank: int) -> int:
    """When a rank can begin its next pass, in ns."""
    return free[rank] if here[rank] else max(free[rank], coming[rank][0][0])
