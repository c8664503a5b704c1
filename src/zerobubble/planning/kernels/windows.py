"""The rules that narrow windows: `window_bound` defines windows, and proves that no rule excludes a start of a schedule."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zerobubble.planning.kernels.compiled import compiled
from zerobubble.planning.kernels.tables import Ints

Flags = NDArray[np.uint8]

NEVER = 1 << 60
"""Larger than any time in ns and any limit in bytes."""

SCRATCH = 6
"""Rows of scratch space, each for the passes of a rank."""


class Passes(NamedTuple):
    """A problem as arrays over its passes, rank after rank; times in multiples of the greatest common divisor of all costs."""

    time: Ints
    first: Ints
    """The index of each rank's first pass, then the number of passes."""
    waits: Ints
    """Triples: a pass, a pass that waits for it, and the least time between their starts, in topological order."""
    before: Flags
    """At [a, b], 1 if pass a precedes the b-th pass of its rank in every schedule."""
    microbatches: Ints
    """For each microbatch and stage, rank after rank: F, B and W, the bytes after F, the least bytes after B, and the most that R saves."""
    first_microbatch: Ints
    """The index of each rank's first row in `microbatches`, then the number of rows."""
    limit: Ints
    """The memory limit of each rank in bytes."""
    spare: Ints
    """The most bytes that R's of each rank can save at once, beyond those of `microbatches`."""
    spans: Ints
    """Pairs: the first pass of a rank and the last W of one of its stages."""


class Windows(NamedTuple):
    """The state that narrowing changes: the windows of the passes, the known orders, the number of added ones, and scratch space."""

    earliest: Ints
    latest: Ints
    before: Flags
    added: Ints
    scratch: Ints


@compiled
def narrow(passes: Passes, windows: Windows, span: int, rounds: int) -> bool:
    """Applies all rules until nothing changes. Returns False if a window is empty. A `span` below 0 means that there is no limit."""
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
    """Narrows windows along `waits` and, if there is a `span`, between each rank's first pass and its last W's.

    Returns False if a window is empty.
    """
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
def add_order(windows: Windows, start: int, stop: int, a: int, b: int) -> None:
    """Records that a precedes b, and that all passes before a precede all passes after b."""
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
    """Orders two passes of a rank if only one order is possible. Returns False if none is. Passes that take no time may be anywhere."""
    earliest, latest, before = windows.earliest, windows.latest, windows.before
    for a in range(start, stop):
        for b in range(a + 1, stop):
            if before[a, b - start] or before[b, a - start] or time[a] == 0 or time[b] == 0:
                continue
            a_first, b_first = earliest[a] + time[a] <= latest[b], earliest[b] + time[b] <= latest[a]
            if not a_first and not b_first:
                return False
            if not a_first:
                add_order(windows, start, stop, b, a)
            elif not b_first:
                add_order(windows, start, stop, a, b)
    return True


@compiled
def _sort(keys: Ints, places: Ints, count: int) -> None:
    """Sorts the numbers 0 to `count` - 1 by their `keys` into `places`. They are usually nearly sorted."""
    for q in range(count):
        key, r = keys[q], q
        while r > 0 and keys[places[r - 1]] > key:
            places[r] = places[r - 1]
            r -= 1
        places[r] = q


