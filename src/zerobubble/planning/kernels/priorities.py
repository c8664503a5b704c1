"""The priorities of the list scheduler: due dates, leads and dispatching parameters, from a policy or from local changes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from zerobubble.planning.kernels.compiled import compiled, inlined
from zerobubble.planning.kernels.list_scheduler import DISPATCH
from zerobubble.planning.kernels.policy import ALLOWANCE, BACKLOG, DELAY, GROUP, NEVER, PATCH, PATIENCE, PERIOD, SPREAD, STRICT, legs_in
from zerobubble.planning.kernels.tables import Floats, Ints, Records, Tables


class Priorities(NamedTuple):
    """The priorities of the list scheduler."""

    due: Floats
    """The due date of each code for microbatch 0, in ns."""
    dispatch: Records
    """The parameters of the dispatching rule, a `DISPATCH` for each rank."""
    lead: Floats
    """For each code of F, the number of microbatches by which its rank may run ahead of its next stage, or on its last stage of its
    B."""


def empty_priorities(tables: Tables) -> Priorities:
    """Returns buffers for the priorities of a problem."""
    return Priorities(np.zeros(len(tables.codes)), np.zeros(len(tables.ranks), DISPATCH), np.zeros(len(tables.codes)))


@compiled
def apply_policy(tables: Tables, leg: Ints, policy: Floats, bound: int, priorities: Priorities) -> None:
    """Computes the `priorities` of `policy` for a problem whose longest rank takes at least `bound` ns."""
    legs = legs_in(policy)
    mean = mean_pass(tables)
    busiest = busiest_work(tables)
    clock, before = 0.0, -1
    for code in tables.chain:
        here = leg[code]
        if before >= 0:
            clock += tables.codes[code].lag
            if here != before:
                clock += policy[2 * legs + before] * mean
        clock += time_of_other_slices(tables, code)
        priorities.due[code] = clock
        clock += policy[here] * tables.codes[code].time
        before = here
    set_due_of_weights(priorities.due)
    apply_leads(tables, policy[4 * legs : 5 * legs], mean, priorities.lead)
    parameters = policy[5 * legs :]
    period, group = parameters[PERIOD] * busiest / tables.microbatches, max(1, int(parameters[GROUP] * len(tables.ranks) + 0.5))
    for one in priorities.dispatch:
        one.group = group
        one.period = parameters[SPREAD] * period
        one.pause = group * (period - one.period)
        one.patience = parameters[PATIENCE] * mean
        one.strict = min(parameters[STRICT] * mean, NEVER)
        one.patch = parameters[PATCH]
        one.allowance = parameters[ALLOWANCE] * (bound - busiest) if parameters[ALLOWANCE] < NEVER else NEVER
        one.backlog = max(1.0, parameters[BACKLOG])
        one.delay = min(parameters[DELAY] * mean, NEVER)


@inlined
def apply_leads(tables: Tables, leads: Floats, mean: float, lead: Floats) -> None:
    """Computes `lead` from the leads of a policy; a pass takes `mean` ns on average."""
    clock = 0.0
    for code in tables.chain:
        clock += time_of_other_slices(tables, code)
        lead[code] = clock
        clock += tables.codes[code].time
    for rank in range(len(tables.ranks)):
        first, stop = tables.ranks[rank].forward, tables.ranks[rank].forward_stop
        for at in range(first, stop):
            code = tables.forwards[at]
            following = tables.forwards[at + 1] if at + 1 < stop else tables.codes[code].successor
            travel = (lead[following] - lead[code]) / mean
            ahead = 1 if at + 1 < stop else tables.slices
            lead[code] = ahead + leads[at - first] * travel if leads[at - first] < NEVER else NEVER


@inlined
def time_of_other_slices(tables: Tables, code: int) -> int:
    """Returns the ns of F of all but one slice of a microbatch for the B of the last stage, which waits for them; 0 for other passes."""
    properties = tables.codes[code]
    if properties.maker >= 0 or properties.predecessor < 0:
        return 0
    return int((tables.slices - 1) * tables.codes[properties.predecessor].time)


@inlined
def set_due_of_weights(due: Floats) -> None:
    """Sets the due date of each W to that of its B. Codes of F come first, then those of B, then those of W."""
    third = len(due) // 3
    for back in range(third, 2 * third):
        due[back + third] = due[back]


@compiled
def mean_pass(tables: Tables) -> float:
    """The mean time of a pass in ns, at least 1."""
    total = 0
    for code in range(len(tables.codes)):
        total += tables.codes[code].time
    return max(1.0, total / len(tables.codes))


@compiled
def busiest_work(tables: Tables) -> int:
    """Returns the work of the busiest rank in ns."""
    most = 0
    for rank in range(len(tables.ranks)):
        most = max(most, tables.ranks[rank].work)
    return most


def legs_of(tables: Tables) -> Ints:
    """Returns the leg of each code of F and B (see `policy`): the position of its stage among those of its rank.

    For B, it is this plus `num_legs`.
    """
    leg = np.zeros(len(tables.codes), np.int64)
    successor, legs = tables.codes["successor"].tolist(), num_legs(tables)
    for start, stop in tables.ranks[["forward", "forward_stop"]].tolist():
        for visit, code in enumerate(tables.forwards[start:stop].tolist()):
            leg[code], leg[successor[code]] = visit, legs + visit
    return leg


def num_legs(tables: Tables) -> int:
    """The most stages on a rank."""
    return int((tables.ranks["forward_stop"] - tables.ranks["forward"]).max())


@inlined
def copy_priorities(priorities: Priorities, old: Priorities) -> None:
    """Copies `old` into `priorities`."""
    for code in range(len(old.due)):
        priorities.due[code] = old.due[code]
        priorities.lead[code] = old.lead[code]
    for rank in range(len(old.dispatch)):
        priorities.dispatch[rank] = old.dispatch[rank]


@compiled
def perturb_priorities(tables: Tables, priorities: Priorities, old: Priorities) -> None:
    """Writes a neighbor of `old` into `priorities`: changes the due dates of some consecutive passes, or a parameter of some consecutive
    ranks.
    """
    copy_priorities(priorities, old)
    size = (4.0, 1.0, 0.3, 0.1)[np.random.randint(4)] * mean_pass(tables)
    kind = np.random.random()
    if kind < 0.75:
        start, stop, first, last = random_ramp(len(tables.chain), size)
        for at in range(start, stop):
            priorities.due[tables.chain[at]] += first + (last - first) * (at - start) / max(1, stop - 1 - start)
        set_due_of_weights(priorities.due)
        return
    start, stop, first, last = random_ramp(len(tables.ranks), size / 3 if kind < 0.85 else 3 * size)
    for at in range(start, stop):
        more = first + (last - first) * (at - start) / max(1, stop - 1 - start)
        if kind < 0.85:
            priorities.dispatch[at].patience = max(0.0, priorities.dispatch[at].patience + more)
        else:
            priorities.dispatch[at].allowance = max(0.0, min(priorities.dispatch[at].allowance, 1.0 * busiest_work(tables)) + more)


@compiled
def random_ramp(count: int, size: float) -> tuple[int, int, float, float]:
    """Returns start and end of a random range among `count` items, and the changes at its first and its last item."""
    start = np.random.randint(count)
    last = np.random.normal(0, size)
    return start, min(count, start + np.random.randint(1, count + 1)), last if np.random.random() < 0.5 else 0.0, last
