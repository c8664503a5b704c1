"""From a policy to the due dates of every pass, and small changes to due dates and habits, range by range."""

from __future__ import annotations

from random import Random

import numpy as np

from zerobubble.plan.kernels.greedy import HABITS, Keys
from zerobubble.plan.kernels.tables import Floats, Ints, Tables
from zerobubble.plan.policy import Policy

NEVER = 1e300
"""Stands for a habit left out; compiled code compares with it as with any number."""


def keys_of(tables: Tables, policy: Policy, bound: int) -> Keys:
    """What `policy` means for a problem whose longest rank takes at least `bound` ns."""
    legs = len(policy.pace) // 2
    mean = mean_pass(tables)
    leg = _legs(tables)
    due, clock, before = np.zeros(len(tables.codes)), 0.0, -1
    for code in tables.life.tolist():
        here = leg[code] + (legs if tables.codes["after"][code] >= 0 else 0)
        if before >= 0:
            clock += float(tables.codes["lag"][code])
            if here != before:
                clock += policy.rest[before] * mean
        due[code] = clock
        clock += policy.pace[here] * float(tables.codes["time"][code])
        before = here
    spare = float(bound - tables.ranks["work"].max())
    allowance = NEVER if policy.allowance == float("inf") else policy.allowance * spare
    habits = np.zeros(len(tables.ranks), HABITS)
    habits[:] = (policy.patience * mean, min(policy.strict * mean, NEVER), policy.patch, allowance, max(1.0, policy.backlog))
    return Keys(due, policy.period * float(tables.ranks["work"].max()) / tables.microbatches, min(policy.delay * mean, NEVER), habits)


def mean_pass(tables: Tables) -> float:
    """The mean time of a pass in ns."""
    return max(1.0, float(tables.codes["time"].mean()))


def num_legs(tables: Tables) -> int:
    """The most stages on a rank."""
    return int((tables.ranks["lane_stop"] - tables.ranks["lane"]).max())


def _legs(tables: Tables) -> list[int]:
    """For every code of F and B, how many stages of its rank a microbatch passes before."""
    leg = [0] * len(tables.codes)
    then = tables.codes["then"].tolist()
    for start, stop in tables.ranks[["lane", "lane_stop"]].tolist():
        for visit, code in enumerate(tables.lanes[start:stop].tolist()):
            leg[code] = leg[then[code]] = visit
    return leg


def shaken(dice: Random, tables: Tables, keys: Keys) -> Keys:
    """`keys` with the due dates of a stretch of passes, or a habit of a stretch of ranks, moved a little."""
    mean = mean_pass(tables)
    size = dice.choice((4.0, 1.0, 0.3, 0.1)) * mean
    kind = dice.random()
    if kind < 0.75:
        due = keys.due.copy()
        _push(dice, due, tables.life, size)
        return keys._replace(due=due)
    habits = keys.habits.copy()
    name, reach = ("patience", size / 3) if kind < 0.85 else ("allowance", 3 * size)
    values = np.minimum(habits[name], float(tables.ranks["work"].max()))
    _push(dice, values, np.arange(len(values)), reach)
    habits[name] = np.maximum(values, 0.0)
    return keys._replace(habits=habits)


def _push(dice: Random, values: Floats, order: Ints, size: float) -> None:
    """Add a step or a ramp to a stretch of `values`, next to each other in `order`."""
    start = dice.randrange(len(order))
    stretch = order[start : start + dice.randint(1, len(order))]
    amount = dice.gauss(0, size)
    values[stretch] += amount if dice.random() < 0.5 else amount * np.linspace(0, 1, len(stretch))
