"""Policies: a few numbers, independent of ranks and microbatches, that the list scheduler turns into a schedule.

A leg is one visit of a microbatch to each rank. A policy says how fast a microbatch should travel each leg, forth and back, and how
ranks behave when they could idle; the due dates of all passes follow from the real times, so unequal stages need nothing special.

It is a vector: a pace per leg forth and per leg back (time per pass as a multiple of its own), a rest per leg forth and back (the halt
after the leg), and the habits below. Rests, `PATIENCE`, `STRICT` and `DELAY` count in mean pass times, `PERIOD` in the work of the
busiest rank for one microbatch, `BACKLOG` in microbatches, `ALLOWANCE` in the idle time that the bound says is unavoidable, `PATCH` in
the time of the W in question. `NEVER` leaves a habit out.
"""

from __future__ import annotations

import numpy as np

from zerobubble.planning.kernels.compiled import compiled
from zerobubble.planning.kernels.tables import Floats

PERIOD, PATIENCE, STRICT, PATCH, ALLOWANCE, BACKLOG, DELAY = DISPATCH = range(7)

NEVER = 1e300
"""Stands for a habit left out; compiled code compares with it as with any number."""

_START = np.array([1.0, 0.0, 8.0, 1.0, 1.0, 3.0, 10.0])
_STEP = np.array([0.3, 1.0, 10.0, 1.0, 0.3, 3.0, 10.0])
"""Where each habit starts when it has been left out, and how far it moves."""


def full_speed_policy(legs: int, allowance: float) -> Floats:
    """Every microbatch at full speed, one every period."""
    policy = np.full(4 * legs + 7, NEVER)
    policy[: 2 * legs], policy[2 * legs : 4 * legs] = 1.0, 0.0
    dispatch = policy[4 * legs :]
    dispatch[PERIOD], dispatch[PATIENCE], dispatch[PATCH], dispatch[ALLOWANCE] = 1.0, 0.0, 1.0, allowance
    return policy


@compiled
def draw_policy(policy: Floats) -> None:
    """Fill in a policy at random, with every habit left out as often as it helps to do without."""
    legs = len(policy) // 4 - 1
    alike = np.random.random() < 0.6
    for at in range(4 * legs):
        if alike and at % legs > 0:
            policy[at] = policy[at - 1]
        elif np.random.random() < 0.4:
            policy[at] = 1.0 if at < 2 * legs else 0.0
        else:
            policy[at] = 1 + 2.2 * np.random.random() if at < 2 * legs else np.random.normal(0, 4)
    dispatch = policy[4 * legs :]
    for at in range(len(dispatch)):
        dispatch[at] = NEVER
    dispatch[PERIOD], dispatch[PATIENCE], dispatch[PATCH] = 1.0, 0.0, 1.0
    if np.random.random() < 0.5:
        dispatch[PERIOD] = np.random.uniform(0.8, 1.4)
    if np.random.random() < 0.75:
        dispatch[PATIENCE] = 1.2 * np.random.random()
    if np.random.random() < 0.5:
        dispatch[STRICT] = 20 * np.random.random() ** 2
    if np.random.random() < 0.5:
        dispatch[PATCH] = np.random.random()
    if np.random.random() < 0.6:
        dispatch[ALLOWANCE] = np.random.uniform(0.85, 1.1) if np.random.random() < 0.7 else np.random.uniform(0, 1.1)
    if np.random.random() < 0.15:
        dispatch[BACKLOG] = 1 + 8 * np.random.random()
    if np.random.random() < 0.15:
        dispatch[DELAY] = 30 * np.random.random()


@compiled
def perturb_policy(policy: Floats) -> None:
    """Change one to three numbers of `policy` a little."""
    legs = len(policy) // 4 - 1
    pace, rest, dispatch = policy[: 2 * legs], policy[2 * legs : 4 * legs], policy[4 * legs :]
    for _ in range(np.random.randint(1, 4)):
        step = (0.5, 0.15, 0.04)[np.random.randint(3)]
        part = np.random.random()
        if part < 0.3:
            at = np.random.randint(2 * legs)
            pace[at] = max(0.2, pace[at] + np.random.normal(0, step))
        elif part < 0.6:
            rest[np.random.randint(2 * legs)] += np.random.normal(0, 6 * step)
        elif part < 0.65:
            factor = 1 + np.random.normal(0, step)
            for at in range(2 * legs):
                rest[at] *= factor
        else:
            rule = np.random.randint(5)
            if dispatch[rule] == NEVER:
                dispatch[rule] = _START[rule]
            else:
                dispatch[rule] = max(0.0, dispatch[rule] + np.random.normal(0, step * _STEP[rule]))


@compiled
def cross_policies(policy: Floats, other: Floats) -> None:
    """Take some numbers from `other`, and half the time change the outcome a little."""
    for at in range(len(policy)):
        if np.random.random() < 0.3:
            policy[at] = other[at]
    if np.random.random() < 0.5:
        perturb_policy(policy)


def for_twice_the_ranks(policies: Floats) -> Floats:
    """`policies`, a row each, with rests twice as long: what they may mean for twice as many ranks."""
    legs, wider = policies.shape[1] // 4 - 1, policies.copy()
    wider[:, 2 * legs : 4 * legs] *= 2
    return wider
