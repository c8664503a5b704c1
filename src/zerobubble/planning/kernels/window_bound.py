"""A lower bound by contradiction: assume a schedule of at most T, narrow when each pass can start, and find a pass that cannot.

Names of microbatches. A schedule here is the start times of its passes. Microbatches with equal shares cost the same, so they can be
renamed on each stage: the j-th F, B and W to start there get the name j. All rules still hold at the same start times. For example, the
j-th F of a stage starts after j F's of the previous stage have ended and their messages have arrived. For microbatches with unequal shares,
no order is assumed. The first pass of all is the first F of the first stage, of a microbatch with one of the shares, and T is refuted once
it is refuted for each share. A BW counts as its B and its W at once: it never holds more than F saved.

Windows. Each pass has an `earliest` and a `latest` start. Every schedule of at most T lies within the initial windows. The rules below
never remove a start, and never note an order (`before`), that such a schedule could have:

- Chains: a pass starts after its inputs have been computed and their messages have arrived. For the makespan, all times are after 0. For
  the span, the first pass of the step starts at 0, and the last W's of each rank end at most T after its first pass starts.
- Two passes of a rank: if one cannot end before the latest start of the other, it runs after the other. All passes that run before a pass,
  by windows or by a chain of such orders, take their times one after another (`_narrow_by_orders`).
- One pass at a time (edge finding; Carlier and Pinson 1990, here as by Nuijten 1994): if a set of passes and one more pass cannot all end
  by the latest end of the set, that pass runs after the whole set (`_start_after_sets`). The same holds with time reversed.
- Memory: while a pass runs, its rank holds what earlier passes have saved, except what passes that may run before it can free. If that
  exceeds the limit, the pass waits for a pass that frees memory, or runs before one that saves it (`_narrow_by_memory`).

Recomputation. If forwards may be recomputed, each F has an R with the time of its fastest level, unless that is 0, and until then keeps
what that level keeps. This holds for all microbatches of a stage, so they can still be renamed. Levels that keep less have longer R's, and
a schedule of at most T has limited time for these, which limits the memory that they save (`zerobubble.bounds.slack`). The bound ignores
the longer R's and lets every forward keep what the fastest level keeps. All passes can then stay where they are, and a rank holds at most
`Passes.spare` more than before, the most that its R's can save, and at most what forwards save that wait for their B. While a B runs, its
own forward is held in full and saves nothing. Renaming changes neither the number of forwards of a stage that wait for their B nor the
bytes that they save together.

Search. T is refuted if a window is empty. If none is, `_Search` distinguishes cases, and T is refuted if it is refuted in each of them. The
cases are how many equal microbatches have a level that keeps less at a stage, which makes them a group of their own with that level as its
fastest, and which of two passes of a rank runs first (`refute_by_orders`). In small problems the bound is therefore usually the optimum.

If T is refuted, every schedule takes at least T + 1: all times are multiples of the greatest common divisor of the costs, which is the unit
of T. T is found by doubling and bisection. Stopping early, after `MOST_ROUNDS` or `MOST_NODES`, only makes the bound lower.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from zerobubble.bounds import Bound
from zerobubble.bounds.overlap import saves_time
from zerobubble.bounds.slack import MicrobatchGroup
from zerobubble.bounds.sums import after_sums, sums_after_passes
from zerobubble.planning.kernels.compiled import compiled
from zerobubble.planning.kernels.tables import Ints
from zerobubble.planning.kernels.window_passes import Pipeline, Table
from zerobubble.planning.kernels.windows import NEVER, SCRATCH, Flags, Passes, Windows, add_order, narrow
from zerobubble.planning.problem.problem import Objective, Problem
from zerobubble.units import show_ms

MOST_PASSES = 2000
"""Windows are not narrowed for problems with more passes than this, because it would take many seconds."""

MOST_ROUNDS = 50
"""The most applications of all rules to refute one T."""

FINENESS = 10_000
"""The first T tried is above the known bound by this fraction of it. If it is not refuted, the known bound remains."""

MOST_NODES, FEWEST_NODES, PAIRS_OF_NODES = 3000, 100, 8_000_000
"""The most nodes of a search to refute one T, and in total per pair of passes. If few remain, there is no search."""

MOST_TRIES = 20
"""The most values of T tried with such a search, because bisection would take long if costs share only small divisors."""

NODES_OF_TABLE = 20
"""Nodes equivalent to the time of making the arrays of other groups of microbatches."""

MOST_TIME = 1 << 56
"""Work and bytes up to which sums are far below `NEVER`."""


def is_covered(problem: Problem) -> bool:
    """Whether the proof holds for `problem`: F, R, B and W only, one pass at a time, on one route, and not too many of them."""
    costs = problem.costs
    largest = problem.num_microbatches * max(costs.shares, default=1)
    return (
        len(problem.placement.routes) == 1
        and problem.num_passes <= MOST_PASSES
        and not problem.has_divided_head
        and problem.host is None
        and problem.sharded is None
        and not saves_time(costs)
        and not problem.shortage_reason
        and 2 * problem.work + 2 * problem.num_microbatches * sum(costs.comm) < MOST_TIME
        and largest * sum(costs.held_after_f) < MOST_TIME
    )


def sharper_bound(problem: Problem, known: Bound) -> Bound:
    """Returns the bound by windows if it is above `known`, a proven bound on the objective of `problem`, else `known`."""
    if any(problem.costs.reduce):
        return _sharper_with_sums(problem, known)
    if not is_covered(problem) or not (pipeline := Pipeline(problem)).unit:
        return known
    unit = pipeline.unit
    table = Table(pipeline, pipeline.groups)
    least = _least(table, -(-known.time // unit), 1)
    if (nodes := min(MOST_NODES, PAIRS_OF_NODES // len(table.at) ** 2)) >= FEWEST_NODES:
        least = _least(table, least, nodes)
    if least * unit <= known.time:
        return known
    shorter = f"in a schedule whose {problem.objective} is shorter, some pass has no time left to start"
    return Bound(least * unit, f"{shorter}, given messages, memory and the other passes of its rank ({show_ms(known.time)} without these)")


def _sharper_with_sums(problem: Problem, known: Bound) -> Bound:
    """The same with sums over replicas: windows bound the passes alone, and a rank sums after its last pass."""
    passes = replace(problem, costs=replace(problem.costs, reduce=(), buckets=()), workload=None, cut=None)
    bound = after_sums(sharper_bound(passes, passes.bound()), sums_after_passes(problem.placement, problem.costs))
    return bound if bound.time > known.time else known


def _least(table: Table, least: int, nodes: int) -> int:
    """Returns the least time, in units, from `least` on that is not refuted within `nodes` nodes."""
    first = max(1, least // FINENESS)
    step, end = first, None
    for _ in range(MOST_TRIES if nodes > 1 else NEVER):
        if end is not None and least >= end:
            break
        time = least - 1 + step if end is None else (least + end) // 2
        if _Search(table, time, nodes).is_refuted():
            least, step = time + 1, 2 * step
        elif step == first > 1:
            return least
        else:
            end = time
    return least


class _Search:
    """A search of `nodes` nodes for a proof that no schedule has an objective of at most `time`, in units.

    Each node narrows windows. If some remain, it branches on the levels of forwards, or else on the order of two passes of a rank. Every
    schedule is in one of the branches.
    """

    def __init__(self, table: Table, time: int, nodes: int) -> None:
        self.table, self.pipeline, self.time, self.nodes = table, table.pipeline, time, nodes
        self.is_period = self.pipeline.problem.objective is Objective.PERIOD

    def is_refuted(self) -> bool:
        """See above."""
        return self._are_refuted(self.pipeline.groups)

    def _are_refuted(self, groups: Sequence[MicrobatchGroup]) -> bool:
        """Whether no schedule exists in which microbatches have the R's of these groups, with any of their other options."""
        if min(self.pipeline.left(self.time, groups)) < 0:
            return True
        table = self.table if groups is self.pipeline.groups else Table(self.pipeline, groups)
        passes = table.passes(self.time)
        self.nodes -= NODES_OF_TABLE
        begun = [windows for windows in map(windows_of(passes), table.firsts) if not self._fails(passes, windows)]
        if not begun:
            return True
        if self.nodes <= 0:
            return False
        open_options = [
            (alike.num_microbatches * saved, group, stage, place)
            for group, alike in enumerate(groups)
            for stage, options in enumerate(alike.options)
            for place, (_, saved) in enumerate(options)
        ]
        if not open_options:
            return all(self._is_refuted_by_order(passes, windows) for windows in begun)
        _, group, stage, place = max(open_options)
        parts = (groups[group].with_option(stage, place, count) for count in range(groups[group].num_microbatches + 1))
        return all(self._are_refuted([*groups[:group], *part, *groups[group + 1 :]]) for part in parts)

    def _is_refuted_by_order(self, passes: Passes, windows: Windows) -> bool:
        """Whether no schedule lies inside the narrowed `windows`."""
        span = self.time if self.is_period else -1
        self.nodes = refute_by_orders(passes, windows, stack_for(passes), span, MOST_ROUNDS, self.nodes)
        return self.nodes >= 0

    def _fails(self, passes: Passes, windows: Windows) -> bool:
        """Narrows the windows. Returns whether one of them is empty."""
        if not self.is_period:
            last = passes.spans[:, 1]
            windows.latest[last] = np.minimum(windows.latest[last], self.time - passes.time[last])
        return not narrow(passes, windows, self.time if self.is_period else -1, MOST_ROUNDS)


