"""The list scheduler: time after time the rank that can start first runs the pass whose due date comes first.

Every rank keeps room for the microbatch that came furthest to reach its last stage there, so it never runs into a dead end.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from zerobubble.planning.kernels.compiled import compiled, inlined
from zerobubble.planning.kernels.tables import Floats, Ints, Records, Tables

FAR = 1 << 62

HABITS = np.dtype([(name, "f8") for name in ("period", "patience", "strict", "patch", "allowance", "backlog", "delay")])
"""How a rank behaves, in ns unless said otherwise. `period`: from a microbatch's due date to the next one's. `patience`: how much longer
than for the first pass that can run it waits for one that is due before it. `strict`: how much later than its most urgent pass, ready or
not, a pass may be due to be run. `patch`: W fills a gap of at least this share of its own time. `allowance`: the idle time after which W
fills any gap. `backlog`: the number of pending W at which one is run. `delay`: how long after its B a W is due."""

_NEXT = np.dtype([("runs", "i8"), ("arrival", "i8"), ("due", "f8")])
_RANK = np.dtype([(name, "i8") for name in ("filled", "free", "idle", "held", "alive", "room", "pending", "choice", "start")])
_READY = np.dtype([("code", "i8"), ("start", "i8"), ("due", "f8")])


class Sheet(NamedTuple):
    """Room for the list scheduler to write on: made once, used again and again."""

    word: Ints
    """The rows, rank after rank."""
    end: Ints
    """When code c ended for microbatch j, at `c * microbatches + j`."""
    next: Records
    """For every code how often it has run, when its next message is there (`FAR` while nobody has made it), and when it is due."""
    ranks: Records
    """For every rank the passes it has run, when it is free, the ns it has idled, the bytes it holds and those that wait for a B, the room
    for these, the number of pending W, what it runs next, and when the most urgent F or B could start."""
    begin: Ints
    """When every rank starts what it runs next, `FAR` if it has to wait for news."""
    ready: Records
    """The passes a rank can choose from."""


def sheet_of(tables: Tables) -> Sheet:
    """A sheet for `tables`."""
    size, codes, ranks = tables.size, len(tables.codes), len(tables.ranks)
    return Sheet(
        np.zeros(size, np.int64),
        np.zeros(size, np.int64),
        np.zeros(codes, _NEXT),
        np.zeros(ranks, _RANK),
        np.zeros(ranks, np.int64),
        np.zeros(2 * len(tables.lanes), _READY),
    )


@compiled
def greedy(tables: Tables, due: Floats, habits: Records, sheet: Sheet) -> tuple[int, int]:
    """Fill the sheet with the rows that due dates (ns, of microbatch 0) and `HABITS` per rank lead to.

    Gives the longest time of a rank and the sum over ranks as `play` does; (-1, 0) where a pass is held up by memory that nothing can free.
    """
    begin(tables, due, sheet)
    for r in range(len(tables.ranks)):
        decide(tables, habits, sheet, r, True)
    for _ in range(len(sheet.word)):
        r = soonest(sheet)
        if sheet.begin[r] == FAR:
            for q in range(len(tables.ranks)):
                decide(tables, habits, sheet, q, False)
            r = soonest(sheet)
            if sheet.begin[r] == FAR:
                return -1, 0
        user = run(tables, habits[r].period, sheet, r)
        decide(tables, habits, sheet, r, True)
        if user >= 0 and tables.codes[user].rank != r:
            q = tables.codes[user].rank
            if sheet.next[user].arrival <= sheet.ranks[q].start + habits[q].patience:
                decide(tables, habits, sheet, q, True)
    longest, total = 0, 0
    for r in range(len(tables.ranks)):
        length = tables.ranks[r].work + sheet.ranks[r].idle
        longest = max(longest, length)
        total += length
    return longest, total


@compiled
def begin(tables: Tables, due: Floats, sheet: Sheet) -> None:
    """Nothing has run yet."""
    for code in range(len(tables.codes)):
        one = sheet.next[code]
        one.runs, one.due = 0, due[code]
        one.arrival = 0 if tables.codes[code].maker < 0 else FAR
    for r in range(len(tables.ranks)):
        state, growth = sheet.ranks[r], 0
        state.filled, state.free, state.idle, state.held, state.alive, state.pending = 0, 0, 0, 0, 0, 0
        for at in range(tables.ranks[r].lane, tables.ranks[r].lane_stop):
            growth = max(growth, tables.codes[tables.codes[tables.lanes[at]].then].held)
        state.room = tables.ranks[r].limit - growth


@inlined
def soonest(sheet: Sheet) -> int:
    """The rank that can start first."""
    first, rank = FAR, 0
    for start in sheet.begin:
        first = min(first, start)
    while sheet.begin[rank] > first:
        rank += 1
    return rank


@inlined
def run(tables: Tables, period: float, sheet: Sheet, rank: int) -> int:
    """Let `rank` run what it chose; the code that waits for the message, -1 if none does."""
    state, m = sheet.ranks[rank], tables.microbatches
    code = state.choice
    of, one = tables.codes[code], sheet.next[code]
    if state.filled > 0 or tables.from_start:
        state.idle += sheet.begin[rank] - state.free
    state.free = sheet.begin[rank] + of.time
    state.held += of.held
    sheet.word[tables.ranks[rank].first + state.filled] = code
    state.filled += 1
    if of.after < 0:
        state.alive += of.held
    elif of.then >= 0:
        state.alive -= tables.codes[of.after].held
        state.pending += 1
    else:
        state.pending -= 1
    sheet.end[code * m + one.runs] = state.free
    if of.user >= 0 and sheet.next[of.user].runs == one.runs:
        sheet.next[of.user].arrival = state.free + tables.codes[of.user].lag
    one.runs += 1
    one.due += period
    if of.maker >= 0:
        one.arrival = sheet.end[of.maker * m + one.runs] + of.lag if sheet.next[of.maker].runs > one.runs else FAR
    return int(of.user)


@inlined
def decide(tables: Tables, habits: Records, sheet: Sheet, rank: int, strictly: bool) -> None:
    """Write down what `rank` runs next and when, `FAR` if it has to wait for news."""
    state, habit = sheet.ranks[rank], habits[rank]
    code, due, start = most_urgent(tables, habits, sheet, rank, strictly)
    state.start = start
    if state.pending > 0:
        weight, weight_due = oldest_weight(tables, sheet, rank)
        gap = start - state.free
        if (
            code < 0
            or state.held + tables.codes[code].held > tables.ranks[rank].limit
            or due > weight_due + habit.delay
            or state.pending >= habit.backlog
            or (gap > 0 and (gap >= habit.patch * tables.codes[weight].time or state.idle + gap > habit.allowance))
        ):
            code, start = weight, state.free
    state.choice, sheet.begin[rank] = code, start


@inlined
def oldest_weight(tables: Tables, sheet: Sheet, rank: int) -> tuple[int, float]:
    """The pending W whose B was due first, and when that was."""
    best, best_due = -1, np.inf
    stages = len(tables.lanes)
    for at in range(tables.ranks[rank].lane, tables.ranks[rank].lane_stop):
        back = tables.lanes[at] + stages
        weight = back + stages
        if sheet.next[weight].runs < sheet.next[back].runs and sheet.next[weight].due < best_due:
            best, best_due = weight, sheet.next[weight].due
    return best, best_due


@inlined
def most_urgent(tables: Tables, habits: Records, sheet: Sheet, rank: int, strictly: bool) -> tuple[int, float, int]:
    """The F or B to run next by due date, when it is due and when it can start; (-1, inf, FAR) if none is ready."""
    state, stages = sheet.ranks[rank], len(tables.lanes)
    ready, urgent, ahead = 0, np.inf, 0
    for at in range(tables.ranks[rank].lane_stop - 1, tables.ranks[rank].lane - 1, -1):
        forth = tables.lanes[at]
        come, gone = sheet.next[forth], sheet.next[forth + stages]
        if gone.runs < come.runs:
            urgent = min(urgent, gone.due)
            if gone.arrival < FAR:
                one = sheet.ready[ready]
                one.code, one.start, one.due = forth + stages, max(state.free, gone.arrival), gone.due
                ready += 1
        if come.runs < tables.microbatches:
            urgent = min(urgent, come.due)
            if come.arrival < FAR and state.alive + tables.codes[forth].held + ahead <= state.room:
                one = sheet.ready[ready]
                one.code, one.start, one.due = forth, max(state.free, come.arrival), come.due
                ready += 1
        if gone.runs == come.runs:
            ahead += tables.codes[forth].held
    latest = urgent + habits[rank].strict if strictly else np.inf
    first = FAR
    for k in range(ready):
        if sheet.ready[k].due <= latest:
            first = min(first, sheet.ready[k].start)
    best, best_due, best_start = -1, np.inf, FAR
    for k in range(ready):
        one = sheet.ready[k]
        if one.start <= first + habits[rank].patience and one.due <= latest and one.due < best_due:
            best, best_due, best_start = one.code, one.due, one.start
    return best, best_due, best_start
