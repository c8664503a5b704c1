"""How much a block's copies hold: the lifespan of each stage, the memory law that follows, and the exact peak between the ends."""

from __future__ import annotations

from typing import NamedTuple

from zerobubble.blocks.block import Block
from zerobubble.ir import Kind


class Lifespan(NamedTuple):
    """From slot `start`, where F of `microbatch` starts on `stage`, the `slots` until the stage holds nothing of it any more."""

    stage: int
    microbatch: int
    start: int
    slots: int


def lifespans(block: Block) -> tuple[tuple[Lifespan, ...], ...]:
    """The lifespans on each rank, in order of their stages and microbatches."""
    return tuple(_of_rank(block, rank) for rank in range(block.placement.num_ranks))


def _of_rank(block: Block, rank: int) -> tuple[Lifespan, ...]:
    first: dict[tuple[int, int], int] = {}
    end: dict[tuple[int, int], int] = {}
    for (kind, stage, microbatch), slot in block.starts[rank]:
        if kind is Kind.F:
            first[stage, microbatch] = slot
        end[stage, microbatch] = max(end.get((stage, microbatch), 0), slot + block.length(kind))
    return tuple(Lifespan(*key, first[key], end[key] - first[key]) for key in sorted(first))


def memory_law(block: Block) -> tuple[int, ...]:
    """For each rank, the stage activations it never exceeds however often `block` is repeated: the sum of ceil(lifespan / interval).

    Source: Pipeline Parallelism with Controllable Memory, arXiv 2405.15362, section 2.2.
    """
    return tuple(sum(-(-life.slots // block.interval) for life in lives) for lives in lifespans(block))


def steady_peaks(block: Block) -> tuple[int, ...]:
    """For each rank, the most stage activations it holds where copies follow each other all through: the law without rounding up."""
    return tuple(_steady_peak(lives, block.interval) for lives in lifespans(block))


def _steady_peak(lives: tuple[Lifespan, ...], interval: int) -> int:
    """Each lifespan is there once for every whole interval in it, and once more where its rest covers the slot."""
    covered = [0] * interval
    for life in lives:
        for slot in range(life.start, life.start + life.slots % interval):
            covered[slot % interval] += 1
    return sum(life.slots // interval for life in lives) + max(covered)
