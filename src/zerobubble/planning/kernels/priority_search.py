"""Local search over priorities of the list scheduler: first over policies in a pool, then over due dates."""

from __future__ import annotations

import numpy as np

from zerobubble.planning.kernels.compiled import compiled
from zerobubble.planning.kernels.list_scheduler import ListScratch, list_schedule
from zerobubble.planning.kernels.play import copy_into
from zerobubble.planning.kernels.policy import cross_policies, draw_policy, perturb_policy
from zerobubble.planning.kernels.priorities import Priorities, apply_policy, copy_priorities, perturb_priorities
from zerobubble.planning.kernels.tables import Floats, Ints, Tables

CROSSED = 0.5
"""The share of tries that cross two policies of the pool."""


@compiled
def cost_of(tables: Tables, priorities: Priorities, scratch: ListScratch, weight: float) -> tuple[float, int]:
    """The cost of the schedule that `priorities` lead to, and the time of its longest rank in ns.

    The cost is that time plus `weight` times the mean time of a rank; infinite, with the time -1, where no schedule comes out.
    """
    longest, total = list_schedule(tables, priorities.due, priorities.dispatch, priorities.lead, scratch)
    return (longest + weight * total / len(tables.ranks) if longest >= 0 else np.inf), longest


@compiled
def first_largest(costs: Floats) -> int:
    """The place of the first NaN or, if there is none, of the first of the largest."""
    largest = 0
    for at in range(len(costs)):
        if np.isnan(costs[at]):
            return at
        if costs[at] > costs[largest]:
            largest = at
    return largest


@compiled
def search_policies(
    tables: Tables,
    leg: Ints,
    scratch: ListScratch,
    priorities: Priorities,
    pool: Floats,
    costs: Floats,
    policy: Floats,
    best: Ints,
    goal: int,
    bound: int,
    tries: int,
    fresh: int,
) -> tuple[int, int]:
    """Try `tries` policies, the first `fresh` of them at random and the rest near those in the `pool`, which takes what is better.

    A policy of the pool whose cost is not known yet (NaN) is tried as it is. `goal` is the longest time of the order `best`; both are
    replaced by what is better, and `bound` ends the search; `policy` is a buffer for one. Gives the goal and the number of tries made.
    """
    for attempt in range(tries):
        if goal <= bound:
            return goal, attempt
        at = first_largest(costs)
        if np.isnan(costs[at]):
            costs[at] = np.inf
            copy_into(policy, pool[at])
        elif attempt < fresh:
            draw_policy(policy)
        else:
            at = np.random.randint(len(costs))
            copy_into(policy, pool[at])
            if np.random.random() < CROSSED:
                cross_policies(policy, pool[np.random.randint(len(costs))])
            else:
                perturb_policy(policy)
        apply_policy(tables, leg, policy, bound, priorities)
        cost, longest = cost_of(tables, priorities, scratch, 0.02)
        if cost <= costs[at]:
            costs[at] = cost
            copy_into(pool[at], policy)
        if 0 <= longest < goal:
            goal = longest
            copy_into(best, scratch.order)
    return goal, tries


@compiled
def search_dates(
    tables: Tables,
    scratch: ListScratch,
    new: Priorities,
    priorities: Priorities,
    best: Ints,
    goal: int,
    bound: int,
    done: float,
    tries: int,
) -> tuple[int, int]:
    """The same from the due dates `priorities`, by so many small changes; worse ones are taken early on, if hardly worse.

    `priorities` change too; `done` is the share of the search that is over.
    """
    cost, longest = cost_of(tables, priorities, scratch, 0.1)
    for attempt in range(tries):
        if 0 <= longest < goal:
            goal = longest
            copy_into(best, scratch.order)
        if goal <= bound:
            return goal, attempt
        perturb_priorities(tables, new, priorities)
        found, longest = cost_of(tables, new, scratch, 0.1)
        if found <= cost * (1 + 5e-4 * np.random.random() * (1 - done)):
            copy_priorities(priorities, new)
            cost = found
    return goal, tries
