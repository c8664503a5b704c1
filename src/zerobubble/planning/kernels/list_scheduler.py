"""The list scheduler: repeatedly, the rank that can start first runs the ready pass with the earliest due date.

It is a dispatching rule. Every F and B has a due date. A rank takes the most urgent ready pass, or waits briefly for a more urgent one. W
has no due date: it fills gaps that are large enough, and runs if memory requires it or too many W are pending.

An F may not run too far ahead of the rank's next pass for the same microbatch. Otherwise memory fills with later microbatches while the
first ones are on their way to their B, and leaves none for passes that could run.

Memory never blocks an order for good: each rank keeps enough for its most advanced microbatch to reach the rank's last stage and run its B,
which frees memory.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from zerobubble.planning.kernels.compiled import compiled, inlined
from zerobubble.planning.kernels.play import place_of
from zerobubble.planning.kernels.tables import Floats, Ints, Records, Tables

FAR = 1 << 62
"""A time later than all others, for times that are not known yet."""

DISPATCH = np.dtype(
    [(name, "f8") for name in ("period", "pause", "patience", "strict", "patch", "allowance", "backlog", "delay")] + [("group", "i8")]
)
"""The parameters of the dispatching rule, one set for each rank, in ns unless said otherwise.

- `period`: from a microbatch's due date to that of the next one.
- `group`: the number of microbatches in a group, and `pause` the time between two groups beyond `period`.
- `patience`: a pass that is due earlier is preferred if it can start at most this much later than the first ready pass.
- `strict`: by how much a pass may be due later than the rank's most urgent one, ready or not, and still be run.
- `patch`: W fills a gap that is at least this share of its own time.
- `allowance`: the idle time of the rank, all in all, beyond which W fills any gap.
- `backlog`: the number of pending W at which one is run.
- `delay`: how long after its B a W is due.
"""

_NEXT = np.dtype([("runs", "i8"), ("arrival", "i8"), ("due", "f8")])
"""The state of a code: how often it has run, when the message of its next pass arrives (`FAR` if it has not been computed), and when that
pass is due."""

_RANK = np.dtype([(name, "i8") for name in ("filled", "free", "idle", "held", "alive", "most_alive", "pending", "choice", "start")])
"""The state of a rank.

- `filled`: the number of passes it has run.
- `free`: when it is free, and `idle` how long it has idled, in ns.
- `held`: the bytes it holds, and `alive` those of them that wait for a B.
- `most_alive`: the bytes that may wait for a B: its limit less what a B may add, joined with its W where tables join them.
- `pending`: the number of W whose B has run.
- `choice`: the code that it runs next.
- `start`: when its most urgent F or B could start, in ns.
"""

_READY = np.dtype([("code", "i8"), ("start", "i8"), ("due", "f8")])
"""A pass that is ready on a rank: its earliest start and its due date."""


class ListScratch(NamedTuple):
    """Buffers of the list scheduler, made once for a problem and reused for every schedule."""

    order: Ints
    """The codes of the schedule, rank after rank."""
    end: Ints
    """The end of the pass with code c for microbatch j, at `c * microbatches + j`."""
    next: Records
    """A `_NEXT` for each code."""
    ranks: Records
    """A `_RANK` for each rank."""
    next_start: Ints
    """The start of each rank's next pass; `FAR` if it has to wait for a message or for memory."""
    ready: Records
    """The passes that one rank can choose from, a `_READY` each."""


