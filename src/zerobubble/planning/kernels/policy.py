"""Policies: a few numbers, the same for any number of ranks and microbatches, that the list scheduler turns into a schedule.

A leg is one run of a microbatch over the ranks, through one stage of each: with v stages per rank there are v legs forward and v back.
A policy says how fast a microbatch should travel each leg and how ranks behave when they could idle. The due dates of all passes follow
from the real times, so unequal stages need nothing special.

A policy is a vector of four parts:

- a pace for each leg forward and each leg back: the time from a due date to the next one, as a multiple of the pass's own time,
- a rest after each leg forward and each leg back, in mean pass times,
- the lead of each leg forward, in microbatches per mean pass time: by how many microbatches, beyond one, a rank may be ahead on this leg of
  itself on the next one, for every mean pass time that a microbatch travels between the two; after the last leg that is until its B,
- the parameters of the dispatching rule (see `DISPATCH` of the list scheduler) without their units: `PATIENCE`, `STRICT` and `DELAY` in
  mean pass times, `PERIOD` in the work of the busiest rank for one microbatch, `BACKLOG` in microbatches, `ALLOWANCE` in the idle time
  that the bound says is unavoidable, `PATCH` in the time of the W in question. `NEVER` switches a parameter off.
  Microbatches may come in groups: `GROUP` is their number for each rank, and `SPREAD` the time from one to the next within a group as a
  share of `PERIOD`. The groups follow one another so that the microbatches come every `PERIOD` on average.
"""

from __future__ import annotations

import numpy as np

from zerobubble.planning.kernels.compiled import compiled, inlined
from zerobubble.planning.kernels.tables import Floats

PERIOD, PATIENCE, STRICT, PATCH, ALLOWANCE, BACKLOG, DELAY, GROUP, SPREAD = range(9)
"""The place of each parameter of the dispatching rule in the last part of a policy."""

NUM_PARAMETERS = 9

NEVER = 1e300
"""The value of a parameter that is switched off: larger than any time, and a number like any other to compiled code."""

_START = np.array([1.0, 0.0, 8.0, 1.0, 1.0, 3.0, 10.0])
"""The value of each parameter when a search switches it on."""

_STEP = np.array([0.3, 1.0, 10.0, 1.0, 0.3, 3.0, 10.0])
"""The step size of each parameter. A change of the largest size has half of it as standard deviation."""


MOST_UNGROUPED = 2
"""With at most this many stages per rank, microbatches start one by one, because searching for groups does not pay."""

AS_1F1B = 0.5
"""The lead that gives 1F1B with one stage per rank. It is a good start for other numbers of stages, too."""


def full_speed_policy(legs: int, allowance: float, lead: float) -> Floats:
    """The policy with every microbatch at full speed, one each period, and the same lead on all legs.

    `allowance` is as in `DISPATCH`. Both are in the units of a policy, and `NEVER` disables either.
    """
    policy = np.full(5 * legs + NUM_PARAMETERS, NEVER)
    policy[: 2 * legs] = 1.0
    policy[2 * legs : 4 * legs] = 0.0
    policy[4 * legs : 5 * legs] = lead
    parameters = policy[5 * legs :]
    parameters[PERIOD] = 1.0
    parameters[PATIENCE] = 0.0
    parameters[PATCH] = 1.0
    parameters[ALLOWANCE] = allowance
    parameters[GROUP], parameters[SPREAD] = 0.0, 1.0
    return policy


GROUPED_PACE, GROUPED_PATIENCE, GROUPED_PATCH = 2.2, 0.7, 0.2
"""Parameters of the policy with groups. On eight problems of the Zero Bubble paper's models, they were among the best on average."""


def grouped_policy(legs: int, spread: float) -> Floats:
    """The policy that starts one group of microbatches, as many as ranks, at once. Each travels slowly enough for others to run in between.

    For three or more stages per rank, it is a far better starting point than full speed.
    """
    policy = full_speed_policy(legs, NEVER, AS_1F1B)
    policy[: 2 * legs] = GROUPED_PACE
    parameters = policy[5 * legs :]
    parameters[PATIENCE], parameters[PATCH] = GROUPED_PATIENCE, GROUPED_PATCH
    parameters[GROUP], parameters[SPREAD] = 1.0, spread
    return policy


def grouped_policies(legs: int) -> Floats:
    """Returns the policies with groups that a search starts from, one per row. Empty if ranks have few stages."""
    return np.array([grouped_policy(legs, spread) for spread in (0.4, 0.6) if legs > MOST_UNGROUPED]).reshape(-1, 5 * legs + NUM_PARAMETERS)


@inlined
def legs_in(policy: Floats) -> int:
    """Returns the number of forward legs of a policy."""
    return len(policy) // 5 - 1


@compiled
def draw_policy(policy: Floats) -> None:
    """Fills in a random policy."""
    legs = legs_in(policy)
    draw_paces_and_rests(policy, legs)
    draw_leads(policy[4 * legs : 5 * legs])
    draw_parameters(policy[5 * legs :])
    if legs > MOST_UNGROUPED:
        draw_groups(policy[5 * legs :])


