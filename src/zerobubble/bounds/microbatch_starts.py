"""Lower bounds on the start of every pass of every microbatch, from unavoidable idle time at the beginning, in the middle and at the end.

A visit is one pass of a microbatch on a rank. Microbatches pass every stage in order, so the starts of one microbatch follow from those of
the microbatches before it: a longest path, extended by one microbatch at a time. A pass starts after its inputs have arrived, and after
three things on its rank:

* Passes in between. From one visit of a microbatch to the same or a later visit of another, the rank runs the passes of all microbatches
  in between, at these visits and those in between, one after another.
* Work that cannot be postponed. The rank has done all its work for the microbatches so far, except what memory allows it to postpone
  (`RankLoad.after`), and only a limited part of that work fits before an earlier start (`RankLoad.before`).
* Memory, if the pass is an F. The microbatches before it have progressed until its bytes fit (`_MemoryWaits`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from zerobubble.bounds.chain import ChainNeeds, RankPasses
from zerobubble.bounds.memory import BackwardState, backward_states
from zerobubble.bounds.rank_load import RankLoad

MOST_STEPS = 60_000
"""Maximum number of pairs of visits to check, over all ranks and microbatches. Each takes about 1.5 us."""


class StartCause(NamedTuple):
    """The cause of a start: the `reason`, and an earlier visit of a microbatch on a rank, which starts `time` ns before."""

    reason: str
    rank: int
    visit: int
    microbatch: int
    time: int


TRANSIT, WORK, MEMORY = "transit", "work", "memory"
"""Reasons why a pass starts no earlier: the microbatch is in transit through other stages, the rank has work, or its memory is full."""


class MicrobatchStarts:
    """The earliest starts (ns) on every rank, counted from the first F of the first stage.

    They are computed for the first `count` microbatches: for all of them if that takes at most `MOST_STEPS`. The same bounds apply when
    counting from any later microbatch, so the others are extrapolated `count` - 1 at a time. If the work of a rank alone gives a higher
    bound, that bound is used.
    """

    def __init__(self, needs: ChainNeeds, microbatches: int, by_rank: Sequence[RankPasses]) -> None:
        self.microbatches = microbatches
        self.count = min(microbatches, max(2, MOST_STEPS // sum(len(here.passes) ** 2 for here in by_rank)))
        self.ranks = [_RankStarts(here) for here in by_rank]
        at = {op: (here.rank, visit) for here in by_rank for visit, op in enumerate(here.passes)}
        self.needs = {at[op]: [(*at[need], lag) for need, lag in before] for op, before in needs.items()}
        for _ in range(self.count):
            for (rank, visit), before in self.needs.items():
                self.ranks[rank].add(visit, max((self.ranks[maker].starts[made_in][-1] + lag for maker, made_in, lag in before), default=0))
            for rank_starts in self.ranks:
                rank_starts.close()

    def last(self, rank: int, visit: int | None) -> int:
        """Returns the earliest start (ns) of a visit of the last microbatch, or the earliest end of the rank's work if `visit` is None."""
        return max(self.ranks[rank].after_work(visit, self.microbatches - 1), self._extrapolated(rank, visit))

    def _extrapolated(self, rank: int, visit: int | None) -> int:
        """Returns the start from `last`, extrapolated `count` - 1 microbatches at a time; 0 for the end of all work."""
        if visit is None:
            return 0
        groups, rest = self._groups()
        home, first = next(iter(self.needs))
        return groups * self.ranks[home].starts[first][-1] + self.ranks[rank].starts[visit][rest]

    def _groups(self) -> tuple[int, int]:
        """Returns how many groups of `count` - 1 microbatches precede the last group, and the index of the last microbatch in that one."""
        groups = max(0, self.microbatches - 2) // max(1, self.count - 1)
        return groups, self.microbatches - 1 - groups * (self.count - 1)

    def critical_path(self, rank: int, visit: int | None) -> Iterator[StartCause]:
        """Yields the causes that determine `last(rank, visit)`, from the last cause back to the first pass of all."""
        if visit is None or self.last(rank, visit) > self._extrapolated(rank, visit):
            cause = self.ranks[rank].work_before(visit, self.microbatches - 1)
            yield cause
            yield from self._path_to(cause.rank, cause.visit, cause.microbatch)
        else:
            groups, rest = self._groups()
            yield from self._path_to(rank, visit, rest)
            for _ in range(groups):
                yield from self._path_to(*next(iter(self.needs)), self.count - 1)

    def _path_to(self, rank: int, visit: int, microbatch: int) -> Iterator[StartCause]:
        while cause := self._cause(rank, visit, microbatch):
            yield cause
            _, rank, visit, microbatch, _ = cause

    def _cause(self, rank: int, visit: int, microbatch: int) -> StartCause | None:
        """Returns why a pass starts no earlier; None for the first pass of all."""
        start = self.ranks[rank].starts[visit][microbatch]
        for maker, made_in, lag in self.needs[rank, visit]:
            if self.ranks[maker].starts[made_in][microbatch] + lag == start:
                return StartCause(TRANSIT, maker, made_in, microbatch, lag)
        return self.ranks[rank].cause(visit, microbatch) if start else None


