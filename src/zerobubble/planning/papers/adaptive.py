"""The adaptive scheduler of controllable memory: the building block that suits the memory and the times."""

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
from zerobubble.simulation import simulate

MAX_GAP = 5
"""Slots from a pass to the next one at most."""

MAX_LEGS = 500_000
"""Legs that are tried for either kind of path, at most: some seconds."""

MAX_PATHS = 4_000
"""Paths of either kind that become blocks, at most."""

SQUEEZED = 600
"""Blocks that are squeezed."""

REORDERED = 50
"""Blocks that are also reordered, the shortest of those squeezed."""

FINALISTS = 3
"""Blocks that become schedules of all microbatches."""

FULL_EFFORT_PASSES = 4_000
"""Passes of a schedule up to which so many blocks are tried; fewer are of larger ones, so that they take no longer."""

Gaps = tuple[int, ...]
"""The slots from each pass of a leg to the next."""


class Leg(NamedTuple):
    """A run of hops over the ranks in one direction: `step` ranks a hop, 0 where it stays."""

    step: int
    hops: int


def adaptive(problem: Problem) -> Schedule:
    """The shortest schedule under the problem's costs that is made of one building block of equal slots and fits the limits.

    Memory counts stage activations, each as large as the largest of its rank and held until its W, up to the p microbatches beyond
    which blocks gain nothing. A block has one gap for each leg, or the same gaps for all legs in one direction: one over the first
    ranks, a smaller one over the others. Blocks are compared squeezed, the best of them reordered, on 2p microbatches at most; of more
    than can be tried in some seconds, the same part each time. Raises `InputError` where the limits hold no microbatch or no block.

    Source: Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024, arXiv 2405.15362, appendix A and its public code.
    """
    check_memory(problem)
    placement = problem.placement
    memory = max(1, min(placement.num_stages, *(_activations(problem, rank) for rank in range(placement.num_ranks))))
    few = replace(problem, num_microbatches=min(problem.num_microbatches, 2 * placement.num_ranks))
    blocks = _fitting_blocks(few, memory)
    if not blocks:
        raise InputError(
            f"no building block on {placement.name!r} makes do with {memory} stage activations per rank: raise the memory limit"
        )
    finalists = nsmallest(FINALISTS, blocks[: _share(few, REORDERED)], key=lambda block: _objective(few, _finished(few, block, memory)))
    best = min((_finished(problem, block, memory) for block in finalists), key=lambda schedule: _objective(problem, schedule))
    return replace(best, name="adaptive")


def _activations(problem: Problem, rank: int) -> int:
    """How many stage activations a rank has room for."""
    costs = problem.costs
    largest = max(max(costs.held_after_f[stage], costs.held_after_b[stage]) for _, stage in problem.placement.stages(rank))
    return problem.limits.memory[rank] // max(1, largest)