@inlined
def draw_paces_and_rests(policy: Floats, legs: int) -> None:
    """Draws the pace and the rest of each leg: usually the same for all legs of a direction, and often full speed."""
    alike = np.random.random() < 0.6
    for at in range(4 * legs):
        if alike and at % legs > 0:
            policy[at] = policy[at - 1]
        elif np.random.random() < 0.4:
            policy[at] = 1.0 if at < 2 * legs else 0.0
        else:
            policy[at] = 1 + 2.2 * np.random.random() if at < 2 * legs else np.random.normal(0, 4)


@inlined
def draw_leads(lead: Floats) -> None:
    """Draws the leads: half of the time none, and usually the same for all legs except the first."""
    limited, alike = np.random.random() < 0.5, np.random.random() < 0.6
    for leg in range(len(lead)):
        if not limited:
            lead[leg] = NEVER
        elif alike and leg > 1:
            lead[leg] = lead[leg - 1]
        else:
            lead[leg] = 1.2 * np.random.random()


@inlined
def draw_parameters(parameters: Floats) -> None:
    """Draws the parameters of the dispatching rule. Each is disabled with its own probability."""
    for at in range(len(parameters)):
        parameters[at] = NEVER
    parameters[PERIOD] = 1.0
    parameters[PATIENCE] = 0.0
    parameters[PATCH] = 1.0
    if np.random.random() < 0.5:
        parameters[PERIOD] = np.random.uniform(0.8, 1.4)
    if np.random.random() < 0.75:
        parameters[PATIENCE] = 1.2 * np.random.random()
    if np.random.random() < 0.5:
        parameters[STRICT] = 20 * np.random.random() ** 2
    if np.random.random() < 0.5:
        parameters[PATCH] = np.random.random()
    if np.random.random() < 0.6:
        parameters[ALLOWANCE] = np.random.uniform(0.85, 1.1) if np.random.random() < 0.7 else np.random.uniform(0, 1.1)
    if np.random.random() < 0.15:
        parameters[BACKLOG] = 1 + 8 * np.random.random()
    if np.random.random() < 0.15:
        parameters[DELAY] = 30 * np.random.random()
    parameters[GROUP], parameters[SPREAD] = 0.0, 1.0


@inlined
def draw_groups(parameters: Floats) -> None:
    """Draws groups of microbatches, slightly more often than no groups."""
    if np.random.random() < 0.6:
        parameters[GROUP] = draw_group()
        parameters[SPREAD] = np.random.random()


@inlined
def draw_group() -> float:
    """Draws the microbatches of a group per rank. Often it is one: a group has then passed all ranks once when the next one starts."""
    return 1.0 if np.random.random() < 0.5 else 2 * np.random.random()


@compiled
def perturb_policy(policy: Floats) -> None:
    """Changes one to three numbers of `policy` slightly: a neighborhood move of the search over policies."""
    legs = legs_in(policy)
    pace, rest = policy[: 2 * legs], policy[2 * legs : 4 * legs]
    lead, parameters = policy[4 * legs : 5 * legs], policy[5 * legs :]
    for _ in range(np.random.randint(1, 4)):
        step = (0.5, 0.15, 0.04)[np.random.randint(3)]
        part = np.random.random()
        if part < 0.25:
            at = np.random.randint(2 * legs)
            pace[at] = max(0.2, pace[at] + np.random.normal(0, step))
        elif part < 0.5:
            rest[np.random.randint(2 * legs)] += np.random.normal(0, 6 * step)
        elif part < 0.55:
            factor = 1 + np.random.normal(0, step)
            for at in range(2 * legs):
                rest[at] *= factor
        elif part < 0.75:
            at = np.random.randint(legs)
            if lead[at] == NEVER:
                lead[at] = 1.2 * np.random.random()
            elif np.random.random() < 0.1:
                lead[at] = NEVER
            else:
                lead[at] = max(0.0, lead[at] + np.random.normal(0, step))
        else:
            one = np.random.randint(5)
            if parameters[one] == NEVER:
                parameters[one] = _START[one]
            else:
                parameters[one] = max(0.0, parameters[one] + np.random.normal(0, step * _STEP[one]))
    if legs > MOST_UNGROUPED:
        perturb_groups(parameters)


@inlined
def perturb_groups(parameters: Floats) -> None:
    """Sometimes changes the groups of microbatches slightly."""
    kind = np.random.random()
    if kind < 0.05:
        parameters[GROUP] = draw_group()
    elif kind < 0.15:
        parameters[GROUP] = max(0.0, parameters[GROUP] + np.random.normal(0, 0.1))
    elif kind < 0.3:
        step = (0.3, 0.1, 0.03)[np.random.randint(3)]
        parameters[SPREAD] = max(0.0, parameters[SPREAD] + np.random.normal(0, step))


@compiled
def cross_policies(policy: Floats, other: Floats) -> None:
    """Copies some numbers of `other` into `policy`, and half of the time changes the result slightly."""
    searched = len(policy) if legs_in(policy) > MOST_UNGROUPED else len(policy) - 2  # GROUP and SPREAD are the last
    for at in range(searched):
        if np.random.random() < 0.3:
            policy[at] = other[at]
    if np.random.random() < 0.5:
        perturb_policy(policy)


def for_twice_the_ranks(policies: Floats) -> Floats:
    """Returns `policies`, one per row, with rests twice as long, for twice as many ranks."""
    legs, wider = policies.shape[1] // 5 - 1, policies.copy()
    wider[:, 2 * legs : 4 * legs] *= 2
    return wider