def list_scratch(tables: Tables) -> ListScratch:
    """Returns scratch space to schedule the problem of `tables`."""
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
def list_schedule(tables: Tables, due: Floats, dispatch: Records, lead: Floats, scratch: ListScratch) -> tuple[int, int]:
    """Writes to `scratch.order` the schedule that due dates (ns, of microbatch 0), a `DISPATCH` per rank and leads give.

    For each code of F, `lead` is the number of microbatches by which its rank may run ahead of its next stage, or on its last stage of
    its B. Returns the time of the longest rank and the sum over ranks in ns, or (-1, 0) if a pass never gets the memory it needs.
    """
    reset(tables, due, scratch)
    for rank in range(len(tables.ranks)):
        choose_next_pass(tables, dispatch, lead, scratch, rank, True)
    done = 0
    while done < len(scratch.order):
        rank = first_rank_to_start(scratch)
        if scratch.next_start[rank] == FAR:
            # `strict` may keep every rank waiting for a pass that waits itself: choose among all that is ready.
            for other in range(len(tables.ranks)):
                choose_next_pass(tables, dispatch, lead, scratch, other, False)
            rank = first_rank_to_start(scratch)
            if scratch.next_start[rank] == FAR:
                return -1, 0
        done -= scratch.ranks[rank].filled
        user = run_chosen_pass(tables, dispatch, scratch, rank)
        done += scratch.ranks[rank].filled
        choose_next_pass(tables, dispatch, lead, scratch, rank, True)
        if user >= 0 and tables.codes[user].rank != rank:
            # A message can change its reader's choice only if it arrives by the start of the reader's most urgent pass plus its patience.
            reader = tables.codes[user].rank
            if scratch.next[user].arrival <= scratch.ranks[reader].start + dispatch[reader].patience:
                choose_next_pass(tables, dispatch, lead, scratch, reader, True)
    longest, total = 0, 0
    for rank in range(len(tables.ranks)):
        time = tables.ranks[rank].work + scratch.ranks[rank].idle
        longest = max(longest, time)
        total += time
    return longest, total


@compiled
def reset(tables: Tables, due: Floats, scratch: ListScratch) -> None:
    """Resets the scratch space to the state before the first pass."""
    for code in range(len(tables.codes)):
        one = scratch.next[code]
        one.runs = 0
        one.due = due[code]
        one.arrival = 0 if tables.codes[code].maker < 0 else FAR
    for rank in range(len(tables.ranks)):
        state = scratch.ranks[rank]
        state.filled = 0
        state.free = 0
        state.idle = 0
        state.held = 0
        state.alive = 0
        state.pending = 0
        growth = 0
        for at in range(tables.ranks[rank].forward, tables.ranks[rank].forward_stop):
            back = tables.codes[tables.codes[tables.forwards[at]].successor]
            growth = max(growth, back.held + back.over - (back.grows if tables.joins else 0))
        state.most_alive = tables.ranks[rank].limit - growth


@inlined
def first_rank_to_start(scratch: ListScratch) -> int:
    """Returns the rank that can start first, the lowest if there are several."""
    first, rank = FAR, 0
    for start in scratch.next_start:
        first = min(first, start)
    while scratch.next_start[rank] > first:
        rank += 1
    return rank


@inlined
def run_chosen_pass(tables: Tables, dispatch: Records, scratch: ListScratch, rank: int) -> int:
    """Runs the pass that `rank` chose; a B that does not fit alone runs together with its W.

    Returns the code that waits for the message, -1 if none does.
    """
    state, m = scratch.ranks[rank], tables.microbatches
    code = state.choice
    properties, one = tables.codes[code], scratch.next[code]
    if state.filled > 0 or tables.from_start:
        state.idle += scratch.next_start[rank] - properties.ahead - state.free
    state.free = scratch.next_start[rank] + properties.time
    state.held += properties.held
    scratch.order[tables.ranks[rank].first + state.filled] = code
    state.filled += 1
    if properties.predecessor < 0:  # F
        state.alive += properties.held
    elif properties.successor >= 0:  # B
        state.alive -= tables.codes[properties.predecessor].held
        state.pending += 1
    else:  # W
        state.pending -= 1
    if tables.joins and properties.grows > 0 and state.held > tables.ranks[rank].limit:
        weight, behind = tables.codes[properties.successor], scratch.next[properties.successor]
        state.free += weight.time
        state.held += weight.held
        state.pending -= 1
        scratch.order[tables.ranks[rank].first + state.filled] = properties.successor
        state.filled += 1
        behind.runs += 1
        behind.due += until_next(dispatch, rank, behind.runs)
    place = place_of(tables, code, one.runs)
    scratch.end[code * m + place] = state.free
    if properties.user >= 0 and place_of(tables, properties.user, scratch.next[properties.user].runs) == place:
        scratch.next[properties.user].arrival = state.free + tables.codes[properties.user].lag
    one.runs += 1
    one.due += until_next(dispatch, rank, one.runs)
    if properties.maker >= 0:
        place = place_of(tables, code, one.runs)
        has_run = scratch.next[properties.maker].runs > place_of(tables, properties.maker, place)
        one.arrival = scratch.end[properties.maker * m + place] + properties.lag if has_run else FAR
    return int(properties.user)