def _share(problem: Problem, count: int) -> int:
    """So many blocks, or fewer where schedules are large."""
    return max(FINALISTS, min(count, count * FULL_EFFORT_PASSES // (len(SPLIT) * problem.placement.num_stages * problem.num_microbatches)))


def _objective(problem: Problem, schedule: Schedule) -> int:
    return problem.objective.of(simulate(schedule, problem.costs))


def _finished(problem: Problem, block: Block, memory: int) -> Schedule:
    """The better of the two ways to reorder."""
    squeezed = _squeezed_layout(problem, block)
    both = (reorder(squeezed, memory, keep_steady_phase=keep_steady_phase).schedule for keep_steady_phase in (True, False))
    return min(both, key=lambda schedule: _objective(problem, schedule))


def _squeezed_layout(problem: Problem, block: Block) -> Layout:
    return squeeze(repeat(block, problem.num_microbatches))


def _fitting_blocks(problem: Problem, memory: int) -> list[Block]:
    """The blocks that fit, without those that are the same when squeezed, in order of the time they take then."""
    fitting = ((sum(held), block) for block in _blocks(problem.placement, memory) if max(held := steady_peaks(block)) <= memory)
    chosen = nsmallest(_share(problem, SQUEEZED), fitting, key=lambda pair: (-pair[0], _length(pair[1])))
    found: dict[Schedule, Block] = {}
    for _, block in chosen:
        layout = _squeezed_layout(problem, block)
        if max(layout.peaks) <= memory:
            found.setdefault(layout.schedule, block)
    return [found[schedule] for schedule in sorted(found, key=lambda schedule: _objective(problem, schedule))]


def _length(block: Block) -> int:
    """The slot in which the last pass starts."""
    return max(row[-1].slot for row in block.starts)


def _blocks(placement: Placement, memory: int) -> Iterator[Block]:
    """The blocks of both kinds of paths, without those that leave W no room."""
    interval = len(SPLIT) * placement.stages_per_rank
    for choices in (_gap_per_leg, _gap_per_direction):
        for path in islice(_Paths(placement, interval, memory, choices), MAX_PATHS):
            with suppress(InputError):
                yield Block.of("adaptive", placement, interval, path)


Choices = Callable[[list[Leg]], Iterable[tuple[Gaps, ...]]]
"""The gaps that legs of several hops may have, together."""


def _gap_per_leg(legs: list[Leg]) -> Iterable[tuple[Gaps, ...]]:
    """One gap for each leg."""
    return product(*([(gap,) * leg.hops for gap in range(1, MAX_GAP + 1)] for leg in legs))


def _gap_per_direction(legs: list[Leg]) -> Iterable[tuple[Gaps, ...]]:
    """The same gaps for all legs in one direction: one over the first ranks and a smaller one over the others. In a random order, always
    the same."""
    pairs = [(first, other) for first in range(1, MAX_GAP + 1) for other in range(1, first)]
    hops = dict(legs)
    ways = ([(first,) * n + (other,) * (hops[step] - n) for first, other in pairs for n in range(1, hops[step] + 1)] for step in hops)
    choices = list(product(*ways))
    Random(0).shuffle(choices)
    for chosen in choices:
        way = dict(zip(hops, chosen, strict=True))
        yield tuple(way[leg.step] for leg in legs)


class _Paths:
    """The slots in which a microbatch starts its F from first to last stage, then its B back, so that copies do not collide.

    No rank holds more than `memory` stage activations, whole intervals counted. Ends after `MAX_LEGS` legs.
    """

    def __init__(self, placement: Placement, interval: int, memory: int, choices: Choices) -> None:
        there = placement.routes[0]
        self.ranks = there + there[::-1]
        self.interval, self.memory, self.choices = interval, memory, choices
        self.legs = [leg for step, run in groupby(b - a for a, b in pairwise(self.ranks)) for leg in _split_legs(step, len(list(run)))]
        self.slots, self.tried = [0], 0
        self.taken, self.held = [0] * placement.num_ranks, [0] * placement.num_ranks
        self.taken[self.ranks[0]] = 1

    def __iter__(self) -> Iterator[list[int]]:
        for chosen in self.choices([leg for leg in self.legs if leg.hops > 1]):
            yield from self._from(0, chosen)

    def _from(self, leg: int, chosen: tuple[Gaps, ...]) -> Iterator[list[int]]:
        if leg == len(self.legs):
            yield list(self.slots)
            return
        several = self.legs[leg].hops > 1
        for gaps in chosen[:1] if several else [(gap,) for gap in range(1, self.interval + 1)]:
            if self.tried == MAX_LEGS:
                return
            self.tried += 1
            come = len(self.slots)
            if all(map(self._step, gaps)):
                yield from self._from(leg + 1, chosen[several:])
            while len(self.slots) > come:
                self._undo_step()

    def _step(self, gap: int) -> bool:
        """Take the next pass `gap` slots after the last one, unless its rank has no room for it; whether it was taken."""
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
        """Take the last pass back."""
        slot, number = self.slots.pop(), len(self.slots)
        self.taken[self.ranks[number]] &= ~(1 << slot % self.interval)
        self.held[self.ranks[number]] -= self._holds(number, slot)

    def _holds(self, number: int, slot: int) -> int:
        """The whole intervals from a stage's F to its B, if this is one."""
        forward = len(self.ranks) - 1 - number
        return (slot + 1 - self.slots[forward]) // self.interval if forward < number else 0


def _split_legs(step: int, hops: int) -> list[Leg]:
    return [Leg(step, hops)] if step else [Leg(0, 1)] * hops
