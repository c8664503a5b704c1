"""Branching on the order of two passes of a rank: if windows become empty in both branches, they contain no schedule."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from zerobubble.planning.kernels.compiled import compiled
from zerobubble.planning.kernels.tables import Ints
from zerobubble.planning.kernels.windows import NEVER, Flags, Passes, Windows, add_order, narrow

MOST_DEPTH, MOST_BYTES = 400, 4_000_000
"""Orders that are taken one upon the other at most, and the bytes in which windows are kept meanwhile."""


class Stack(NamedTuple):
    """For each order that is taken upon others, the windows before, the two passes, the rank's first and end, and the cases tried."""

    earliest: Ints
    latest: Ints
    before: Flags
    cases: Ints


def stack_for(passes: Passes) -> Stack:
    """An empty stack."""
    size, widest = passes.before.shape
    depth = max(1, min(MOST_DEPTH, MOST_BYTES // (size * widest)))
    earliest, latest = np.zeros((depth, size), np.int64), np.zeros((depth, size), np.int64)
    return Stack(earliest, latest, np.zeros((depth * size, widest), np.uint8), np.zeros((depth, 5), np.int64))


@compiled
def refute_by_orders(passes: Passes, windows: Windows, stack: Stack, span: int, rounds: int, nodes: int) -> int:
    """How many of the `nodes` are left where no schedule lies inside the narrow `windows`; -1 where that is not shown. Windows change."""
    depth = 0
    if not _take_two(passes, windows, stack, depth):
        return -1
    while depth >= 0:
        one, other, start, stop, tried = stack.cases[depth]
        if tried == 2:
            depth -= 1
        elif nodes <= 0:
            return -1
        else:
            nodes -= 1
            stack.cases[depth, 4] = tried + 1
            _take_back(windows, stack, depth)
            if tried == 0:
                add_order(windows, start, stop, one, other)
            else:
                add_order(windows, start, stop, other, one)
            if narrow(passes, windows, span, rounds):
                depth += 1
                if depth >= len(stack.cases) or not _take_two(passes, windows, stack, depth):
                    return -1
    return nodes


@compiled
def _take_two(passes: Passes, windows: Windows, stack: Stack, depth: int) -> bool:
    """Keep the windows, and choose two passes of a rank without a known order, of which one has least time left; False if all have one."""
    earliest, latest, before, time = windows.earliest, windows.latest, windows.before, passes.time
    least, found = NEVER, False
    for rank in range(len(passes.limit)):
        start, stop = passes.first[rank], passes.first[rank + 1]
        for a in range(start, stop):
            for b in range(a + 1, stop):
                if before[a, b - start] or before[b, a - start] or time[a] == 0 or time[b] == 0:
                    continue
                a_first, b_first = latest[b] - earliest[a] - time[a], latest[a] - earliest[b] - time[b]
                if min(a_first, b_first) < least:
                    least, found = min(a_first, b_first), True
                    stack.cases[depth, 0] = a if a_first >= b_first else b
                    stack.cases[depth, 1] = b if a_first >= b_first else a
                    stack.cases[depth, 2], stack.cases[depth, 3], stack.cases[depth, 4] = start, stop, 0
    if found:
        size = len(earliest)
        for a in range(size):
            stack.earliest[depth, a], stack.latest[depth, a] = earliest[a], latest[a]
            for b in range(before.shape[1]):
                stack.before[depth * size + a, b] = before[a, b]
    return found


@compiled
def _take_back(windows: Windows, stack: Stack, depth: int) -> None:
    """Make the windows what they were."""
    size = len(windows.earliest)
    for a in range(size):
        windows.earliest[a], windows.latest[a] = stack.earliest[depth, a], stack.latest[depth, a]
        for b in range(windows.before.shape[1]):
            windows.before[a, b] = stack.before[depth * size + a, b]
