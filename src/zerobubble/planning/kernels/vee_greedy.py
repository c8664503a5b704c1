"""The compiled greedy scheduler of ZB-V: `papers.zb_v_greedy` pass for pass, in a hundredth of its time.

That module describes the rule and its source. Plain Python takes seconds for 50,000 passes.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import numpy as np

from zerobubble.ir import Placement, Schedule
from zerobubble.planning.kernels.compiled import compiled
from zerobubble.planning.kernels.tables import Ints, Tables, schedule_of_order, tables_of
from zerobubble.planning.problem.problem import Problem

UNKNOWN = -1
"""The arrival time of an input that has not been computed, or for which no microbatch is left."""


class Made(NamedTuple):
    """The rows so far. By rank: the number of passes, `clock`, `held`, `idle`, `first`, and the queue of pending W's."""

    order: Ints
    runs: Ints
    """The number of microbatches that have run each code."""
    end: Ints
    """The end of code c for microbatch j, at `c * microbatches + j`."""
    ran: Ints
    clock: Ints
    held: Ints
    idle: Ints
    first: Ints
    waiting: Ints
    """Codes of W, in the part of `order` of each rank."""
    homeward: Ints
    """For each rank, whether its next B is that of its first stage."""
    begun: Ints
    """For each rank, the index in its part of the oldest pending W."""
    queued: Ints
    """For each rank, the index in its part for the next pending W."""


def vee_greedy(problem: Problem) -> Schedule | None:
    """Returns the schedule of `papers.zb_v_greedy`; None for another placement, or if its rule reaches a pass that cannot run."""
    placement = problem.placement
    ranks, stages = placement.num_ranks, placement.num_stages
    if placement.routes != Placement.vee(ranks).routes or problem.shortage_reason:
        return None
    tables, bound = tables_of(problem), problem.bound().time
    best, best_cost = None, 1 << 62
    for forward, backward in product((True, False), repeat=2):
        idled, before = np.zeros(ranks, np.int64), 1 << 62
        while True:
            made = _nothing_made(tables, stages)
            cost = int(play_vee(tables, made, idled, forward, backward))
            if cost < 0:
                break
            if cost < best_cost:
                best, best_cost = made.order, cost
            if cost <= bound or cost >= before:
                break
            before, idled = cost, made.idle
        if best_cost <= bound:
            break
    return None if best is None else schedule_of_order("zb-v-greedy", problem, tables, best)


def _nothing_made(tables: Tables, stages: int) -> Made:
    size, ranks = tables.size, len(tables.ranks)
    order, waiting, end = (np.zeros(size, np.int64) for _ in range(3))
    ran, clock, held, idle, first, homeward, begun, queued = (np.zeros(ranks, np.int64) for _ in range(8))
    runs = np.zeros(3 * stages, np.int64)
    return Made(order, runs, end, ran, clock, held, idle, first, waiting, homeward, begun, queued)


@compiled
def play_vee(tables: Tables, made: Made, idled: Ints, forward: bool, backward: bool) -> int:
    """Fills in the rows, given the idle time of each rank in the previous attempt.

    Returns the time of the longest rank in ns, -1 if a pass cannot run.

    `forward` and `backward` say whether W may go into gaps that are too short for it if the rank cannot afford to idle.
    """
    if not (first_microbatch(tables, made) and even_out(tables, made)):
        return -1
    most = 0
    for rank in range(len(tables.ranks)):
        most = max(most, idled[rank])
    for _ in range(2 * tables.microbatches):
        if not (backward_turn(tables, made, idled, most, backward) and forward_turn(tables, made, idled, most, forward)):
            return -1
    longest = 0
    for rank in range(len(tables.ranks)):
        while made.begun[rank] < made.queued[rank]:
            if not run_weight(tables, made, rank):
                return -1
        longest = max(longest, made.clock[rank] - (0 if tables.from_start else made.first[rank]))
    return longest


@compiled
def arrival(tables: Tables, made: Made, code: int) -> int:
    """Returns the arrival of the last input of the next microbatch's pass; `UNKNOWN` if an input has not been computed, or no microbatch is
    left.
    """
    j, latest = made.runs[code], 0
    if j >= tables.microbatches:
        return UNKNOWN
    maker, before = tables.codes[code].maker, tables.codes[code].predecessor
    if maker >= 0:
        if made.runs[maker] <= j:
            return UNKNOWN
        latest = made.end[maker * tables.microbatches + j] + tables.codes[code].lag
    if before >= 0:
        if made.runs[before] <= j:
            return UNKNOWN
        latest = max(latest, made.end[before * tables.microbatches + j])
    return latest


