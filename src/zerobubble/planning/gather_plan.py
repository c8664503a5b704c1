"""Weights in shards with any other axis: what the search for the others finds, priced with the gathers of each schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from time import perf_counter

from zerobubble.ir import Placement
from zerobubble.planning.answer import Plan
from zerobubble.planning.attempt import Attempt, Budget, Search
from zerobubble.planning.problem.problem import Problem
from zerobubble.planning.problem.sharded import Sharded
from zerobubble.planning.shards.few_gathers import few_gathers

FOR_ORDERS = 0.75
"""The share of the seconds for schedules without gathers."""


def plan_gathered(problems: Mapping[str, Problem], budget: Budget, seed: int, *, search: Search, published: bool = True) -> Plan:
    """The plan over `problems`, whose weights are sharded, with all else that `search` plans for.

    Of the schedules that are hardly longer than the quickest, gathers included, it is the one that gathers least. The search knows of no
    gathers; its choices and, by default, the published schedules are priced with them, and passes move so that weights stay.
    """
    started = perf_counter()
    bare = {name: replace(problem, sharded=None) for name, problem in problems.items()}
    found = search(bare, budget._replace(seconds=FOR_ORDERS * budget.seconds), seed)
    shards = {problem.placement: problem.sharded for problem in problems.values()}
    choices = tuple(replace(choice, plan=_sharded(choice.plan, shards)) for choice in found.choices)
    left = budget._replace(seconds=max(0.0, budget.seconds - (perf_counter() - started - found.compiling)))
    plans = [_sharded(found, shards), *(choice.plan for choice in choices)]
    able = [Attempt(plan.placement.name, replace(plan, choices=(), savings=())) for plan in plans if plan.order is not None]
    left = left if published else left.emptied
    gathers = few_gathers(_each_once(able), left, seed, published=published) if able else None
    found = replace(_sharded(found, shards), choices=choices, simple=None)
    return found if gathers is None else found.won_by(gathers.chosen.solved, gathers, *found.savings)


def _sharded(plan: Plan, shards: Mapping[Placement, Sharded | None]) -> Plan:
    """The plan as one for weights in shards, which change nothing of its figures without gathers."""
    return replace(plan, problem=replace(plan.problem, sharded=shards[plan.placement]))


def _each_once(attempts: list[Attempt]) -> list[Attempt]:
    known: list[Attempt] = []
    for attempt in attempts:
        solved = attempt.solved
        if not any(other.solved.order == solved.order and other.solved.problem == solved.problem for other in known):
            known.append(attempt)
    return known
