"""The list scheduler: time after time the rank that can start first runs the pass whose due date comes first.

Every rank keeps room for the microbatch that came furthest to reach its last stage there, so it never runs into a dead end.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from zerobubble.plan.kernels.tables import Floats, Ints, Records, Tables

HABITS = np.dtype([(name, "f8") for name in ("patience", "strict", "patch", "allowance", "backlog")])
"""How a rank behaves, in ns unless said otherwise. `patience`: how much longer than for the first pass that can run it waits for one that
is due before it. `strict`: how much later than its most urgent pass, ready or not, a pass may be due to be run. `patch`: W fills a gap of
at least this share of its own time. `allowance`: the idle time after which W fills any gap. `backlog`: the number of pending W at which
one is run."""


class Keys(NamedTuple):
    """What the list scheduler goes by: due dates per code in ns, and `HABITS` per rank."""

    due: Floats
    """When microbatch 0 is due; microbatch j is due `period` times j later."""
    period: float
    delay: float
    """W is due so long after its B."""
    habits: Records


_STATE = np.dtype([(name, "i8") for name in ("filled", "free", "idle", "held", "pending", "choice", "begin")])
_READY = np.dtype([("code", "i8"), ("start", "i8"), ("due", "f8")])


class Book(NamedTuple):
    """Where the list scheduler stands: how often each code has run and when that ended, and a `_STATE` per rank."""

    runs: Ints
    end: Ints
    ranks: Records
    ready: Records
    """Room for the passes a rank can choose from."""


FAR = 1 << 62


@njit(cache=True)
def greedy(tables: Tables, keys: Keys, word: Ints) -> bool:
    """Fill `word` with the rows that `keys` lead to; False where a pass is held up by memory that nothing can free."""
    codes, m = len(tables.codes), tables.microbatches
    ranks, ready = np.zeros(len(tables.ranks), _STATE), np.zeros(2 * len(tables.lanes), _READY)
    book = Book(np.zeros(codes, np.int64), np.zeros(codes * m, np.int64), ranks, ready)
    for r in range(len(ranks)):
        decide(tables, keys, book, r, True)
    for _ in range(len(word)):
        r = soonest(book)
        if ranks[r].begin == FAR:
            for q in range(len(ranks)):
                decide(tables, keys, book, q, False)
            r = soonest(book)
            if ranks[r].begin == FAR:
                return False
        code = ranks[r].choice
        run(tables, book, r, code)
        word[tables.ranks[r].first + ranks[r].filled - 1] = code
        decide(tables, keys, book, r, True)
        if tables.codes[code].user >= 0 and tables.codes[tables.codes[code].user].rank != r:
            decide(tables, keys, book, tables.codes[tables.codes[code].user].rank, True)
    return True


@njit(cache=True, forceinline=True)
def soonest(book: Book) -> int:
    """The rank that can start first."""
    best = 0
    for r in range(1, len(book.ranks)):
        if book.ranks[r].begin < book.ranks[best].begin:
            best = r
    return best


@njit(cache=True, forceinline=True)
def run(tables: Tables, book: Book, rank: int, code: int) -> None:
    """Let `rank` run what it chose."""
    state, of = book.ranks[rank], tables.codes[code]
    if state.filled > 0 or tables.from_start:
        state.idle += state.begin - state.free
    state.free = state.begin + of.time
    state.held += of.held
    state.filled += 1
    if of.after >= 0:
        state.pending += 1 if of.then >= 0 else -1
    book.end[code * tables.microbatches + book.runs[code]] = state.free
    book.runs[code] += 1


@njit(cache=True, forceinline=True)
def decide(tables: Tables, keys: Keys, book: Book, rank: int, strictly: bool) -> None:
    """Write down what `rank` runs next and when, `FAR` if it has to wait for news."""
    state, habits = book.ranks[rank], keys.habits[rank]
    code, due, start = most_urgent(tables, keys, book, rank, strictly)
    state.choice, state.begin = code, start
    if state.pending == 0:
        return
    weight, weight_due = oldest_weight(tables, keys, book, rank)
    gap = start - state.free
    if (
        code < 0
        or state.held + tables.codes[code].held > tables.ranks[rank].limit
        or due > weight_due + keys.delay
        or state.pending >= habits.backlog
        or (gap > 0 and gap >= habits.patch * tables.codes[weight].time)
        or (gap > 0 and state.idle + gap > habits.allowance)
    ):
        state.choice, state.begin = weight, state.free


@njit(cache=True, forceinline=True)
def oldest_weight(tables: Tables, keys: Keys, book: Book, rank: int) -> tuple[int, float]:
    """The pending W whose B was due first, and when that was; (-1, inf) without one."""
    best, best_due = -1, np.inf
    for at in range(tables.ranks[rank].lane, tables.ranks[rank].lane_stop):
        back = tables.codes[tables.lanes[at]].then
        weight = tables.codes[back].then
        if book.runs[weight] < book.runs[back]:
            due = keys.due[back] + book.runs[weight] * keys.period
            if due < best_due:
                best, best_due = weight, due
    return best, best_due


@njit(cache=True, forceinline=True)
def most_urgent(tables: Tables, keys: Keys, book: Book, rank: int, strictly: bool) -> tuple[int, float, int]:
    """The F or B to run next by due date, when it is due and when it can start; (-1, inf, FAR) if none is ready."""
    num_ready, urgent = 0, np.inf
    for at in range(tables.ranks[rank].lane, tables.ranks[rank].lane_stop):
        forth = tables.lanes[at]
        back = tables.codes[forth].then
        for code in (forth, back):
            j = book.runs[code]
            if j < tables.microbatches and (code == forth or j < book.runs[forth]):
                due = keys.due[code] + j * keys.period
                urgent = min(urgent, due)
                start = arrival(tables, book, rank, code)
                if start < FAR and (code == back or has_room(tables, book, rank, at)):
                    one = book.ready[num_ready]
                    one.code, one.start, one.due = code, start, due
                    num_ready += 1
    latest = urgent + keys.habits[rank].strict if strictly else np.inf
    first = FAR
    for k in range(num_ready):
        if book.ready[k].due <= latest:
            first = min(first, book.ready[k].start)
    best, best_due, best_start = -1, np.inf, FAR
    for k in range(num_ready):
        one = book.ready[k]
        if one.start <= first + keys.habits[rank].patience and one.due <= latest and (one.due < best_due or best < 0):
            best, best_due, best_start = one.code, one.due, one.start
    return best, best_due, best_start


@njit(cache=True, forceinline=True)
def arrival(tables: Tables, book: Book, rank: int, code: int) -> int:
    """When the next pass of `code` could start, `FAR` while nobody has made its message."""
    need, j = tables.codes[code].maker, book.runs[code]
    if need < 0:
        return book.ranks[rank].free
    if book.runs[need] <= j:
        return FAR
    return max(book.ranks[rank].free, book.end[need * tables.microbatches + j] + tables.codes[code].lag)


@njit(cache=True, forceinline=True)
def has_room(tables: Tables, book: Book, rank: int, at: int) -> bool:
    """Whether one more microbatch of lane position `at` leaves room for the one that came furthest to go on to the end of the lane."""
    total, growth = tables.codes[tables.lanes[at]].held, 0
    for other in range(tables.ranks[rank].lane, tables.ranks[rank].lane_stop):
        forth = tables.lanes[other]
        back = tables.codes[forth].then
        pending = book.runs[forth] - book.runs[back]
        growth = max(growth, tables.codes[back].held)
        total += max(pending, 1 if other > at else 0) * tables.codes[forth].held
    return total + growth <= tables.ranks[rank].limit
