"""Reasons why a block cannot be repeated: passes of its copies collide, or passes start before their inputs are ready."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from zerobubble.arguments import takes
from zerobubble.blocks.block import Block, Start
from zerobubble.ir import Op
from zerobubble.rules import makers, uses


class Collision(NamedTuple):
    """Two passes of a repeated block that run at the same time on `rank`, in the same copy or in two copies.

    `first` and `second` are the passes in the block; they are the same pass if it is longer than the interval. `slots` are the slots
    modulo the interval that both take. `since` is the first slot in which both run.
    """

    rank: int
    first: Start
    second: Start
    slots: tuple[int, ...]
    since: int


class EarlyStart(NamedTuple):
    """A pass whose `start` comes before slot `end`, in which the pass `maker` has made its input."""

    start: Start
    maker: Op
    end: int


@takes(block=Block)
def collisions(block: Block) -> tuple[Collision, ...]:
    """Return all pairs of passes that run at the same time if `block` is repeated every `interval` slots.

    They are ordered by rank and by the slot of the second pass; empty if copies never collide, as `repeat` requires.

    >>> import zerobubble as zb
    >>> block = zb.blocks.known_block("1f1b", 2)
    >>> zb.blocks.collisions(block)
    ()
    >>> text = block.to_text().replace("1F0@1", "1F0@3")
    >>> [(one.rank, str(one.first), str(one.second), one.slots) for one in zb.blocks.collisions(zb.blocks.Block.from_text(text))]
    [(1, '1BW0@2', '1F0@3', (0,))]
    """
    return tuple(find_collisions(block))


def find_collisions(block: Block) -> Iterator[Collision]:
    """Yield the collisions one by one, for callers that only need the first."""
    for rank, row in enumerate(block.starts):
        taken: dict[int, list[Start]] = {}
        for second in row:
            length = block.length(second.op.kind)
            shared: dict[Start, list[int]] = {second: [slot % block.interval for slot in _covers(second, length - block.interval)]}
            for slot in _covers(second, min(length, block.interval)):
                others = taken.setdefault(slot % block.interval, [])
                for first in others:
                    shared.setdefault(first, []).append(slot % block.interval)
                others.append(second)
            for first, slots in shared.items():
                if slots:
                    yield Collision(rank, first, second, tuple(sorted(set(slots))), _since(block, first, second))


def _since(block: Block, first: Start, second: Start) -> int:
    """Return the first slot in which both run, if one of them is in the first copy."""
    if first is second:
        return first.slot + block.interval
    return min(slot for pair in ((first, second), (second, first)) if (slot := _first_shared_slot(block, *pair)) is not None)


def _first_shared_slot(block: Block, fixed: Start, moved: Start) -> int | None:
    """Return the first slot that pass `fixed` of the first copy shares with a copy of `moved`; None if they share none."""
    after = fixed.slot - moved.slot - block.length(moved.op.kind)
    begin = moved.slot + max(0, after // block.interval + 1) * block.interval
    return max(fixed.slot, begin) if begin < fixed.slot + block.length(fixed.op.kind) else None


def _covers(start: Start, length: int) -> range:
    return range(start.slot, start.slot + length)


@takes()
def early_starts(block: Block) -> tuple[EarlyStart, ...]:
    """Return the passes of `block` that start before their inputs are ready, with the passes that make these inputs."""
    return tuple(find_early_starts(block))


def find_early_starts(block: Block) -> Iterator[EarlyStart]:
    """Yield the early starts one by one."""
    end = {start.op: start.slot + block.length(start.op.kind) for row in block.starts for start in row}
    for row in block.starts:
        for start in row:
            for value in uses(start.op, block.placement.num_stages):
                for maker in makers(value):
                    if end.get(maker, 0) > start.slot:
                        yield EarlyStart(start, maker, end[maker])


def collision_sentence(block: Block, collision: Collision) -> str:
    """Return a sentence with the collision and its remedy."""
    every = f"copies come every {block.interval} slots"
    if collision.first is collision.second:
        length = block.length(collision.first.op.kind)
        longer = f"takes {length} slots and copies come every {block.interval}, so it collides with its own copy"
        return f"on rank {collision.rank} {collision.first} {longer}: choose an interval of at least {length}"
    both = f"both take slot {collision.slots[0]} of them; move one or choose another interval"
    return f"on rank {collision.rank} {collision.first} and {collision.second} collide: {every}, and {both}"


def early_sentence(early: EarlyStart) -> str:
    """Return a sentence with the early start and its remedy."""
    op, slot = early.start
    return f"{op} starts in slot {slot}, but {early.maker}, whose result it uses, ends in slot {early.end}: start it there or later"