class _RankStarts:
    """The earliest starts (ns) on one rank, computed one microbatch at a time: `starts[visit][microbatch]`."""

    def __init__(self, here: RankPasses) -> None:
        load = here.load
        visits = range(len(here.passes))
        self.rank, self.load, self.work = here.rank, load, load.work // load.microbatches
        self.starts: list[list[int]] = [[] for _ in visits]
        self.idle: list[list[int]] = [[] for _ in visits]
        """`idle[visit][microbatch]`: unavoidable idle time (ns) before that visit, never less than for an earlier microbatch."""
        self.run_ends = [[0] * visit for visit in visits]
        """`run_ends[visit][first]`: earliest end (ns) of the passes of all microbatches so far at the visits `first` to `visit`."""
        self.run_times = [[sum(load.pass_times[first : visit + 1]) for first in range(visit)] for visit in visits]
        """`run_times[visit][first]`: the ns of one microbatch's passes at the visits `first` to `visit`."""
        self.postponable = [*(load.after[visit] + load.pass_times[visit] for visit in visits), 0]
        """The most work (ns) that can remain when a visit begins, by visit; the last entry is for the end of all work."""
        self.predecessors = [self._predecessors(visit) for visit in visits] + [[(first, 0, self.idle[first]) for first in visits]]
        """The tuples of `_predecessors` by visit; the last entry is for the end of all work."""
        self.states = backward_states(load)
        crowded = load.limit < load.held[-1] * load.microbatches
        self.memory_waits = {
            visit: _MemoryWaits(load, self.states, visit) for visit in range(load.num_stages) if crowded and load.held_during(visit)
        }

    def _predecessors(self, last: int) -> list[tuple[int, int, list[int]]]:
        """Returns (first, n, `idle[first]`) such that visit `last` of a microbatch follows visit `first` of the n-th microbatch before it.

        This holds if more work must be done before `last` than can be done before that earlier visit. The unavoidable idle time before the
        earlier visit then precedes `last` as well.
        """
        never = self.load.microbatches
        predecessors = [(before + self.postponable[last]) // self.work if self.work else never for before in self.load.before]
        return [(first, n, self.idle[first]) for first, n in enumerate(predecessors) if n < never]

    def add(self, visit: int, ready: int) -> None:
        """Computes the start of a visit of the next microbatch, whose inputs arrive at `ready` (ns)."""
        starts, start, length = self.starts[visit], ready, self.load.pass_times[visit]
        if starts:
            start = max(start, starts[-1] + length, self.after_work(visit, len(starts)))
            if visit in self.memory_waits:
                start = max(start, self.memory_waits[visit].earliest(len(starts)))
        run_ends = self.run_ends[visit]
        for first, time in enumerate(self.run_times[visit]):
            before = self.starts[first][-1]
            end = run_ends[first]
            run_ends[first] = end = (end if end > before else before) + time
            if end - length > start:
                start = end - length
        idle = start - len(starts) * self.work - self.load.before[visit]
        self.idle[visit].append(max(idle, self.idle[visit][-1]) if starts else idle)
        starts.append(start)

    def close(self) -> None:
        """Completes a microbatch whose visits have all been added: records when it can be in each state."""
        if self.memory_waits:
            last = [starts[-1] for starts in self.starts]
            reached = [state.time(last) for state in self.states]
            for memory_waits in self.memory_waits.values():
                memory_waits.add(reached)

    def after_work(self, visit: int | None, microbatch: int) -> int:
        """Returns the earliest start of a visit, or end of all work (None), given the work that cannot be postponed; 0 without any."""
        idle_times = [idle for idle, _ in self._idle_before(visit, microbatch)]
        return max(idle_times) + self._done_by(visit, microbatch) if idle_times else 0

    def _idle_before(self, visit: int | None, microbatch: int) -> list[tuple[int, int]]:
        """Returns the idle times (ns) that must precede a visit, each with the earlier visit that it was computed for."""
        pairs = self.predecessors[-1 if visit is None else visit]
        return [(idle[min(microbatch - n, len(idle) - 1)], first) for first, n, idle in pairs if idle and microbatch >= n]

    def _done_by(self, visit: int | None, microbatch: int) -> int:
        """Returns the work (ns) that must be done before a visit begins."""
        return (microbatch + 1) * self.work - self.postponable[-1 if visit is None else visit]

    def cause(self, visit: int, microbatch: int) -> StartCause:
        """Returns what a start waits for on this rank."""
        start, length = self.starts[visit][microbatch], self.load.pass_times[visit]
        for first, time in enumerate([*self.run_times[visit], length]):
            for n in range(microbatch + (first < visit)):
                if self.starts[first][n] + (microbatch + 1 - n) * time == start + length:
                    return StartCause(WORK, self.rank, first, n, start - self.starts[first][n])
        if self.after_work(visit, microbatch) == start:
            return self.work_before(visit, microbatch)
        return next(  # there is nothing else to wait for
            StartCause(MEMORY, self.rank, passed_visit, n, passed)
            for n, state in self.memory_waits[visit].waited_for(microbatch)
            for passed_visit, passed in self.states[state].passes
            if self.starts[passed_visit][n] + passed == start
        )

    def work_before(self, visit: int | None, microbatch: int) -> StartCause:
        """Returns the cause of `after_work`: the earlier visit from which on the rank has work until this visit or the end (None)."""
        most, first = max(self._idle_before(visit, microbatch))
        begin = self.idle[first].index(most)
        return StartCause(WORK, self.rank, first, begin, most + self._done_by(visit, microbatch) - self.starts[first][begin])


class _MemoryWaits:
    """Says when an F of a visit fits into the memory of its rank, given the progress of the microbatches before it.

    Some of these microbatches still wait for B of the visit's stage. The oldest that waits is in one of the states `early`, and the
    microbatch before it, which no longer waits, in one of `late`. Both lists are sorted by bytes held. An entry (count, n, k) of
    `options` means that `count` microbatches can wait if the oldest is in one of the first n states of `early`, and the one before it in
    one of the first k of `late`.
    """

    def __init__(self, load: RankLoad, states: Sequence[BackwardState], visit: int) -> None:
        held = load.held_during(visit)
        reduced = sorted(range(len(states)), key=lambda n: states[n].held)
        self.early, self.late = ([n for n in reduced if (states[n].left > visit) == waiting] for waiting in (True, False))
        early, late = ([states[n].held for n in side] for side in (self.early, self.late))
        most = min(load.limit // held, load.microbatches) - 1
        memory_waits = [load.limit - count * held for count in range(most + 1)]
        # Of counts that allow the same states, only the largest is kept: it is the least restrictive.
        largest = {
            (bisect_right(early, headroom), bisect_right(late, headroom - held)): count for count, headroom in enumerate(memory_waits)
        }
        self.options = [(count, *fitting) for fitting, count in largest.items()]
        self.early_times: list[list[int]] = []
        self.late_times: list[list[int]] = []

    def add(self, reached: Sequence[int]) -> None:
        """Records when the next microbatch can be in any of the first n states of either list, for each n; `reached` has all times."""
        for side, times in ((self.early, self.early_times), (self.late, self.late_times)):
            times.append(list(accumulate((reached[n] for n in side), min)))

    def earliest(self, microbatch: int) -> int:
        """Returns the earliest time (ns) at which the F of this microbatch fits."""
        return min(self._times(microbatch))

    def _times(self, microbatch: int) -> Iterator[int]:
        """Yields that time for each number of microbatches that may still wait."""
        for count, early, late in self.options:
            oldest = microbatch - count
            if oldest <= 0:
                yield self.early_times[0][early - 1]
            elif late:
                before = self.late_times[oldest - 1][late - 1]
                yield max(before, self.early_times[oldest][early - 1]) if count else before

    def waited_for(self, microbatch: int) -> Iterator[tuple[int, int]]:
        """Yields the microbatches that this one may wait for, each with the state that it must reach."""
        for count, early, late in self.options:
            oldest = max(0, microbatch - count)
            yield from ((oldest, state) for state in self.early[:early] if count)
            yield from ((oldest - 1, state) for state in self.late[:late] if oldest)