def windows_of(passes: Passes) -> Callable[[int], Windows]:
    """Returns the windows of schedules that begin with a given first pass."""

    def begun(first: int) -> Windows:
        size, widest = passes.before.shape
        earliest, latest, scratch = np.zeros(size, np.int64), np.full(size, NEVER), np.zeros((SCRATCH, widest), np.int64)
        latest[first] = 0
        return Windows(earliest, latest, passes.before.copy(), np.zeros(1, np.int64), scratch)

    return begun


MOST_DEPTH, MOST_BYTES = 400, 4_000_000
"""The maximum depth of a stack of assumed orders, and the most bytes for their windows."""


class Stack(NamedTuple):
    """A stack of assumed orders.

    For each, it holds the windows before it, its two passes, the rank's first and end, and the cases tried.
    """

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
    """Returns the `nodes` left if it refutes every schedule within the narrow `windows`, otherwise -1. Changes the windows."""
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
    """Saves the windows and chooses two passes of a rank whose order is unknown, one of them with the least slack.

    Returns False if all orders are known.
    """
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
    """Restores the windows."""
    size = len(windows.earliest)
    for a in range(size):
        windows.earliest[a], windows.latest[a] = stack.earliest[depth, a], stack.latest[depth, a]
        for b in range(windows.before.shape[1]):
            windows.before[a, b] = stack.before[depth * size + a, b]
