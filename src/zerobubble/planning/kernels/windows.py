"""A lower bound by contradiction: assume a schedule of at most T, narrow when each pass can start, and find a pass that cannot.

A schedule is taken as the start times of its passes. Microbatches are alike, so on each stage the j-th F, the j-th B and the j-th W in time
may be called those of microbatch j: the j-th F of a stage starts no sooner than j F's of the stage before have ended and their messages
have come, and so on, so every rule still holds with the new names, at the same start times. The earliest F of a rank's first stage is the
first pass of its row. A backward in one piece counts as its B with its W at once: it never holds more than F saved.

Each pass has a window: its `earliest` and its `latest` start. A schedule of at most T lies inside the first windows, and no rule below
takes a start from a window that such a schedule could have, nor notes an order (`before`) that it could break:

- Chains: a pass starts when what it waits for has ended and the message has come. All time of a makespan is after 0. For the span the
  first pass of the step starts at 0, and each rank's last W's end at most T after its first pass starts, whenever that is.
- Two passes of a rank: where one cannot end before the latest start of the other, it comes after it; and whatever comes before a pass, in
  windows or by a chain of such orders, takes its time one pass after the other (`_narrow_by_orders`).
- One pass at a time (edge finding; Carlier and Pinson 1990, here as by Nuijten 1994): where some passes and one more cannot all end by the
  latest end of the some, that one comes after all of them (`_start_after_sets`), and the same with time turned round.
- Memory: while a pass runs, its rank holds what passes that surely come before it have saved and no pass that can come before it has freed.
  Where that is more than the limit, the pass waits for what can free it, or must come before what saves it (`_narrow_by_memory`).

A window without a start refutes T, so every schedule takes T + 1 at least: times are whole multiples of the greatest common divisor of all
costs, and T counts in these. T is found by doubling and bisection. Stopping early, after `MOST_ROUNDS`, refutes less and never too much.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zerobubble.bounds import Bound
from zerobubble.ir import Kind
from zerobubble.planning.kernels.compiled import compiled
from zerobubble.planning.kernels.tables import PLANNED, Ints
from zerobubble.planning.problem.problem import Objective, Problem
from zerobubble.units import show_ms

Flags = NDArray[np.uint8]

MOST_PASSES = 2000
"""Passes of a problem beyond which windows are not narrowed: it would take many seconds."""

MOST_ROUNDS = 50
"""How often all rules are applied to refute one T."""

FINENESS = 10_000
"""The first T that is tried is above the known bound by this part of it; where that is not refuted, the known bound stays."""

NEVER = 1 << 60
"""Later than anything, and more than any limit in bytes."""

MOST_TIME = 1 << 56
"""Work and bytes up to which sums stay far below `NEVER`."""

SCRATCH = 6
"""Rows of scratch space, each for the passes of a rank."""


class Passes(NamedTuple):
    """A problem as arrays over its passes, rank after rank; times in multiples of the greatest common divisor of all costs."""

    time: Ints
    first: Ints
    """Where the passes of each rank start, and the end of all."""
    waits: Ints
    """Triples: a pass, one that waits for it, and the least time from start to start; in an order in which every chain goes forward."""
    before: Flags
    """1 where pass a is before the b-th pass of its rank in every schedule, at [a, b]."""
    microbatches: Ints
    """For each microbatch on each stage its F, B and W, the bytes after F and the least bytes after B; rank after rank."""
    first_microbatch: Ints
    """Where the rows of `microbatches` of each rank start, and the end of all."""
    limit: Ints
    """Bytes that each rank may hold."""
    spans: Ints
    """Pairs: the first pass of a rank and the last W of one of its stages."""


class Windows(NamedTuple):
    """What narrowing changes: the windows of the passes, the orders that are known, how many of these were added, and scratch space."""

    earliest: Ints
    latest: Ints
    before: Flags
    added: Ints
    scratch: Ints


def is_covered(problem: Problem) -> bool:
    """Whether the proof holds for `problem`: F, B and W alone, of microbatches that are alike, on one route, and not too many of them."""
    costs = problem.costs
    return (
        len(problem.placement.routes) == 1
        and problem.num_passes <= MOST_PASSES
        and problem.recomputation is None
        and problem.head is None
        and problem.host is None
        and problem.sharded is None
        and not costs.shares
        and not any((*costs.hidden, *costs.reduce, *costs.buckets))
        and not problem.shortage_reason
        and problem.work + 2 * problem.num_microbatches * sum(costs.comm) < MOST_TIME
        and problem.num_microbatches * sum(costs.held_after_f) < MOST_TIME
    )


def sharper_bound(problem: Problem, known: Bound) -> Bound:
    """The bound by windows where it is above `known`, a proven bound on the objective of `problem`; `known` where not, or not covered."""
    unit = _unit(problem)
    if unit == 0 or not is_covered(problem):
        return known
    passes = passes_of(problem, unit)
    least = -(-known.time // unit)
    first = max(1, least // FINENESS)
    step, end = first, None
    while end is None or least < end:
        time = least - 1 + step if end is None else (least + end) // 2
        if is_refuted(passes, problem.objective, time):
            least, step = time + 1, 2 * step
        elif step == first > 1:
            return known
        else:
            end = time
    if least * unit <= known.time:
        return known
    shorter = f"in a schedule whose {problem.objective} is shorter, some pass has no time left to start"
    return Bound(least * unit, f"{shorter}, given messages, memory and the other passes of its rank (simple claims: {show_ms(known.time)})")


def _unit(problem: Problem) -> int:
    costs = problem.costs
    return gcd(*costs.forward, *costs.backward, *costs.weight, *costs.comm)


def is_refuted(passes: Passes, objective: Objective, time: int) -> bool:
    """Whether there is surely no schedule whose objective is at most `time`, in units of `passes`."""
    size, widest = passes.before.shape
    windows = Windows(
        np.zeros(size, np.int64), np.full(size, NEVER), passes.before.copy(), np.zeros(1, np.int64), np.zeros((SCRATCH, widest), np.int64)
    )
    if objective is Objective.PERIOD:
        windows.latest[passes.spans[passes.spans[:, 2] == 1, 0]] = 0
        return not _narrow(passes, windows, time, MOST_ROUNDS)
    windows.latest[passes.spans[:, 1]] = time - passes.time[passes.spans[:, 1]]
    return not _narrow(passes, windows, -1, MOST_ROUNDS)


def passes_of(problem: Problem, unit: int) -> Passes:
    """The arrays of `problem`, with times in units of `unit` ns."""
    costs, home, m = problem.costs, problem.placement.routes[0], problem.num_microbatches
    own = [[stage for stage, rank in enumerate(home) if rank == here] for here in range(problem.placement.num_ranks)]
    keys = [[(kind, stage, j) for stage in stages for kind in PLANNED for j in range(m)] for stages in own]
    number = {key: place for place, key in enumerate(key for row in keys for key in row)}
    time = np.array([costs.time(kind, stage) // unit for kind, stage, _ in number], np.int64)
    first = np.cumsum([0, *map(len, keys)])
    before = np.zeros((len(number), max(map(len, keys))), np.uint8)
    for row in keys:
        for a in row:
            for place, b in enumerate(row):
                before[number[a], place] = _is_before(a, b)
    held = [(f, min(f, b)) for f, b in zip(costs.held_after_f, costs.held_after_b, strict=True)]
    rows = [[[*(number[k, s, j] for k in PLANNED), *held[s]] for s in stages for j in range(m)] for stages in own]
    spans = [(number[Kind.F, stages[0], 0], number[Kind.W, s, m - 1], int(stages[0] == 0)) for stages in own for s in stages]
    return Passes(
        time,
        first.astype(np.int64),
        _waits(problem, number, time, unit),
        before,
        np.array([one for row in rows for one in row], np.int64),
        np.cumsum([0, *map(len, rows)]).astype(np.int64),
        np.array([min(limit, NEVER) for limit in problem.limits.memory], np.int64),
        np.array(spans, np.int64),
    )


Key = tuple[Kind, int, int]


def _is_before(a: Key, b: Key) -> bool:
    """Whether pass a of a rank comes before pass b of it in every schedule: by chains and the order of microbatches."""
    (kind, stage, j), (other, its_stage, its) = a, b
    if a == b or j > its:
        return False
    if kind is Kind.W:
        return other is Kind.W and stage == its_stage
    if kind is Kind.F:
        return other is not Kind.F or stage <= its_stage
    return other is not Kind.F and stage >= its_stage


def _waits(problem: Problem, number: dict[Key, int], time: Ints, unit: int) -> Ints:
    """The rows of `Passes.waits`: chains of a microbatch, and the order of microbatches on a stage."""
    costs, home, stages = problem.costs, problem.placement.routes[0], problem.placement.num_stages
    rows = []
    for j in range(problem.num_microbatches):
        chain = [*((Kind.F, stage) for stage in range(stages)), *((Kind.B, stage) for stage in reversed(range(stages)))]
        for place, (kind, stage) in enumerate(chain):
            here = number[kind, stage, j]
            if place + 1 < len(chain):
                after, its_stage = chain[place + 1]
                lag = costs.comm[min(stage, its_stage)] // unit if home[stage] != home[its_stage] else 0
                rows.append((here, number[after, its_stage, j], time[here] + lag))
            kinds = [kind] if kind is Kind.F else [Kind.B, Kind.W]
            if kind is Kind.B:
                rows.append((here, number[Kind.W, stage, j], time[here]))
            if j + 1 < problem.num_microbatches:
                rows += [(number[k, stage, j], number[k, stage, j + 1], time[number[k, stage, j]]) for k in kinds]
    return np.array(rows, np.int64)


@compiled
def _narrow(passes: Passes, windows: Windows, span: int, rounds: int) -> bool:
    """Apply all rules until nothing changes; False where a window is empty. A `span` below 0 stands for none."""
    earliest, latest = windows.earliest, windows.latest
    width = -1
    for _ in range(rounds):
        if not _narrow_by_chains(passes, windows, span):
            return False
        for rank in range(len(passes.limit)):
            start, stop = passes.first[rank], passes.first[rank + 1]
            if not _find_orders(passes.time, windows, start, stop):
                return False
            _narrow_by_orders(passes.time, windows, start, stop)
            if not _narrow_by_memory(passes, windows, rank):
                return False
            if not _narrow_by_sets(passes.time, windows, start, stop):
                return False
        before, width = width, 0
        for a in range(len(earliest)):
            if earliest[a] > latest[a]:
                return False
            width += min(latest[a] - earliest[a], 1 << 45)
        width -= windows.added[0]
        if width == before:
            return True
    return True


@compiled
def _narrow_by_chains(passes: Passes, windows: Windows, span: int) -> bool:
    """Along `waits` and, where there is a `span`, between each rank's first pass and its last W's; False where a window is empty."""
    earliest, latest, time = windows.earliest, windows.latest, passes.time
    if span >= 0:
        for q in range(len(passes.spans)):
            first, last = passes.spans[q, 0], passes.spans[q, 1]
            latest[last] = min(latest[last], latest[first] + span - time[last])
            earliest[first] = max(earliest[first], earliest[last] + time[last] - span)
    for q in range(len(passes.waits)):
        a, b = passes.waits[q, 0], passes.waits[q, 1]
        earliest[b] = max(earliest[b], earliest[a] + passes.waits[q, 2])
    for q in range(len(passes.waits) - 1, -1, -1):
        a, b = passes.waits[q, 0], passes.waits[q, 1]
        latest[a] = min(latest[a], latest[b] - passes.waits[q, 2])
    for a in range(len(earliest)):  # noqa: SIM110 - kernels have no generators
        if earliest[a] > latest[a]:
            return False
    return True


@compiled
def _add_order(windows: Windows, start: int, stop: int, a: int, b: int) -> None:
    """Note that a comes before b, and what comes before a before what comes after b."""
    before = windows.before
    if before[a, b - start]:
        return
    for x in range(start, stop):
        if x == a or before[x, a - start]:
            if not before[x, b - start]:
                before[x, b - start] = 1
                windows.added[0] += 1
            for y in range(stop - start):
                if before[b, y] and not before[x, y]:
                    before[x, y] = 1
                    windows.added[0] += 1


@compiled
def _find_orders(time: Ints, windows: Windows, start: int, stop: int) -> bool:
    """Order two passes of a rank where only one order is left; False where none is. Passes that take no time may be anywhere."""
    earliest, latest, before = windows.earliest, windows.latest, windows.before
    for a in range(start, stop):
        for b in range(a + 1, stop):
            if before[a, b - start] or before[b, a - start] or time[a] == 0 or time[b] == 0:
                continue
            a_first, b_first = earliest[a] + time[a] <= latest[b], earliest[b] + time[b] <= latest[a]
            if not a_first and not b_first:
                return False
            if not a_first:
                _add_order(windows, start, stop, b, a)
            elif not b_first:
                _add_order(windows, start, stop, a, b)
    return True


@compiled
def _sort(keys: Ints, places: Ints, count: int) -> None:
    """Put the numbers 0 to `count` - 1 into `places` in the order of their `keys`; they are most often nearly sorted."""
    for q in range(count):
        key, r = keys[q], q
        while r > 0 and keys[places[r - 1]] > key:
            places[r] = places[r - 1]
            r -= 1
        places[r] = q


@compiled
def _narrow_by_orders(time: Ints, windows: Windows, start: int, stop: int) -> None:
    """What is before a pass runs one after the other before it can start, and what is after it when it has ended."""
    earliest, latest, before, scratch = windows.earliest, windows.latest, windows.before, windows.scratch
    count, places, keys = stop - start, scratch[0], scratch[1]
    for i in range(count):
        keys[i] = earliest[start + i]
    _sort(keys, places, count)
    for b in range(start, stop):
        end = -1
        for q in range(count):
            a = start + places[q]
            if before[a, b - start]:
                end = max(end, keys[places[q]]) + time[a]
        earliest[b] = max(earliest[b], end)
    for i in range(count):
        keys[i] = -(latest[start + i] + time[start + i])
    _sort(keys, places, count)
    for a in range(start, stop):
        end = NEVER
        for q in range(count):
            if before[a, places[q]]:
                end = min(end, -keys[places[q]]) - time[start + places[q]]
        latest[a] = min(latest[a], end - time[a])


@compiled
def _narrow_by_sets(time: Ints, windows: Windows, start: int, stop: int) -> bool:
    """Edge finding forward and backward in time; False where some passes of the rank cannot all run in time."""
    earliest, latest, scratch = windows.earliest, windows.latest, windows.scratch
    count = stop - start
    heads, ends, starts = scratch[0], scratch[1], scratch[2]
    for i in range(count):
        heads[i], ends[i] = earliest[start + i], latest[start + i] + time[start + i]
    if not _start_after_sets(count, heads, ends, time[start:stop], starts, scratch[3], scratch[4]):
        return False
    is_bounded = True
    for i in range(count):
        earliest[start + i] = max(earliest[start + i], starts[i])
        is_bounded = is_bounded and ends[i] < NEVER // 2
    if not is_bounded:
        return True
    for i in range(count):
        heads[i], ends[i] = -(latest[start + i] + time[start + i]), -earliest[start + i]
    if not _start_after_sets(count, heads, ends, time[start:stop], starts, scratch[3], scratch[4]):
        return False
    for i in range(count):
        latest[start + i] = min(latest[start + i], -starts[i] - time[start + i])
    return True


@compiled
def _start_after_sets(count: int, heads: Ints, ends: Ints, time: Ints, starts: Ints, places: Ints, least_ends: Ints) -> bool:
    """Put into `starts` when each pass can start, by its head and the sets that it must follow; False where one fails.

    A set are the passes that end by one of `ends`, and those among them whose heads are no earlier than some head.
    """
    _sort(heads, places, count)
    for i in range(count):
        starts[i] = heads[i]
    for k in range(count):
        end = ends[k]
        if end >= NEVER // 2:
            continue
        work, least_end = 0, -NEVER
        for q in range(count - 1, -1, -1):
            i = places[q]
            if ends[i] <= end:
                work += time[i]
                least_end = max(least_end, heads[i] + work)
                if least_end > end:
                    return False
            least_ends[q] = least_end
        earlier = -NEVER
        for q in range(count):
            i = places[q]
            if ends[i] <= end:
                earlier = max(earlier, heads[i] + work)
                work -= time[i]
            elif time[i] > 0:
                if heads[i] + work + time[i] > end:
                    starts[i] = max(starts[i], least_ends[q])
                if earlier + time[i] > end:
                    starts[i] = max(starts[i], least_end)
    return True


@compiled
def _narrow_by_memory(passes: Passes, windows: Windows, rank: int) -> bool:
    """Let passes of a rank wait for room, or come before what takes it; False where a pass has no room at any time."""
    start, stop, limit = passes.first[rank], passes.first[rank + 1], passes.limit[rank]
    some = passes.microbatches[passes.first_microbatch[rank] : passes.first_microbatch[rank + 1]]
    together = 0
    for q in range(len(some)):
        together += some[q, 3]
    if together <= limit:
        return True
    for i in range(start, stop):
        if not (
            _wait_for_room(passes.time, windows, some, limit, start, i)
            and _go_before_room_is_taken(passes.time, windows, some, limit, start, i)
        ):
            return False
        if not _order_by_room(windows, some, limit, start, stop, i):
            return False
    return True


@compiled
def _wait_for_room(time: Ints, windows: Windows, some: Ints, limit: int, start: int, i: int) -> bool:
    """Move the earliest start of pass i to when passes that can be before it may have freed enough."""
    earliest, latest, before = windows.earliest, windows.latest, windows.before
    t = earliest[i]
    while True:
        held, room = 0, NEVER
        for q in range(len(some)):
            f, b, w, after_f, after_b = some[q]
            if not (f == i or before[f, i - start] or latest[f] < t):
                continue
            w_may, b_may = w != i and not before[i, w - start], b != i and not before[i, b - start]
            if w_may and earliest[w] + time[w] <= t:
                continue
            if w_may:
                room = min(room, earliest[w] + time[w])
            if b_may and earliest[b] + time[b] <= t:
                held += after_b
            else:
                held += after_f
                if b_may and after_b < after_f:
                    room = min(room, earliest[b] + time[b])
        if held <= limit:
            break
        if room >= NEVER or room > latest[i]:
            return False
        t = room
    earliest[i] = t
    return True


@compiled
def _go_before_room_is_taken(time: Ints, windows: Windows, some: Ints, limit: int, start: int, i: int) -> bool:
    """Move the latest start of pass i before that of F's which would take the room it needs."""
    earliest, latest, before = windows.earliest, windows.latest, windows.before
    t = latest[i]
    if t >= NEVER // 2:
        return True
    while True:
        held, taken = 0, -NEVER
        for q in range(len(some)):
            f, b, w, after_f, after_b = some[q]
            is_before = f == i or before[f, i - start]
            if not (is_before or latest[f] < t):
                continue
            if w != i and not before[i, w - start] and earliest[w] + time[w] <= t:
                continue
            held += after_b if b != i and not before[i, b - start] and earliest[b] + time[b] <= t else after_f
            if not is_before:
                taken = max(taken, latest[f])
        if held <= limit:
            break
        if taken < earliest[i]:
            return False
        t = taken
    latest[i] = t
    return True


@compiled
def _order_by_room(windows: Windows, some: Ints, limit: int, start: int, stop: int, i: int) -> bool:
    """Order B's and W's before pass i where it has no room without them, and F's after it where it has none with them."""
    before = windows.before
    room = limit
    for q in range(len(some)):
        f, b, w, after_f, after_b = some[q]
        if (f == i or before[f, i - start]) and (w == i or before[i, w - start]):
            room -= after_b if b != i and not before[i, b - start] else after_f
    if room < 0:
        return False
    for q in range(len(some)):
        f, b, w, after_f, after_b = some[q]
        w_may, b_may = w != i and not before[i, w - start], b != i and not before[i, b - start]
        least = 0 if w_may else after_b if b_may else after_f
        if f == i or before[f, i - start]:
            if w_may and not before[w, i - start] and after_b > room:
                _add_order(windows, start, stop, w, i)
            if b_may and not before[b, i - start] and after_f - least > room:
                _add_order(windows, start, stop, b, i)
        elif not before[i, f - start] and least > room:
            _add_order(windows, start, stop, i, f)
    return True
