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
"""The fraction of tries that cross two policies of the pool."""

MEAN_OF_POLICIES = 0.02
"""Weight of the mean time of a rank in the cost of a policy; that of the longest rank is 1."""

MEAN_OF_DATES = 0.1
"""The same for due dates."""

WORSENING = 5e-4
"""The largest relative increase in cost that a search of due dates accepts, at its start."""


@compiled
def cost_of(tables: Tables, priorities: Priorities, scratch: ListScratch, weight: float) -> tuple[float, int]:
    """The cost of the list schedule with these `priorities`, and the time of its longest rank in ns.

    The cost is that time plus `weight` times the mean time of a rank. If there is no schedule, it is infinite, and the time -1.
    """
    longest, total = list_schedule(tables, priorities.due, priorities.dispatch, priorities.lead, scratch)
    return (longest + weight * total / len(tables.ranks) if longest >= 0 else np.inf), longest


@compiled
def first_largest(costs: Floats) -> int:
    """Returns the index of the first NaN or, if there is none, of the first largest value."""
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
    """Tries `tries` policies: the first `fresh` are random, the others are near those in the `pool`.

    Better policies replace those of the pool.

    A policy of the pool whose cost is unknown (NaN) is tried first. `goal` is the longest time of a rank in the order `best`. The search
    ends at `bound`. `leg` is the result of `legs_of`, and `policy` is a buffer. Returns the goal, which is lower if a better order was
    found, and the number of tries.
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
        cost, longest = cost_of(tables, priorities, scratch, MEAN_OF_POLICIES)
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
    """Improves the due dates `priorities` by `tries` small changes. Early in the search, slightly worse ones are accepted, too.

    `best`, `goal`, `bound` and the result are as in `search_policies`. `done` is the fraction of the search that is over, and `new` is a
    buffer.
    """
    cost, longest = cost_of(tables, priorities, scratch, MEAN_OF_DATES)
    for attempt in range(tries):
        if 0 <= longest < goal:
            goal = longest
            copy_into(best, scratch.order)
        if goal <= bound:
            return goal, attempt
        perturb_priorities(tables, new, priorities)
        found, longest = cost_of(tables, new, scratch, MEAN_OF_DATES)
        if found <= cost * (1 + WORSENING * np.random.random() * (1 - done)):
            copy_priorities(priorities, new)
            cost = found
    return goal, tries