@compiled
def _narrow_by_orders(time: Ints, windows: Windows, start: int, stop: int) -> None:
    """Narrows windows by the passes that a rank must run before each pass or after it, one after the other."""
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
    """Applies edge finding forward and backward in time. Returns False if some passes of the rank cannot all run in time."""
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
    """Writes the earliest start of each pass into `starts`, given its head and the sets that it must follow. Returns False if one fails.

    A set consists of the passes that end by one of `ends` and whose heads are not before a given head.
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
    """Narrows windows so that passes of a rank wait for free memory, or precede the passes that fill it.

    Returns False if a pass never fits.
    """
    start, stop, limit, spare = passes.first[rank], passes.first[rank + 1], passes.limit[rank], passes.spare[rank]
    some = passes.microbatches[passes.first_microbatch[rank] : passes.first_microbatch[rank + 1]]
    together, saved = 0, 0
    for q in range(len(some)):
        together += some[q, 3]
        saved += some[q, 5]
    if together - min(spare, saved) <= limit:
        return True
    for i in range(start, stop):
        if not (
            _wait_for_memory(passes.time, windows, some, limit, spare, start, i)
            and _precede_what_fills_memory(passes.time, windows, some, limit, spare, start, i)
        ):
            return False
        if not _order_by_memory(windows, some, limit, spare, start, stop, i):
            return False
    return True


@compiled
def _wait_for_memory(time: Ints, windows: Windows, some: Ints, limit: int, spare: int, start: int, i: int) -> bool:
    """Moves the earliest start of pass i to the time when passes before it can have freed enough memory."""
    earliest, latest, before = windows.earliest, windows.latest, windows.before
    t = earliest[i]
    while True:
        held, saved, next_free = 0, 0, NEVER
        for q in range(len(some)):
            f, b, w, after_f, after_b, less = some[q]
            if not (f == i or before[f, i - start] or latest[f] < t):
                continue
            w_may, b_may = w != i and not before[i, w - start], b != i and not before[i, b - start]
            if w_may and earliest[w] + time[w] <= t:
                continue
            if w_may:
                next_free = min(next_free, earliest[w] + time[w])
            if b_may and earliest[b] + time[b] <= t:
                held += after_b
                if not before[b, i - start]:
                    saved += max(0, less - after_f + after_b)
            else:
                held += after_f
                if b != i:
                    saved += less
                if b_may and after_b < after_f:
                    next_free = min(next_free, earliest[b] + time[b])
        if held - min(spare, saved) <= limit:
            break
        if next_free >= NEVER or next_free > latest[i]:
            return False
        t = next_free
    earliest[i] = t
    return True


@compiled
def _precede_what_fills_memory(time: Ints, windows: Windows, some: Ints, limit: int, spare: int, start: int, i: int) -> bool:
    """Moves the latest start of pass i before the latest start of F's that would fill its memory."""
    earliest, latest, before = windows.earliest, windows.latest, windows.before
    t = latest[i]
    if t >= NEVER // 2:
        return True
    while True:
        held, saved, taken = 0, 0, -NEVER
        for q in range(len(some)):
            f, b, w, after_f, after_b, less = some[q]
            is_before = f == i or before[f, i - start]
            if not (is_before or latest[f] < t):
                continue
            if w != i and not before[i, w - start] and earliest[w] + time[w] <= t:
                continue
            if b != i and not before[i, b - start] and earliest[b] + time[b] <= t:
                held += after_b
                if not before[b, i - start]:
                    saved += max(0, less - after_f + after_b)
            else:
                held += after_f
                if b != i:
                    saved += less
            if not is_before:
                taken = max(taken, latest[f])
        if held - min(spare, saved) <= limit:
            break
        if taken < earliest[i]:
            return False
        t = taken
    latest[i] = t
    return True


@compiled
def _order_by_memory(windows: Windows, some: Ints, limit: int, spare: int, start: int, stop: int, i: int) -> bool:
    """Orders B's and W's before pass i if it does not fit without them, and F's after it if it does not fit with them."""
    before = windows.before
    held, saved = 0, 0
    for q in range(len(some)):
        f, b, w, after_f, after_b, less = some[q]
        if (f == i or before[f, i - start]) and (w == i or before[i, w - start]):
            if b != i and not before[i, b - start]:
                held += after_b
                if not before[b, i - start]:
                    saved += max(0, less - after_f + after_b)
            else:
                held += after_f
                if b != i:
                    saved += less
    if held - min(spare, saved) > limit:
        return False
    for q in range(len(some)):
        f, b, w, after_f, after_b, less = some[q]
        w_may, b_may = w != i and not before[i, w - start], b != i and not before[i, b - start]
        # What is held, and may be saved, if W of this one is not before pass i, and if B is not.
        with_w, saved_with_w = after_f, less if b != i else 0
        if b_may:
            with_w, saved_with_w = after_b, 0 if before[b, i - start] else max(0, less - after_f + after_b)
        with_b, saved_with_b = after_f, less if b != i else 0
        if f == i or before[f, i - start]:
            own, own_saved = (0, 0) if w_may else (with_w, saved_with_w)
            if w_may and not before[w, i - start] and held + with_w - min(spare, saved + saved_with_w) > limit:
                add_order(windows, start, stop, w, i)
            if b_may and not before[b, i - start] and held - own + with_b - min(spare, saved - own_saved + saved_with_b) > limit:
                add_order(windows, start, stop, b, i)
        elif not before[i, f - start] and not w_may and held + with_w - min(spare, saved + saved_with_w) > limit:
            add_order(windows, start, stop, i, f)
    return True
