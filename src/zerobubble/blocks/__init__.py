"""Building blocks: schedules made by repeating the passes of one microbatch, then squeezing and reordering them.

block = Block.of("mine", Placement.vee(4), 6, walk(0, (3, 2), (1, 1), (3, 1), (1, 4), (3, 2), (1, 2), (3, 1)))
schedule = four_steps(block, 12).reordered.schedule
"""

from __future__ import annotations

from zerobubble.blocks.block import Block, Start, walk, with_weights
from zerobubble.blocks.known import KNOWN, known_block
from zerobubble.blocks.layout import Layout, repeat, squeeze
from zerobubble.blocks.memory import Lifespan, lifespans, memory_law, steady_peaks
from zerobubble.blocks.reorder import reorder
from zerobubble.blocks.search import Found, search
from zerobubble.blocks.steps import Steps, four_steps

__all__ = [
    "KNOWN",
    "Block",
    "Found",
    "Layout",
    "Lifespan",
    "Start",
    "Steps",
    "four_steps",
    "known_block",
    "lifespans",
    "memory_law",
    "reorder",
    "repeat",
    "search",
    "squeeze",
    "steady_peaks",
    "walk",
    "with_weights",
]
