"""Beam search: extends partial schedules pass by pass, and keeps the most promising ones of each length.

For the same work, it considers more orders than a search that plays whole schedules, so it finds good schedules of small problems quickly.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from zerobubble.ir import Kind, Op, Schedule
from zerobubble.planning.kernels.tables import Records, codes_of
from zerobubble.planning.problem.problem import Objective, Problem

IDLE_WEIGHT = 0.02
"""The weight of the mean time of a rank, relative to the longest. Of two equally long partial schedules, the one with less idle time is
kept."""


class _Partial(NamedTuple):
    """A partial schedule: the passes done of each kind and stage, the start and the free time of each rank, its bytes, and the arrival of
    messages.
    """

    done: tuple[int, ...]
    free: tuple[int, ...]
    begun: tuple[int, ...]
    held: tuple[int, ...]
    arrivals: tuple[tuple[int, ...], ...]
    """For each kind and stage, the arrival times of the inputs of its next passes."""
    cost: float
    last: tuple[_Partial, int] | None
    """The previous partial schedule and the pass that was added to it."""


class _Beam:
    """The problem as tuples indexed by code, as in `Tables`: F of all stages, then B, then W."""

    def __init__(self, problem: Problem) -> None:
        costs, self.home, self.stages = problem.costs, problem.placement.routes[0], problem.placement.num_stages
        self.problem, self.codes = problem, range(3 * self.stages)
        self.time = (*costs.forward, *costs.backward, *costs.weight)
        after_f, after_b = costs.held_after_f, costs.held_after_b
        self.change = (*after_f, *(b - f for f, b in zip(after_f, after_b, strict=True)), *(-b for b in after_b))
        self.rank = self.home * 3
        codes = codes_of(problem)
        self.feeds = [self._feeds(codes, code) for code in self.codes]
        self.stages_of = [[s for s in range(self.stages) if self.home[s] == rank] for rank in range(problem.placement.num_ranks)]
        self.tail = [self._tail(code) for code in self.codes]

    @staticmethod
    def _feeds(codes: Records, code: int) -> list[tuple[int, int]]:
        """The kinds and stages that wait for the output of this one, each with the time of the message."""
        user, successor = int(codes[code]["user"]), int(codes[code]["successor"])
        feeds = [(user, int(codes[user]["lag"]))] if user >= 0 else []
        # if the successor also waits for a message, that arrives after this output, so only the message counts
        return [*feeds, (successor, 0)] if successor >= 0 and codes[successor]["maker"] < 0 else feeds

    def _tail(self, code: int) -> int:
        """The ns of the longest chain of passes and messages that must follow a pass of this kind and stage."""
        return max((self._tail(user) + self.time[user] + lag for user, lag in self.feeds[code]), default=0)

    def beginning(self) -> _Partial:
        ranks, m = self.problem.placement.num_ranks, self.problem.num_microbatches
        nothing = (0,) * ranks
        return _Partial((0,) * len(self.codes), nothing, (-1,) * ranks, nothing, ((0,) * m, *((),) * (len(self.codes) - 1)), 0.0, None)

    def followers(self, one: _Partial) -> Iterator[_Partial]:
        """The partial schedules with one more pass.

        The pass is one that can begin, on the rank that can end a pass first, before that end. These lead to all active schedules.
        """
        ready = []
        for code in self.codes:
            if one.done[code] < len(one.arrivals[code]):
                rank = self.rank[code]
                fits = one.held[rank] + self.change[code] <= self.problem.limits.memory[rank]
                if fits and (code >= self.stages or self._can_complete_oldest(one, code)):
                    begin = max(one.free[rank], one.arrivals[code][one.done[code]])
                    ready.append((begin + self.time[code], rank, begin, code))
        if ready:
            first, rank, _, _ = min(ready)
            for end, here, begin, code in ready:
                if here == rank and (begin < first or end == first):
                    yield self._with(one, code, begin)

    def _can_complete_oldest(self, one: _Partial, forward: int) -> bool:
        """Whether the F `forward` leaves its rank's oldest microbatch enough memory to reach the rank's last stage and its B."""
        waiting = growth = 0
        oldest = one.done[forward + self.stages]
        for stage in self.stages_of[self.rank[forward]]:
            alive = one.done[stage] - one.done[stage + self.stages]
            alive += stage == forward or (stage > forward and alive == 0 and one.done[stage] <= oldest)
            waiting += alive * self.change[stage]
            growth = max(growth, self.change[stage + self.stages])
        return waiting + growth <= self.problem.limits.memory[self.rank[forward]]

    def _with(self, one: _Partial, code: int, begin: int) -> _Partial:
        rank, end = self.rank[code], begin + self.time[code]
        done, arrivals = list(one.done), list(one.arrivals)
        free, begun, held = list(one.free), list(one.begun), list(one.held)
        done[code] += 1
        free[rank], held[rank] = end, held[rank] + self.change[code]
        if begun[rank] < 0:
            begun[rank] = 0 if self.problem.objective is Objective.MAKESPAN else begin
        for user, lag in self.feeds[code]:
            arrivals[user] += (end + lag,)
        return _Partial(tuple(done), tuple(free), tuple(begun), tuple(held), tuple(arrivals), self._cost(done, free, begun), (one, code))

    def _cost(self, done: list[int], free: list[int], begun: list[int]) -> float:
        """A lower bound on the objective, plus a small weight times the mean time of a rank."""
        m, left = self.problem.num_microbatches, [0] * len(free)
        longest = 0
        for code in self.codes:
            missing = m - done[code]
            if missing:
                rank = self.rank[code]
                work = missing * self.time[code]
                left[rank] += work
                if self.problem.objective is Objective.MAKESPAN or rank == self.home[0]:
                    longest = max(longest, free[rank] + work + self.tail[code])
        times = [end + more - max(0, begin) for end, more, begin in zip(free, left, begun, strict=True)]
        return max(longest, *times) + IDLE_WEIGHT * sum(times) / len(times)

    def schedule(self, one: _Partial) -> Schedule:
        codes = []
        while one.last is not None:
            one, code = one.last
            codes.append(code)
        rows: list[list[Op]] = [[] for _ in range(self.problem.placement.num_ranks)]
        seen = [0] * len(self.codes)
        for code in reversed(codes):
            kind, stage = divmod(code, self.stages)
            rows[self.rank[code]].append(Op((Kind.F, Kind.B, Kind.W)[kind], stage, seen[code]))
            seen[code] += 1
        return Schedule("beam search", self.problem.placement, self.problem.num_microbatches, tuple(map(tuple, rows)))


def beam_search(problem: Problem, width: int) -> tuple[Schedule | None, int]:
    """Returns the best schedule found with `width` partial schedules of each length, and the number of passes placed.

    The schedule is None if all partial schedules run out of memory.
    """
    beam, placed = _Beam(problem), 0
    kept = [beam.beginning()]
    for _ in range(problem.num_passes):
        best: dict[tuple[tuple[int, ...], ...], _Partial] = {}
        for one in kept:
            for new in beam.followers(one):
                placed += 1
                key = (new.done, new.free)
                if key not in best or new.cost < best[key].cost:
                    best[key] = new
        kept = sorted(best.values(), key=lambda one: one.cost)[:width]
    return (beam.schedule(kept[0]) if kept else None), placed
