"""From a policy to the due dates of every pass, and small changes to due dates and habits, range by range."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from zerobubble.planning.kernels.compiled import compiled, inlined
from zerobubble.planning.kernels.list_scheduler import DISPATCH
from zerobubble.planning.kernels.policy import ALLOWANCE, BACKLOG, DELAY, NEVER, PATCH, PATIENCE, PERIOD, STRICT
from zerobubble.planning.kernels.tables import Floats, Ints, Records, Tables


class Priorities(NamedTuple):
    """What the list scheduler goes by: when every code is due for microbatch 0 in ns, and `DISPATCH` per rank."""

    due: Floats
    dispatch: Records


def empty_priorities(tables: Tables) -> Priorities:
    """Room for keys."""
    return Priorities(np.zeros(len(tables.codes)), np.zeros(len(tables.ranks), DISPATCH))


@compiled
def apply_policy(tables: Tables, leg: Ints, policy: Floats, bound: int, priorities: Priorities) -> None:
    """Fill in `priorities` with what `policy` means for a problem whose longest rank takes at least `bound` ns."""
    legs, mean, busiest = len(policy) // 4 - 1, mean_pass(tables), busiest_work(tables)
    clock, before = 0.0, -1
    for code in tables.chain:
        here = leg[code]
        if before >= 0:
            clock += tables.codes[code].lag
            if here != before:
                clock += policy[2 * legs + before] * mean
        priorities.due[code] = clock
        clock += policy[here] * tables.codes[code].time
        before = here
    date_weights(priorities.due)
    dispatch = policy[4 * legs :]
    for one in priorities.dispatch:
        one.period = dispatch[PERIOD] * busiest / tables.microbatches
        one.patience = dispatch[PATIENCE] * mean
        one.strict = min(dispatch[STRICT] * mean, NEVER)
        one.patch = dispatch[PATCH]
        one.allowance = dispatch[ALLOWANCE] * (bound - busiest) if dispatch[ALLOWANCE] < NEVER else NEVER
        one.backlog = max(1.0, dispatch[BACKLOG])
        one.delay = min(dispatch[DELAY] * mean, NEVER)


@inlined
def date_weights(due: Floats) -> None:
    """W is due when its B was."""
    third = len(due) // 3
    for back in range(third, 2 * third):
        due[back + third] = due[back]


@compiled
def mean_pass(tables: Tables) -> float:
    """The mean time of a pass in ns."""
    total = 0
    for code in range(len(tables.codes)):
        total += tables.codes[code].time
    return max(1.0, total / len(tables.codes))


@compiled
def busiest_work(tables: Tables) -> int:
    """The ns the busiest rank works."""
    most = 0
    for rank in range(len(tables.ranks)):
        most = max(most, tables.ranks[rank].work)
    return most


def legs_of(tables: Tables) -> Ints:
    """For every code of F and B the leg it belongs to: how many stages of its rank a microbatch passes before, backs after all forths."""
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
    """Let `priorities` say what `old` says."""
    for code in range(len(old.due)):
        priorities.due[code] = old.due[code]
    for rank in range(len(old.dispatch)):
        priorities.dispatch[rank] = old.dispatch[rank]


@compiled
def perturb_priorities(tables: Tables, priorities: Priorities, old: Priorities) -> None:
    """Fill in `priorities` with `old`, the due dates of a stretch of passes, or a habit of a stretch of ranks, moved a little."""
    copy_priorities(priorities, old)
    size = (4.0, 1.0, 0.3, 0.1)[np.random.randint(4)] * mean_pass(tables)
    kind = np.random.random()
    if kind < 0.75:
        start, stop, first, last = random_ramp(len(tables.chain), size)
        for at in range(start, stop):
            priorities.due[tables.chain[at]] += first + (last - first) * (at - start) / max(1, stop - 1 - start)
        date_weights(priorities.due)
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
    """A random stretch of so many, and what to add to its first and to its last: the same, or more and more."""
    start = np.random.randint(count)
    last = np.random.normal(0, size)
    return start, min(count, start + np.random.randint(1, count + 1)), last if np.random.random() < 0.5 else 0.0, last
