"""Memory of repeated blocks: lifespans of stages, the upper bound that follows from them, and the exact peak of the steady phase."""

from __future__ import annotations

from typing import NamedTuple

from zerobubble.arguments import takes
from zerobubble.blocks.block import Block
from zerobubble.ir import Kind


class Lifespan(NamedTuple):
    """The `slots` for which `stage` holds something of `microbatch`, from the `start` of its F."""

    stage: int
    microbatch: int
    start: int
    slots: int


@takes()
def lifespans(block: Block) -> tuple[tuple[Lifespan, ...], ...]:
    """Return the lifespans of `block` on each rank, in order of stages and microbatches."""
    return tuple(_of_rank(block, rank) for rank in range(block.placement.num_ranks))


def _of_rank(block: Block, rank: int) -> tuple[Lifespan, ...]:
    first: dict[tuple[int, int], int] = {}
    end: dict[tuple[int, int], int] = {}
    for (kind, stage, microbatch), slot in block.starts[rank]:
        if kind is Kind.F:
            first[stage, microbatch] = slot
        end[stage, microbatch] = max(end.get((stage, microbatch), 0), slot + block.length(kind))
    return tuple(Lifespan(*key, first[key], end[key] - first[key]) for key in sorted(first))


@takes()
def memory_law(block: Block) -> tuple[int, ...]:
    """Return, for each rank, an upper bound of its stage activations for any number of copies of `block`.

    It is the sum of ceil(lifespan / interval). Source: Pipeline Parallelism with Controllable Memory, arXiv 2405.15362, section 2.2.
    """
    return tuple(sum(-(-life.slots // block.interval) for life in lives) for lives in lifespans(block))


@takes()
def steady_peaks(block: Block) -> tuple[int, ...]:
    """Return, for each rank, the exact peak of its stage activations in the steady phase of `block`."""
    return tuple(_steady_peak(lives, block.interval) for lives in lifespans(block))


def _steady_peak(lives: tuple[Lifespan, ...], interval: int) -> int:
    """Return the most lifespans that overlap in a slot.

    Each counts once per whole interval in it, and once more where its rest covers it.
    """
    covered = [0] * interval
    for life in lives:
        for slot in range(life.start, life.start + life.slots % interval):
            covered[slot % interval] += 1
    return sum(life.slots // interval for life in lives) + max(covered)
