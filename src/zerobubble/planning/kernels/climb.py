"""Search over what the list scheduler goes by: first over policies, then over due dates one stretch at a time."""

from __future__ import annotations

import numpy as np

from zerobubble.planning.kernels.compiled import compiled
from zerobubble.planning.kernels.dates import Keys, copy_keys, follow, shake
from zerobubble.planning.kernels.greedy import Sheet, greedy
from zerobubble.planning.kernels.play import copy
from zerobubble.planning.kernels.policy import cross, draw, nudge
from zerobubble.planning.kernels.tables import Floats, Ints, Tables

CROSSED = 0.5
"""The share of tries that mix two policies of the pool."""


@compiled
def cost_of(tables: Tables, keys: Keys, sheet: Sheet, weight: float) -> tuple[float, int]:
    """The longest time plus `weight` times the mean over ranks of what `keys` lead to, and the longest alone; infinite if it stops."""
    longest, total = greedy(tables, keys.due, keys.habits, sheet)
    return (longest + weight * total / len(tables.ranks) if longest >= 0 else np.inf), longest


@compiled
def search_policies(
    tables: Tables,
    leg: Ints,
    sheet: Sheet,
    keys: Keys,
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

    A policy of the pool whose cost is not known yet (NaN) is tried as it is. `goal` is the longest time of the word `best`; both are
    replaced by what is better, and `bound` ends the search; `policy` is room for one. Gives the goal and the number of tries made.
    """
    for attempt in range(tries):
        if goal <= bound:
            return goal, attempt
        at = int(np.argmax(costs))
        if np.isnan(costs[at]):
            costs[at] = np.inf
            copy(policy, pool[at])
        elif attempt < fresh:
            draw(policy)
        else:
            at = np.random.randint(len(costs))
            copy(policy, pool[at])
            if np.random.random() < CROSSED:
                cross(policy, pool[np.random.randint(len(costs))])
            else:
                nudge(policy)
        follow(tables, leg, policy, bound, keys)
        cost, longest = cost_of(tables, keys, sheet, 0.02)
        if cost <= costs[at]:
            costs[at] = cost
            copy(pool[at], policy)
        if 0 <= longest < goal:
            goal = longest
            copy(best, sheet.word)
    return goal, tries


@compiled
def search_dates(
    tables: Tables, sheet: Sheet, new: Keys, keys: Keys, best: Ints, goal: int, bound: int, done: float, tries: int
) -> tuple[int, int]:
    """The same from the due dates `keys`, by so many small changes; worse ones are taken early on, if hardly worse.

    `keys` change too; `done` is the share of the search that is over.
    """
    cost, longest = cost_of(tables, keys, sheet, 0.1)
    for attempt in range(tries):
        if 0 <= longest < goal:
            goal = longest
            copy(best, sheet.word)
        if goal <= bound:
            return goal, attempt
        shake(tables, new, keys)
        found, longest = cost_of(tables, new, sheet, 0.1)
        if found <= cost * (1 + 5e-4 * np.random.random() * (1 - done)):
            copy_keys(keys, new)
            cost = found
    return goal, tries
