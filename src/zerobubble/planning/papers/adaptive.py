"""The adaptive scheduler of controllable memory: a search over building blocks that suit the memory and the times.

A building block says in which slots one microbatch runs its passes; a schedule repeats it every `interval` slots. A depth-first search
extends the path of a microbatch pass by pass, with gaps chosen per segment, and backtracks on a slot that is taken or memory that is
exceeded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from heapq import nsmallest
from itertools import groupby, islice, pairwise, product
from random import Random
from typing import NamedTuple

from zerobubble.blocks import Block, Layout, reorder, repeat, squeeze, steady_peaks
from zerobubble.errors import InputError
from zerobubble.ir import Placement, Schedule
from zerobubble.planning.papers.partial_schedule import SPLIT, check_memory
from zerobubble.planning.problem.problem import Problem

MAX_GAP = 5
"""Maximum slots from a pass to the next one."""

MAX_SEGMENTS = 500_000
"""Maximum segments that are tried for either kind of path: some seconds."""

MAX_PATHS = 4_000
"""Maximum paths of either kind that become blocks."""

SQUEEZED = 600
"""Blocks that are squeezed."""

REORDERED = 50
"""Blocks that are also reordered, the shortest of those squeezed."""

FINALISTS = 3
"""Blocks that become schedules of all microbatches."""

FULL_EFFORT_PASSES = 4_000
"""These numbers of blocks are tried for schedules of at most this many passes. For larger schedules, fewer blocks are tried in the same
time."""

Gaps = tuple[int, ...]
"""The slots from each pass of a segment to the next."""


class Segment(NamedTuple):
    """Consecutive hops over the ranks in one direction: `step` ranks a hop, 0 for staying on a rank."""

    step: int
    hops: int


def adaptive(problem: Problem) -> Schedule:
    """Finds the shortest schedule under the problem's costs that consists of one building block of equal slots and fits the limits.

    Memory counts stage activations, each as large as the largest of its rank and held until its W, up to the p microbatches beyond which
    blocks gain nothing. A block has one gap for each segment, or the same gaps for all segments in one direction: one over the first ranks,
    a smaller one over the others. Blocks are compared squeezed, the best of them reordered, on at most 2p microbatches. If they would take
    more than some seconds, a fixed subset of them is tried. Raises `InputError` if the limits hold no microbatch or no block.

    Source: Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024, arXiv 2405.15362, appendix A and its public code.
    """
    check_memory(problem)
    placement = problem.placement
    memory = max(1, min(placement.num_stages, *(_activations(problem, rank) for rank in range(placement.num_ranks))))
    few = replace(problem, num_microbatches=min(problem.num_microbatches, 2 * placement.num_ranks))
    blocks = _fitting_blocks(few, memory)
    if not blocks:
        raise InputError(
            "no building block on {name!r} fits into {memory} stage activations per rank",
            name=placement.name,
            memory=memory,
            remedy="raise the memory limit",
        )
    finalists = nsmallest(FINALISTS, blocks[: _share(few, REORDERED)], key=lambda block: few.measure(_finished(few, block, memory)))
    best = min((_finished(problem, block, memory) for block in finalists), key=problem.measure)
    return replace(best, name="adaptive")


def _activations(problem: Problem, rank: int) -> int:
    """Number of stage activations that a rank can hold."""
    costs = problem.costs
    largest = max(max(costs.held_after_f[stage], costs.held_after_b[stage]) for _, stage in problem.placement.stages(rank))
    return problem.limits.memory[rank] // max(1, largest)


def _share(problem: Problem, count: int) -> int:
    """The number of blocks to try, reduced for large schedules."""
    return max(FINALISTS, min(count, count * FULL_EFFORT_PASSES // (len(SPLIT) * problem.placement.num_stages * problem.num_microbatches)))


def _finished(problem: Problem, block: Block, memory: int) -> Schedule:
    """The better of the two ways to reorder."""
    squeezed = _squeezed_layout(problem, block)
    both = (reorder(squeezed, memory, keep_steady_phase=keep_steady_phase).schedule for keep_steady_phase in (True, False))
    return min(both, key=problem.measure)


def _squeezed_layout(problem: Problem, block: Block) -> Layout:
    return squeeze(repeat(block, problem.num_microbatches))


def _fitting_blocks(problem: Problem, memory: int) -> list[Block]:
    """The blocks that fit, in order of their squeezed time, without those that are equal after squeezing."""
    fitting = ((sum(held), block) for block in _blocks(problem.placement, memory) if max(held := steady_peaks(block)) <= memory)
    chosen = nsmallest(_share(problem, SQUEEZED), fitting, key=lambda pair: (-pair[0], max(row[-1].slot for row in pair[1].starts)))
    found: dict[Schedule, Block] = {}
    for _, block in chosen:
        layout = _squeezed_layout(problem, block)
        if max(layout.peaks) <= memory:
            found.setdefault(layout.schedule, block)
    return [found[schedule] for schedule in sorted(found, key=problem.measure)]


def _blocks(placement: Placement, memory: int) -> Iterator[Block]:
    """The blocks of both kinds of paths, if they leave slots for W."""
    interval = len(SPLIT) * placement.stages_per_rank
    for choices in (_gap_per_segment, _gap_per_direction):
        for path in islice(_Paths(placement, interval, memory, choices), MAX_PATHS):
            with suppress(InputError):
                yield Block.from_paths("adaptive", placement, interval, path)


Choices = Callable[[list[Segment]], Iterable[tuple[Gaps, ...]]]
"""The gaps that segments of several hops may have, together."""


def _gap_per_segment(segments: list[Segment]) -> Iterable[tuple[Gaps, ...]]:
    """One gap for each segment."""
    return product(*([(gap,) * segment.hops for gap in range(1, MAX_GAP + 1)] for segment in segments))


def _gap_per_direction(segments: list[Segment]) -> Iterable[tuple[Gaps, ...]]:
    """The same gaps for all segments in one direction: one over the first ranks and a smaller one over the others.

    Returns them in a fixed random order.
    """
    pairs = [(first, other) for first in range(1, MAX_GAP + 1) for other in range(1, first)]
    hops = dict(segments)
    ways = ([(first,) * n + (other,) * (hops[step] - n) for first, other in pairs for n in range(1, hops[step] + 1)] for step in hops)
    choices = list(product(*ways))
    Random(0).shuffle(choices)
    for chosen in choices:
        way = dict(zip(hops, chosen, strict=True))
        yield tuple(way[segment.step] for segment in segments)


class _Paths:
    """The start slots of a microbatch's F from first to last stage, then of its B back, such that copies do not collide.

    No rank holds more than `memory` stage activations, counting whole intervals. Ends after `MAX_SEGMENTS` segments.
    """

    def __init__(self, placement: Placement, interval: int, memory: int, choices: Choices) -> None:
        there = placement.routes[0]
        self.ranks = there + there[::-1]
        self.interval, self.memory, self.choices = interval, memory, choices
        self.segments = [
            segment for step, run in groupby(b - a for a, b in pairwise(self.ranks)) for segment in _split_segments(step, len(list(run)))
        ]
        self.slots, self.tried = [0], 0
        self.taken, self.held = [0] * placement.num_ranks, [0] * placement.num_ranks
        self.taken[self.ranks[0]] = 1

    def __iter__(self) -> Iterator[list[int]]:
        for chosen in self.choices([segment for segment in self.segments if segment.hops > 1]):
            yield from self._from(0, chosen)

    def _from(self, segment: int, chosen: tuple[Gaps, ...]) -> Iterator[list[int]]:
        if segment == len(self.segments):
            yield list(self.slots)
            return
        several = self.segments[segment].hops > 1
        for gaps in chosen[:1] if several else [(gap,) for gap in range(1, self.interval + 1)]:
            if self.tried == MAX_SEGMENTS:
                return
            self.tried += 1
            come = len(self.slots)
            if all(map(self._step, gaps)):
                yield from self._from(segment + 1, chosen[several:])
            while len(self.slots) > come:
                self._undo_step()

    def _step(self, gap: int) -> bool:
        """Adds the next pass `gap` slots after the last one if its rank has a free slot and the memory. Returns whether it was added."""
        number = len(self.slots)
        slot, rank = self.slots[-1] + gap, self.ranks[number]
        bit, held = 1 << slot % self.interval, self._holds(number, slot)
        if self.taken[rank] & bit or self.held[rank] + held > self.memory:
            return False
        self.slots.append(slot)
        self.taken[rank] |= bit
        self.held[rank] += held
        return True

    def _undo_step(self) -> None:
        """Removes the last pass."""
        slot, number = self.slots.pop(), len(self.slots)
        self.taken[self.ranks[number]] &= ~(1 << slot % self.interval)
        self.held[self.ranks[number]] -= self._holds(number, slot)

    def _holds(self, number: int, slot: int) -> int:
        """For a B, the whole intervals since the stage's F; otherwise 0."""
        forward = len(self.ranks) - 1 - number
        return (slot + 1 - self.slots[forward]) // self.interval if forward < number else 0


def _split_segments(step: int, hops: int) -> list[Segment]:
    return [Segment(step, hops)] if step else [Segment(0, 1)] * hops
