"""Search over what the list scheduler goes by: first over policies, then over due dates one stretch at a time."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from zerobubble.plan.kernels.dates import keys_of, num_legs, shaken
from zerobubble.plan.kernels.desk import Desk
from zerobubble.plan.kernels.greedy import Keys
from zerobubble.plan.policy import Policy, drawn, nudged

Ranked = tuple[float, Policy]


def ranked(desk: Desk, policies: Sequence[Policy]) -> list[Ranked]:
    """Each of `policies`, or of the plainest ones where there are none, with its cost, best first."""
    legs = num_legs(desk.tables)
    return sorted((_tried(desk, policy) for policy in policies or (Policy.plain(legs), Policy.plain(legs, float("inf")))), key=_cost)


def search_policies(desk: Desk, dice: Random, tries: int, known: list[Ranked], fresh: float) -> list[Ranked]:
    """The best four of `known` and so many more: first a share of `fresh` policies at random, then some near the best."""
    best = list(known)
    for attempt in range(tries):
        if desk.done:
            break
        if attempt < fresh * tries:
            best = sorted([*best, _tried(desk, drawn(dice, num_legs(desk.tables)))], key=_cost)[:4]
        else:
            at = dice.randrange(len(best))
            found = _tried(desk, nudged(dice, best[at][1]))
            if found[0] <= best[at][0]:
                best[at] = found
    return sorted(best, key=_cost)


def _cost(ranked: Ranked) -> float:
    return ranked[0]


def _tried(desk: Desk, policy: Policy) -> Ranked:
    return desk.schedule(keys_of(desk.tables, policy, desk.bound), "policy", 0.02), policy


def search_keys(desk: Desk, dice: Random, tries: int, policy: Policy) -> Keys:
    """The best due dates that so many small changes lead to from those of `policy`; worse ones are taken early on, if hardly worse."""
    keys = best = keys_of(desk.tables, policy, desk.bound)
    cost = lowest = desk.schedule(keys, "policy", 0.1)
    for attempt in range(tries):
        if desk.done:
            break
        changed = shaken(dice, desk.tables, keys)
        found = desk.schedule(changed, "due dates", 0.1)
        if found <= cost * (1 + 5e-4 * dice.random() * (1 - attempt / tries)):
            keys, cost = changed, found
        if found < lowest:
            best, lowest = changed, found
    return best