@inlined
def until_next(dispatch: Records, rank: int, runs: int) -> float:
    """Returns the time from the due date of a pass to that of the next one of its code, after `runs` of them."""
    rule = dispatch[rank]
    return float(rule.period + (rule.pause if runs % rule.group == 0 else 0.0))


@inlined
def choose_next_pass(tables: Tables, dispatch: Records, lead: Floats, scratch: ListScratch, rank: int, strictly: bool) -> None:
    """Chooses the next pass of `rank` and its start, `FAR` if it has to wait.

    This is the most urgent F or B, or a W instead of it or before it.
    """
    state, rule = scratch.ranks[rank], dispatch[rank]
    code, due, start = most_urgent(tables, dispatch, lead, scratch, rank, strictly)
    state.start = start
    if state.pending > 0:
        weight, weight_due = oldest_weight(tables, scratch, rank)
        gap = start - state.free - (tables.codes[code].ahead if code >= 0 else 0)
        if (
            code < 0
            or state.held + tables.codes[code].held + tables.codes[code].over > tables.ranks[rank].limit
            or due > weight_due + rule.delay
            or state.pending >= rule.backlog
            or (gap > 0 and (gap >= rule.patch * tables.codes[weight].time or state.idle + gap > rule.allowance))
        ):
            code, start = weight, state.free
    state.choice = code
    scratch.next_start[rank] = start


@inlined
def oldest_weight(tables: Tables, scratch: ListScratch, rank: int) -> tuple[int, float]:
    """Returns the pending W whose B was due first, and that due date."""
    best, best_due = -1, np.inf
    stages = len(tables.forwards)
    for at in range(tables.ranks[rank].forward, tables.ranks[rank].forward_stop):
        back = tables.forwards[at] + stages
        weight = back + stages
        if scratch.next[weight].runs < scratch.next[back].runs and scratch.next[weight].due < best_due:
            best, best_due = weight, scratch.next[weight].due
    return best, best_due


@inlined
def most_urgent(tables: Tables, dispatch: Records, lead: Floats, scratch: ListScratch, rank: int, strictly: bool) -> tuple[int, float, int]:
    """Returns the F or B to run next, its due date and its earliest start; (-1, inf, FAR) if none is ready.

    With `strictly`, a pass that is due too long after the most urgent pass is left out, even if the most urgent pass is not ready.
    """
    ready, urgent = list_ready(tables, lead, scratch, rank)
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


@inlined
def list_ready(tables: Tables, lead: Floats, scratch: ListScratch, rank: int) -> tuple[int, float]:
    """Writes the F and B that `rank` could run into `scratch.ready`.

    Returns their number and the earliest due date of all passes, ready or not.

    An F that has used up its lead is not ready. Stages are visited from last to first, because an F must leave memory for the most
    advanced microbatch: `reserved` is the bytes that this one will still take up to the rank's last stage.
    """
    state, stages = scratch.ranks[rank], len(tables.forwards)
    ready, urgent, reserved, behind = 0, np.inf, 0, 0
    for at in range(tables.ranks[rank].forward_stop - 1, tables.ranks[rank].forward - 1, -1):
        code = tables.forwards[at]
        forward, backward = scratch.next[code], scratch.next[code + stages]
        if at + 1 == tables.ranks[rank].forward_stop:
            behind = backward.runs
        if place_of(tables, code + stages, backward.runs) < forward.runs:
            urgent = min(urgent, backward.due)
            if backward.arrival < FAR:
                one = scratch.ready[ready]
                begin = max(state.free + tables.codes[code + stages].ahead, backward.arrival)
                one.code, one.start, one.due = code + stages, begin, backward.due
                ready += 1
        if forward.runs < tables.microbatches and forward.runs < behind + lead[code]:
            urgent = min(urgent, forward.due)
            if forward.arrival < FAR and state.alive + tables.codes[code].held + reserved <= state.most_alive:
                one = scratch.ready[ready]
                one.code, one.start, one.due = code, max(state.free, forward.arrival), forward.due
                ready += 1
        if backward.runs == forward.runs or forward.runs % tables.slices != 0:
            reserved += (tables.slices - forward.runs % tables.slices) * tables.codes[code].held
        behind = forward.runs
    return ready, urgent
