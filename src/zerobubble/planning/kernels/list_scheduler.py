"""The list scheduler: time after time the rank that can start first runs the pass whose due date comes first.

Every rank keeps room for the microbatch that came furthest to reach its last stage there, so it never runs into a dead end.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from zerobubble.planning.kernels.compiled import compiled, inlined
from zerobubble.planning.kernels.tables import Floats, Ints, Records, Tables

FAR = 1 << 62

DISPATCH = np.dtype([(name, "f8") for name in ("period", "patience", "strict", "patch", "allowance", "backlog", "delay")])
"""How a rank behaves, in ns unless said otherwise. `period`: from a microbatch's due date to the next one's. `patience`: how much longer
than for the first pass that can run it waits for one that is due before it. `strict`: how much later than its most urgent pass, ready or
not, a pass may be due to be run. `patch`: W fills a gap of at least this share of its own time. `allowance`: the idle time after which W
fills any gap. `backlog`: the number of pending W at which one is run. `delay`: how long after its B a W is due."""

_NEXT = np.dtype([("runs", "i8"), ("arrival", "i8"), ("due", "f8")])
_RANK = np.dtype([(name, "i8") for name in ("filled", "free", "idle", "held", "alive", "room", "pending", "choice", "start")])
_READY = np.dtype([("code", "i8"), ("start", "i8"), ("due", "f8")])


class ListScratch(NamedTuple):
    """Room for the list scheduler to write on: made once, used again and again."""

    order: Ints
    """The rows, rank after rank."""
    end: Ints
    """When code c ended for microbatch j, at `c * microbatches + j`."""
    next: Records
    """For every code how often it has run, when its next message is there (`FAR` while nobody has made it), and when it is due."""
    ranks: Records
    """For every rank the passes it has run, when it is free, the ns it has idled, the bytes it holds and those that wait for a B, the room
    for these, the number of pending W, what it runs next, and when the most urgent F or B could start."""
    next_start: Ints
    """When every rank starts what it runs next, `FAR` if it has to wait for news."""
    ready: Records
    """The passes a rank can choose from."""


def list_scratch(tables: Tables) -> ListScratch:
    """A sheet for `tables`."""
    size, codes, ranks = tables.size, len(tables.codes), len(tables.ranks)
    return ListScratch(
        np.zeros(size, np.int64),
        np.zeros(size, np.int64),
        np.zeros(codes, _NEXT),
        np.zeros(ranks, _RANK),
        np.zeros(ranks, np.int64),
        np.zeros(2 * len(tables.forwards), _READY),
    )


@compiled
def list_schedule(tables: Tables, due: Floats, dispatch: Records, scratch: ListScratch) -> tuple[int, int]:
    """Fill the sheet with the rows that due dates (ns, of microbatch 0) and `DISPATCH` per rank lead to.

    Gives the longest time of a rank and the sum over ranks as `play` does; (-1, 0) where a pass is held up by memory that nothing can free.
    """
    reset(tables, due, scratch)
    for r in range(len(tables.ranks)):
        choose_next_pass(tables, dispatch, scratch, r, True)
    for _ in range(len(scratch.order)):
        r = first_rank_to_start(scratch)
        if scratch.next_start[r] == FAR:
            for q in range(len(tables.ranks)):
                choose_next_pass(tables, dispatch, scratch, q, False)
            r = first_rank_to_start(scratch)
            if scratch.next_start[r] == FAR:
                return -1, 0
        user = run_chosen_pass(tables, dispatch[r].period, scratch, r)
        choose_next_pass(tables, dispatch, scratch, r, True)
        if user >= 0 and tables.codes[user].rank != r:
            q = tables.codes[user].rank
            if scratch.next[user].arrival <= scratch.ranks[q].start + dispatch[q].patience:
                choose_next_pass(tables, dispatch, scratch, q, True)
    longest, total = 0, 0
    for r in range(len(tables.ranks)):
        length = tables.ranks[r].work + scratch.ranks[r].idle
        longest = max(longest, length)
        total += length
    return longest, total


@compiled
def reset(tables: Tables, due: Floats, scratch: ListScratch) -> None:
    """Nothing has run yet."""
    for code in range(len(tables.codes)):
        one = scratch.next[code]
        one.runs, one.due = 0, due[code]
        one.arrival = 0 if tables.codes[code].maker < 0 else FAR
    for r in range(len(tables.ranks)):
        state, growth = scratch.ranks[r], 0
        state.filled, state.free, state.idle, state.held, state.alive, state.pending = 0, 0, 0, 0, 0, 0
        for at in range(tables.ranks[r].forward, tables.ranks[r].forward_stop):
            growth = max(growth, tables.codes[tables.codes[tables.forwards[at]].successor].held)
        state.room = tables.ranks[r].limit - growth


@inlined
def first_rank_to_start(scratch: ListScratch) -> int:
    """The rank that can start first."""
    first, rank = FAR, 0
    for start in scratch.next_start:
        first = min(first, start)
    while scratch.next_start[rank] > first:
        rank += 1
    return rank


@inlined
def run_chosen_pass(tables: Tables, period: float, scratch: ListScratch, rank: int) -> int:
    """Let `rank` run what it chose; the code that waits for the message, -1 if none does."""
    state, m = scratch.ranks[rank], tables.microbatches
    code = state.choice
    of, one = tables.codes[code], scratch.next[code]
    if state.filled > 0 or tables.from_start:
        state.idle += scratch.next_start[rank] - state.free
    state.free = scratch.next_start[rank] + of.time
    state.held += of.held
    scratch.order[tables.ranks[rank].first + state.filled] = code
    state.filled += 1
    if of.predecessor < 0:
        state.alive += of.held
    elif of.successor >= 0:
        state.alive -= tables.codes[of.predecessor].held
        state.pending += 1
    else:
        state.pending -= 1
    scratch.end[code * m + one.runs] = state.free
    if of.user >= 0 and scratch.next[of.user].runs == one.runs:
        scratch.next[of.user].arrival = state.free + tables.codes[of.user].lag
    one.runs += 1
    one.due += period
    if of.maker >= 0:
        one.arrival = scratch.end[of.maker * m + one.runs] + of.lag if scratch.next[of.maker].runs > one.runs else FAR
    return int(of.user)


@inlined
def choose_next_pass(tables: Tables, dispatch: Records, scratch: ListScratch, rank: int, strictly: bool) -> None:
    """Write down what `rank` runs next and when, `FAR` if it has to wait for news."""
    state, rule = scratch.ranks[rank], dispatch[rank]
    code, due, start = most_urgent(tables, dispatch, scratch, rank, strictly)
    state.start = start
    if state.pending > 0:
        weight, weight_due = oldest_weight(tables, scratch, rank)
        gap = start - state.free
        if (
            code < 0
            or state.held + tables.codes[code].held > tables.ranks[rank].limit
            or due > weight_due + rule.delay
            or state.pending >= rule.backlog
            or (gap > 0 and (gap >= rule.patch * tables.codes[weight].time or state.idle + gap > rule.allowance))
        ):
            code, start = weight, state.free
    state.choice, scratch.next_start[rank] = code, start


@inlined
def oldest_weight(tables: Tables, scratch: ListScratch, rank: int) -> tuple[int, float]:
    """The pending W whose B was due first, and when that was."""
    best, best_due = -1, np.inf
    stages = len(tables.forwards)
    for at in range(tables.ranks[rank].forward, tables.ranks[rank].forward_stop):
        back = tables.forwards[at] + stages
        weight = back + stages
        if scratch.next[weight].runs < scratch.next[back].runs and scratch.next[weight].due < best_due:
            best, best_due = weight, scratch.next[weight].due
    return best, best_due


@inlined
def most_urgent(tables: Tables, dispatch: Records, scratch: ListScratch, rank: int, strictly: bool) -> tuple[int, float, int]:
    """The F or B to run next by due date, when it is due and when it can start; (-1, inf, FAR) if none is ready."""
    state, stages = scratch.ranks[rank], len(tables.forwards)
    ready, urgent, ahead = 0, np.inf, 0
    for at in range(tables.ranks[rank].forward_stop - 1, tables.ranks[rank].forward - 1, -1):
        forth = tables.forwards[at]
        come, gone = scratch.next[forth], scratch.next[forth + stages]
        if gone.runs < come.runs:
            urgent = min(urgent, gone.due)
            if gone.arrival < FAR:
                one = scratch.ready[ready]
                one.code, one.start, one.due = forth + stages, max(state.free, gone.arrival), gone.due
                ready += 1
        if come.runs < tables.microbatches:
            urgent = min(urgent, come.due)
            if come.arrival < FAR and state.alive + tables.codes[forth].held + ahead <= state.room:
                one = scratch.ready[ready]
                one.code, one.start, one.due = forth, max(state.free, come.arrival), come.due
                ready += 1
        if gone.runs == come.runs:
            ahead += tables.codes[forth].held
    latest = urgent + dispatch[rank].strict if strictly else np.inf
    first = FAR
    for k in range(ready):
        if scratch.ready[k].due <= latest:
            first = min(first, scratch.ready[k].start)
    best, best_due, best_start = -1, np.inf, FAR
    for k in range(ready):
        one = scratch.ready[k]
        if one.start <= first + dispatch[rank].patience and one.due <= latest and one.due < best_due:
            best, best_due, best_start = one.code, one.due, one.start
    return best, best_due, best_start