@compiled
def run(tables: Tables, made: Made, code: int) -> bool:
    """Runs the next microbatch's pass. Returns False if it cannot run."""
    rank, j, there = tables.codes[code].rank, made.runs[code], arrival(tables, made, code)
    if there == UNKNOWN or made.held[rank] + tables.codes[code].held > tables.ranks[rank].limit:
        return False
    begin = max(made.clock[rank], there)
    if made.ran[rank] > 0:
        made.idle[rank] += begin - made.clock[rank]
    else:
        made.first[rank] = begin
    made.order[tables.ranks[rank].first + made.ran[rank]] = code
    made.ran[rank] += 1
    made.clock[rank] = begin + tables.codes[code].time
    made.held[rank] += tables.codes[code].held
    made.end[code * tables.microbatches + j] = made.clock[rank]
    made.runs[code] += 1
    if tables.codes[code].predecessor >= 0 and tables.codes[code].successor >= 0:  # a B
        made.waiting[tables.ranks[rank].first + made.queued[rank]] = tables.codes[code].successor
        made.queued[rank] += 1
    return True


@compiled
def run_weight(tables: Tables, made: Made, rank: int) -> bool:
    """Runs the oldest pending W of a rank."""
    code = made.waiting[tables.ranks[rank].first + made.begun[rank]]
    made.begun[rank] += 1
    return run(tables, made, code)


@compiled
def run_with_weights(tables: Tables, made: Made, idled: Ints, most: int, code: int, fill: bool) -> bool:
    """Runs a pass, after the W's that free the memory for it and those that fit into the wait for its message."""
    rank = tables.codes[code].rank
    while made.begun[rank] < made.queued[rank] and made.held[rank] + tables.codes[code].held > tables.ranks[rank].limit:
        if not run_weight(tables, made, rank):
            return False
    spare = most - idled[rank]
    for other in range(len(tables.ranks)):
        spare = max(spare, made.idle[other])
    spare -= made.idle[rank]
    there, gap = max(0, arrival(tables, made, code)), 0
    while made.begun[rank] < made.queued[rank]:
        weight = made.waiting[tables.ranks[rank].first + made.begun[rank]]
        if made.clock[rank] + tables.codes[weight].time > there:
            gap = max(0, there - made.clock[rank])
            break
        if not run_weight(tables, made, rank):
            return False
    if gap > spare and fill and not run_weight(tables, made, rank):
        return False
    return run(tables, made, code)


@compiled
def first_microbatch(tables: Tables, made: Made) -> bool:
    """Runs F of the first microbatch on all stages. On its way back up, each rank first runs as many other F as it has time for."""
    ranks, m = len(tables.ranks), tables.microbatches
    for stage in range(ranks):
        if not run(tables, made, stage):
            return False
    for rank in range(ranks - 1, -1, -1):
        home = 2 * ranks - 1 - rank
        while rank < ranks - 1:
            fits = made.held[rank] + (2 + 2 * rank) * tables.codes[rank].held <= tables.ranks[rank].limit
            in_time = made.clock[rank] + tables.codes[rank].time <= max(0, arrival(tables, made, home))
            if not (fits and made.runs[rank] < m and in_time):
                break
            for stage in range(rank + 1):
                if made.runs[stage] < m and not run(tables, made, stage):
                    return False
        if not run(tables, made, home):
            return False
    return True


@compiled
def even_out(tables: Tables, made: Made) -> bool:
    """Runs F on the way down and on the way back in turn, until each rank has run as many as the previous rank and can hold the next
    microbatch's last F.
    """
    ranks, m, turn = len(tables.ranks), tables.microbatches, 0
    for rank in range(1, ranks):
        before, out, home, its_home = rank - 1, rank, 2 * ranks - 1 - rank, 2 * ranks - rank
        while made.runs[out] + made.runs[home] < made.runs[before] + made.runs[its_home] or (
            made.runs[home] <= made.runs[its_home] and made.runs[its_home] < m
        ):
            for at in range(ranks - 1, rank - 1, -1):
                stage = at if turn == 0 else 2 * ranks - 1 - at
                if made.runs[stage] < m and not run(tables, made, stage):
                    return False
            turn = 1 - turn
    return True


@compiled
def backward_turn(tables: Tables, made: Made, idled: Ints, most: int, fill: bool) -> bool:
    """Runs one B on every rank: first B of the second stages, from the last rank up, if they are ready, then B of the first stages, from
    the first rank down.
    """
    ranks, m = len(tables.ranks), tables.microbatches
    stages = 2 * ranks
    for rank in range(ranks):
        # Noted before anything runs: whether the turn of this rank is that of its first stage.
        out, home = stages + rank, stages + stages - 1 - rank
        made.homeward[rank] = made.runs[home] >= m or arrival(tables, made, out) != UNKNOWN
    for rank in range(ranks - 1, -1, -1):
        if made.homeward[rank] and not run_with_weights(tables, made, idled, most, stages + rank, True):
            return False
    for rank in range(ranks):
        if not made.homeward[rank] and not run_with_weights(tables, made, idled, most, stages + stages - 1 - rank, fill):
            return False
    return True


@compiled
def forward_turn(tables: Tables, made: Made, idled: Ints, most: int, fill: bool) -> bool:
    """Runs one F on every rank that can run one, preferably of the rank's second stage."""
    ranks = len(tables.ranks)
    for rank in range(ranks):
        for turn in range(2):
            stage = 2 * ranks - 1 - rank if turn == 0 else rank
            if arrival(tables, made, stage) != UNKNOWN:
                if not run_with_weights(tables, made, idled, most, stage, fill):
                    return False
                break
    return True
