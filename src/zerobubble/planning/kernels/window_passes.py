"""The properties of all schedules of a problem, as the arrays from which windows are narrowed: see `window_bound`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import gcd
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zerobubble.bounds.slack import MicrobatchGroup, least_work, microbatch_groups, rank_savings, recompute_times
from zerobubble.costs import NONE
from zerobubble.ir import Kind
from zerobubble.planning.kernels.tables import Ints
from zerobubble.planning.kernels.windows import NEVER, Passes
from zerobubble.planning.problem.problem import Objective, Problem


class Key(NamedTuple):
    """A pass of a microbatch, the `number`-th of its group."""

    kind: Kind
    stage: int
    group: int
    number: int


class Pipeline:
    """Stages and microbatches of a problem. Times are in units of `unit` ns, which is 0 if all times are 0."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.home, self.num_ranks = problem, problem.placement.routes[0], problem.placement.num_ranks
        offered = problem.recomputation.offered if problem.recomputation else (NONE,)
        self.groups = microbatch_groups(problem.costs, problem.num_microbatches, offered)
        work = least_work(problem.placement, self.groups)
        self.work = work.span if problem.objective is Objective.PERIOD else work.makespan
        times = [time for one in self.groups for column in _times(one) for time in column]
        further = [time for one in self.groups for options in one.options for time, _ in options]
        self.unit = gcd(*times, *further, *problem.costs.comm)

    def left(self, time: int, groups: Sequence[MicrobatchGroup]) -> list[int]:
        """Returns, by rank, the ns left for further R's in a schedule of length `time` whose microbatches have the R's of `groups`."""
        recompute = recompute_times(self.problem.placement, groups)
        return [time * self.unit - own - more for own, more in zip(self.work, recompute, strict=True)]

    def spare(self, time: int, groups: Sequence[MicrobatchGroup]) -> Ints:
        """Returns the bytes that further R's can save at once on each rank."""
        slack = zip(self.left(time, groups), rank_savings(self.problem.placement, self.problem.limits, groups), strict=True)
        return np.array([savings.within(left) for left, savings in slack], np.int64)


