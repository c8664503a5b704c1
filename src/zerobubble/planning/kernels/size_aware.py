"""List scheduling for microbatches of unequal cost: a rank admits a forward only if it can still complete all its microbatches.

A rank may hold any microbatches that it can complete one after another, in the order of the row, each in the memory that the previous ones
free. This is the banker's algorithm of operating systems. It guarantees that memory never blocks an order for good. The search chooses the
order of the microbatches, and how eagerly ranks fill memory and run W. Each try is one list schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zerobubble.planning.kernels.anneal import seed_random
from zerobubble.planning.kernels.compiled import compiled, inlined
from zerobubble.planning.kernels.joint_search import JointOrder, exchange, with_assignment
from zerobubble.planning.kernels.list_scheduler import FAR
from zerobubble.planning.kernels.play import copy_into
from zerobubble.planning.kernels.search_state import BudgetMeter
from zerobubble.planning.kernels.tables import Floats, Ints, Tables

FILL, GAP, WAIT = 0, 1, 2
"""What a policy says: the share of its memory that a rank fills with forwards beyond the oldest microbatch; the idle time, in times of W,
that W fills; how long a rank waits for a B rather than start an F, in mean pass times of the schedule."""

LISTED_PASSES = 200_000
"""Passes of list schedules between two checks of the clock: some hundredths of a second."""

HOT, COLD = 0.02, 0.0005
"""Temperatures at the beginning and at the end of the search, as shares of the time of the schedule."""


class Listing(NamedTuple):
    """Scratch space for one list schedule, and its `order`. It is created once per problem."""

    order: Ints
    runs: Ints
    """The number of passes run of each code."""
    end: Ints
    """The end of code c for the microbatch in place j, at `c * microbatches + j`; `FAR` until it has run."""
    queue: Ints
    """The codes of W whose B has run, in the order of these B, at the positions of their rank's row."""
    ranks: NDArray[np.void]


_RANK = np.dtype([(name, "i8") for name in ("filled", "free", "idle", "held", "pending", "weight_from", "weight_to", "choice", "start")])
"""Of a rank.

- `filled`: the number of passes it has run.
- `free`: when it is free, and `idle` how long it has idled, in ns.
- `held`: the bytes it holds, and `pending` those of them that W gives back.
- `weight_from`, `weight_to`: where its queue of W begins and ends.
- `choice`: the code that it runs next, -1 for none, and `start` when, in ns.
"""


def listing(tables: Tables) -> Listing:
    """Buffers in which to schedule the problem of `tables`."""
    size, codes, ranks = tables.size, len(tables.codes), len(tables.ranks)
    order, runs, end, queue = (np.zeros(count, np.int64) for count in (size, codes, size, size))
    return Listing(order, runs, end, queue, np.zeros(ranks, _RANK))


