"""Building blocks: schedules made by repeating the passes of one microbatch, then squeezing and reordering the result.

block = Block.from_paths("mine", Placement.vee(4), 6, path_slots(0, (3, 2), (1, 1), (3, 1), (1, 4), (3, 2), (1, 2), (3, 1)))
schedule = four_steps(block, 12).reordered.schedule
"""

from __future__ import annotations

from zerobubble.blocks.block import Block, Start, path_slots, with_weights
from zerobubble.blocks.block_search import FoundBlock, search
from zerobubble.blocks.conflicts import Collision, EarlyStart, collisions, early_starts
from zerobubble.blocks.known import KNOWN, known_block
from zerobubble.blocks.layout import Layout, repeat, squeeze
from zerobubble.blocks.memory import Lifespan, lifespans, memory_law, steady_peaks
from zerobubble.blocks.reordering import Steps, four_steps, reorder
from zerobubble.listing import listing

__all__ = [
    "KNOWN",
    "Block",
    "Collision",
    "EarlyStart",
    "FoundBlock",
    "Layout",
    "Lifespan",
    "Start",
    "Steps",
    "collisions",
    "early_starts",
    "four_steps",
    "known_block",
    "lifespans",
    "memory_law",
    "path_slots",
    "reorder",
    "repeat",
    "search",
    "squeeze",
    "steady_peaks",
    "with_weights",
]

__dir__ = listing(__all__)
