"""Bounds each rank as a single machine with release times (earliest starts) and tails (the time that must follow a pass).

For any set of passes of a rank, the first begins no earlier than the earliest start among them, they run one after the other, and the
shortest tail among them follows the last. This is the classic one-machine bound (Carlier 1982): the set with the
largest sum is found for every rank. Tails are computed like earliest starts, backwards from the end: the output of a pass is used on other
ranks, and the passes of later microbatches and their W follow on its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from zerobubble.bounds.chain import BoundedTime, ChainNeeds, RankPasses
from zerobubble.bounds.microbatch_starts import MicrobatchStarts
from zerobubble.bounds.rank_load import RankLoad
from zerobubble.ir import Op

MOST_PASSES = 300
"""The bound is computed for problems of at most this many passes. In larger problems, it was never the strongest."""

NOTHING = -(2**62)
"""The tail of a pass that nothing in the window must follow."""


class Job(NamedTuple):
    """A pass that cannot start before `start`, takes `time`, and ends at least `after` before the window ends, all in ns."""

    start: int
    time: int
    after: int


class Busy(NamedTuple):
    """A rank that is busy for `work` ns with passes that start no earlier than `start` and end at least `after` before the end."""

    rank: int
    start: int
    work: int
    after: int

    @property
    def time(self) -> int:
        """The earliest end of the window (ns)."""
        return self.start + self.work + self.after


def busy_ranks(needs: ChainNeeds, starts: MicrobatchStarts, by_rank: Sequence[RankPasses], window: BoundedTime) -> Iterator[Busy]:
    """For each rank, the passes with the largest bound on `window`, which begins with the first pass of all; none for large problems."""
    # `needs` has two passes of each stage, F and B; with W there are three. The bound needs the starts of all microbatches, and `starts`
    # may hold only those of the first `count`.
    if 3 * starts.microbatches * len(needs) // 2 > MOST_PASSES or starts.count < starts.microbatches:
        return
    follows = _times_to_end(needs, starts.microbatches, by_rank, window)
    for here in by_rank:
        jobs = list(_jobs(here.load, starts.ranks[here.rank].starts, follows[here.rank], window.rank in (None, here.rank)))
        if jobs:
            yield _busiest(here.rank, jobs)


def _jobs(load: RankLoad, starts: Sequence[Sequence[int]], follows: Sequence[Sequence[int]], with_weights: bool) -> Iterator[Job]:
    """The passes of a rank that are in the window or that something in it must follow."""
    for visit, length in enumerate(load.pass_times):
        for start, follow in zip(starts[visit], follows[visit], strict=True):
            if follow > NOTHING:
                yield Job(start, length, follow - length)
            if with_weights and visit >= load.num_stages:
                yield Job(start + length, load.weight[2 * load.num_stages - 1 - visit], 0)


def _busiest(rank: int, jobs: Iterable[Job]) -> Busy:
    """The largest sum of start, work and tail, over the sets of jobs with at least a given start and a given tail."""
    late_first = sorted(jobs, reverse=True)
    best = Busy(rank, 0, 0, 0)
    for after in {job.after for job in late_first}:
        work = 0
        for job in late_first:
            if job.after >= after:
                work += job.time
                if job.start + work + after > best.time:
                    best = Busy(rank, job.start, work, after)
    return best


def _times_to_end(needs: ChainNeeds, microbatches: int, by_rank: Sequence[RankPasses], window: BoundedTime) -> list[list[list[int]]]:
    """By rank, visit (see `rank_load`) and microbatch, the least ns from the start of the pass to the end of the window, or `NOTHING`."""
    at = {op: (here.rank, visit) for here in by_rank for visit, op in enumerate(here.passes)}
    users: dict[Op, list[tuple[Op, int]]] = {op: [] for op in needs}
    for op, before in needs.items():
        for need, lag in before:
            users[need].append((op, lag))
    ranks = [_TimesToEnd(here.load, window.rank in (None, here.rank)) for here in by_rank]
    for _ in range(microbatches):
        for op in reversed(needs):
            used = max((ranks[at[user][0]].times[at[user][1]][-1] + lag for user, lag in users[op]), default=NOTHING)
            rank, visit = at[op]
            ranks[rank].add(visit, used)
    return [[visit_times[::-1] for visit_times in rank.times] for rank in ranks]


class _TimesToEnd:
    """The ns to the end of the window on one rank: `times[visit]`, the last microbatch first."""

    def __init__(self, load: RankLoad, is_inside: bool) -> None:
        lengths, stages = load.pass_times, load.num_stages
        visits = range(len(lengths))
        self.times: list[list[int]] = [[] for _ in visits]
        self.lengths = lengths
        weights = [load.weight[2 * stages - 1 - visit] if visit >= stages else 0 for visit in visits]
        self.rest = [sum(lengths[visit:]) + sum(weights[visit:]) if is_inside else 0 for visit in visits]
        """The ns that remain of a microbatch from a visit on, if it is in the window."""
        self.runs = [[NOTHING for _ in visits] for _ in visits]
        """`runs[visit][last]`: the most ns, over all microbatches k from this one on, of the visits `visit` to `last` of this one through k
        and of what must follow the last of these."""

    def add(self, visit: int, used: int) -> None:
        """Computes the time for the microbatch before, whose pass is followed by `used` ns on other ranks."""
        times, length = self.times[visit], self.lengths[visit]
        time = max(used, (len(times) + 1) * self.rest[visit] or NOTHING)
        if times:
            time = max(time, times[-1] + length)
        total = length
        for last in range(visit + 1, len(self.lengths)):
            total += self.lengths[last]
            run = max(self.runs[visit][last], self.times[last][-1] - self.lengths[last]) + total
            self.runs[visit][last] = run
            time = max(time, run)
        times.append(time if time > 0 else NOTHING)