def search_assignments(
    tables: Tables, starts: Sequence[Sequence[int]], bound: int, budget: BudgetMeter, seed: int, most: int
) -> list[JointOrder]:
    """Returns up to `most` of the best orders found by list scheduling, best first. The search tries `starts`, then neighbors of the best.

    `tables` have the microbatches in the order of their numbers. With an empty budget only `starts` are tried.
    """
    scratch, mean = listing(tables), float(tables.time.mean())
    found: list[JointOrder] = []
    policy = np.array([1.0, 0.0, 0.0])
    for start in starts:
        longest = int(list_by_size(with_assignment(tables, start), policy, mean, scratch)[0])
        budget.used += 1
        if longest >= 0:
            found.append(JointOrder(scratch.order.copy(), np.array(start, np.int64), longest))
    if not found or budget.spent >= 1:
        return sorted(found, key=_time)[:most]
    seed_random(seed)
    best = min(found, key=_time)
    arranged, assignment = with_assignment(tables, best.assignment.tolist()), best.assignment.copy()
    cost = float(best.time) + list_by_size(arranged, policy, mean, scratch)[1] / len(tables.ranks)
    order, best_assignment, goal = best.order.copy(), best.assignment.copy(), best.time
    while budget.spent < 1 and goal > bound:
        temperature = best.time * HOT * (COLD / HOT) ** budget.spent
        tries = max(4, LISTED_PASSES // tables.size)
        before = goal
        goal, cost, used = improve_assignment(
            arranged, assignment, policy, mean, scratch, order, best_assignment, goal, bound, cost, temperature, tries
        )
        budget.used += used
        if goal < before:
            found.append(JointOrder(order.copy(), best_assignment.copy(), int(goal)))
    return sorted(found, key=_time)[:most]


def _time(order: JointOrder) -> int:
    return order.time


@compiled
def improve_assignment(
    tables: Tables,
    assignment: Ints,
    policy: Floats,
    mean: float,
    scratch: Listing,
    best: Ints,
    best_assignment: Ints,
    goal: int,
    target: int,
    cost: float,
    temperature: float,
    tries: int,
) -> tuple[int, float, int]:
    """Exchanges microbatches or changes the policy, `tries` times. Keeps changes that shorten the schedule, and a few others by chance.

    `tables` have the microbatches in the places of `assignment`. `cost` is the time of that schedule and its mean over ranks, in ns. `best`
    is the shortest order, with `best_assignment` and a time of `goal` ns. Returns goal, cost and the number of tries.
    """
    before = np.float64(0.0)
    for tried in range(tries):
        one, other, which = np.random.randint(len(assignment)), np.random.randint(len(assignment)), -1
        draw = np.random.random()
        if draw < 0.2:
            which = np.random.randint(3)
            before = policy[which]
            if which == FILL:
                policy[which] = 1.0 if np.random.random() < 0.5 else 0.4 + 0.6 * np.random.random()
            else:
                policy[which] = 0.0 if np.random.random() < 0.3 else 2.0 * np.random.random()
        elif draw < 0.6:
            exchange(tables, assignment, one, other)
        else:
            rotate(tables, assignment, one, other)
        longest, total = list_by_size(tables, policy, mean, scratch)
        new_cost = longest + total / len(tables.ranks)
        if longest < 0 or new_cost > cost - temperature * np.log(np.random.random() + 1e-300):
            if which >= 0:
                policy[which] = before
            elif draw < 0.6:
                exchange(tables, assignment, one, other)
            else:
                rotate(tables, assignment, other, one)
            continue
        cost = new_cost
        if longest < goal:
            goal = longest
            copy_into(best, scratch.order)
            copy_into(best_assignment, assignment)
            if goal <= target:
                return goal, cost, tried + 1
    return goal, cost, tries


@compiled
def rotate(tables: Tables, assignment: Ints, start: int, stop: int) -> None:
    """Moves the microbatch in one place to another, past those in between."""
    step = 1 if stop > start else -1
    at = start
    while at != stop:
        exchange(tables, assignment, at, at + step)
        at += step


@compiled
def list_by_size(tables: Tables, policy: Floats, mean: float, scratch: Listing) -> tuple[int, float]:
    """Writes the schedule of a policy into `scratch.order`.

    Returns the time of the longest rank and the sum over ranks (ns), or -1 if there is no schedule.
    """
    for code in range(len(tables.codes)):
        scratch.runs[code] = 0
    for at in range(len(scratch.end)):
        scratch.end[at] = FAR
    for rank in range(len(tables.ranks)):
        state = scratch.ranks[rank]
        state.filled = 0
        state.free = 0
        state.idle = 0
        state.held = 0
        state.pending = 0
        state.weight_from = 0
        state.weight_to = 0
    for rank in range(len(tables.ranks)):
        choose(tables, policy, mean, scratch, rank)
    for _ in range(len(scratch.order)):
        first, rank = FAR, -1
        for other in range(len(tables.ranks)):
            if scratch.ranks[other].choice >= 0 and scratch.ranks[other].start < first:
                first, rank = scratch.ranks[other].start, other
        if rank < 0:
            return -1, 0.0
        user = run(tables, scratch, rank)
        choose(tables, policy, mean, scratch, rank)
        if user >= 0 and tables.codes[user].rank != rank:
            choose(tables, policy, mean, scratch, tables.codes[user].rank)
    longest, total = 0, 0.0
    for rank in range(len(tables.ranks)):
        time = tables.ranks[rank].work + scratch.ranks[rank].idle
        longest = max(longest, time)
        total += time
    return longest, total


@inlined
def run(tables: Tables, scratch: Listing, rank: int) -> int:
    """Runs the pass that `rank` chose. Returns the code that waits for its message, -1 if none does."""
    state, m = scratch.ranks[rank], tables.microbatches
    code = state.choice
    one = code * m + scratch.runs[code]
    ahead = tables.ahead[one]
    if state.filled > 0 or tables.from_start:
        state.idle += state.start - ahead - state.free
    state.free = state.start + tables.time[one]
    scratch.end[one] = state.free
    scratch.order[tables.ranks[rank].first + state.filled] = code
    scratch.runs[code] += 1
    state.filled += 1
    state.held += tables.held[one]
    weight = tables.codes[code].successor
    if weight < 0:  # a W
        state.pending += tables.held[one]
        state.weight_from += 1
    elif tables.codes[weight].successor < 0:  # a B, which leaves work to a W
        state.pending -= tables.held[weight * m + scratch.runs[code] - 1]
        scratch.queue[tables.ranks[rank].first + state.weight_to] = weight
        state.weight_to += 1
    return int(tables.codes[code].user)


@compiled
def choose(tables: Tables, policy: Floats, mean: float, scratch: Listing, rank: int) -> None:
    """Chooses the next pass of `rank` and its start."""
    state, m, limit = scratch.ranks[rank], tables.microbatches, tables.ranks[rank].limit
    weight = -1
    if state.weight_from < state.weight_to:
        weight = scratch.queue[tables.ranks[rank].first + state.weight_from]
    state.choice, state.start = -1, FAR
    begin, stop = tables.ranks[rank].forward, tables.ranks[rank].forward_stop
    oldest = m
    for at in range(begin, stop):
        oldest = min(oldest, scratch.runs[tables.codes[tables.forwards[at]].successor])
    is_full = False
    for at in range(stop - 1, begin - 1, -1):
        forward = tables.forwards[at]
        for turn in range(2):
            code = tables.codes[forward].successor if turn == 0 else forward
            place = scratch.runs[code]
            if place >= m or (turn == 0 and place >= scratch.runs[forward]):
                continue
            one, arrival = code * m + place, 0
            maker = tables.codes[code].maker
            if maker >= 0:
                if scratch.end[maker * m + place] == FAR:
                    continue
                arrival = scratch.end[maker * m + place] + tables.codes[code].lag
            begins = max(state.free + tables.ahead[one], arrival)
            # A B is preferred to an F that could start a little earlier.
            better = begins + (0 if turn == 0 else policy[WAIT] * mean)
            if state.choice >= 0 and better >= state.start:
                continue
            if turn == 1 and place > oldest:
                filled = state.held + tables.held[one]
                if filled > policy[FILL] * limit and filled - state.pending > policy[FILL] * limit:
                    continue
                if not is_safe(tables, scratch, rank, forward, oldest):
                    continue
            if state.held + tables.held[one] + tables.over[one] > limit:
                is_full = True
                continue
            state.choice, state.start = code, begins
    if weight >= 0:
        one = weight * m + scratch.runs[weight]
        gap = state.start - state.free
        if state.choice < 0 or is_full or (gap > 0 and gap >= policy[GAP] * tables.time[one]):
            state.choice, state.start = weight, state.free


@inlined
def is_safe(tables: Tables, scratch: Listing, rank: int, forward: int, oldest: int) -> bool:
    """Whether `rank` can complete all its microbatches one after another once the next one of `forward` has run."""
    m, state = tables.microbatches, scratch.ranks[rank]
    begin, stop = tables.ranks[rank].forward, tables.ranks[rank].forward_stop
    free = tables.ranks[rank].limit - state.held + state.pending - tables.held[forward * m + scratch.runs[forward]]
    newest = scratch.runs[forward] + 1
    for at in range(begin, stop):
        newest = max(newest, scratch.runs[tables.forwards[at]])
    for place in range(oldest, newest):
        now, most = 0, 0
        for at in range(begin, stop):
            code = tables.forwards[at]
            if place >= scratch.runs[code] and not (code == forward and place == scratch.runs[forward]):
                now += tables.held[code * m + place]
                most = max(most, now + tables.over[code * m + place])
        for at in range(stop - 1, begin - 1, -1):
            back = tables.codes[tables.forwards[at]].successor
            if place >= scratch.runs[back]:
                now += tables.held[back * m + place]
                most = max(most, now + tables.over[back * m + place])
                now += tables.held[tables.codes[back].successor * m + place]
        if most > free:
            return False
        free -= now
    return True