class Table:
    """The passes of microbatches, rank after rank. Equal microbatches form a group."""

    def __init__(self, pipeline: Pipeline, groups: Sequence[MicrobatchGroup]) -> None:
        self.pipeline, self.groups = pipeline, groups
        self.rows = [list(self._keys(rank)) for rank in range(pipeline.num_ranks)]
        self.at = {key: place for place, key in enumerate(key for row in self.rows for key in row)}
        self.firsts = [self.at[Key(Kind.F, 0, group, 0)] for group in range(len(groups))]
        before = np.zeros((len(self.at), max(map(len, self.rows))), np.uint8)
        for row in self.rows:
            start = self.at[row[0]]
            before[start : start + len(row), : len(row)] = _before(row)
        times = np.array([_times(groups[key.group])[_COLUMN[key.kind]][key.stage] // pipeline.unit for key in self.at], np.int64)
        held = [[one for key in row for one in self._held(key)] for row in self.rows]
        spans = [
            (self.at[Key(Kind.F, own[0].stage, first, 0)], self.at[last])
            for own in self.rows
            for first in range(len(groups))
            for last in own
            if last.kind is Kind.W and last.number == groups[last.group].num_microbatches - 1
        ]
        self._passes = Passes(
            times,
            _offsets(self.rows),
            np.array(list(self._waits(times)), np.int64),
            before,
            np.array([one for row in held for one in row], np.int64),
            _offsets(held),
            np.array([min(limit, NEVER) for limit in pipeline.problem.limits.memory], np.int64),
            np.zeros(pipeline.num_ranks, np.int64),
            np.array(spans, np.int64),
        )

    def passes(self, time: int) -> Passes:
        """Returns the arrays for schedules of length `time`."""
        return self._passes._replace(spare=self.pipeline.spare(time, self.groups))

    def _keys(self, rank: int) -> Iterator[Key]:
        for stage in (stage for stage, home in enumerate(self.pipeline.home) if home == rank):
            for kind in (Kind.F, Kind.R, Kind.B, Kind.W):
                for group, alike in enumerate(self.groups):
                    if kind is not Kind.R or alike.recompute_time[stage]:
                        yield from (Key(kind, stage, group, number) for number in range(alike.num_microbatches))

    def _held(self, key: Key) -> Iterator[tuple[int, ...]]:
        """The passes between which the forward `key` holds bytes, and the number of bytes. With R, there are two such intervals."""
        if key.kind is not Kind.F:
            return
        alike, stage = self.groups[key.group], key.stage
        kept, pending = alike.costs.held_after_f[stage], alike.left[stage]
        backward, weight = (self.at[key._replace(kind=kind)] for kind in (Kind.B, Kind.W))
        most = max((saved for _, saved in alike.options[stage]), default=0)
        yield self.at[key], backward, weight, kept, alike.costs.held_after_b[stage], most
        if recompute := self.at.get(key._replace(kind=Kind.R)):
            more = alike.saved[stage] - kept
            yield recompute, backward, weight, more, min(more, max(0, pending - kept)), 0

    def _waits(self, times: Ints) -> Iterator[tuple[int, int, int]]:
        """The rows of `Passes.waits`: chains of each microbatch, and the order of equal microbatches on a stage."""
        costs, home, unit = self.pipeline.problem.costs, self.pipeline.home, self.pipeline.unit
        stages = len(home)
        way = [*((Kind.F, stage) for stage in range(stages)), *((Kind.B, stage) for stage in reversed(range(stages)))]
        for group, alike in enumerate(self.groups):
            for number in range(alike.num_microbatches):
                for place, (kind, stage) in enumerate(way):
                    key = Key(kind, stage, group, number)
                    here = self.at[key]
                    if place + 1 < len(way):
                        after, its_stage = way[place + 1]
                        lag = costs.comm[min(stage, its_stage)] // unit if home[stage] != home[its_stage] else 0
                        yield here, self.at[Key(after, its_stage, group, number)], times[here] + lag
                    behind = key._replace(kind=Kind.R if kind is Kind.F else Kind.W)
                    followers = [key]
                    if behind in self.at:
                        yield here, self.at[behind], times[here]
                        followers.append(behind)
                        if kind is Kind.F:
                            yield self.at[behind], self.at[key._replace(kind=Kind.B)], times[self.at[behind]]
                    if number + 1 < alike.num_microbatches:
                        for own in followers:
                            yield self.at[own], self.at[own._replace(number=number + 1)], times[self.at[own]]


_COLUMN = {Kind.F: 0, Kind.R: 1, Kind.B: 2, Kind.W: 3}
"""The index of a kind in `_times`."""


def _times(alike: MicrobatchGroup) -> tuple[tuple[int, ...], ...]:
    return alike.costs.forward, alike.recompute_time, alike.costs.backward, alike.costs.weight


def _offsets(rows: Sequence[Sequence[object]]) -> Ints:
    """The start of each row in their concatenation, then the end."""
    return np.cumsum([0, *map(len, rows)]).astype(np.int64)


def _before(row: Sequence[Key]) -> NDArray[np.bool_]:
    """Whether pass `one` of a rank precedes pass `other` in every schedule, at [one, other], because of chains and the order of
    microbatches.
    """
    own = np.array([(_COLUMN[kind], stage, group, number) for kind, stage, group, number in row])
    (kind, stage, group, number), (other, its_stage, its_group, its_number) = own.T[:, :, None], own.T[:, None, :]
    f, r, b, w = range(4)
    of_f = (other >= b) | (stage <= its_stage)
    of_r = np.where(other == r, stage == its_stage, (other != f) & (stage >= its_stage))
    of_b, of_w = (other >= b) & (stage >= its_stage), (other == w) & (stage == its_stage)
    follows = np.select([kind == f, kind == r, kind == b], [of_f, of_r, of_b], of_w)
    return follows & (group == its_group) & (number <= its_number) & ~np.eye(len(row), dtype=bool)
