"""The four steps from a block to a schedule."""

from __future__ import annotations

from typing import NamedTuple

from zerobubble.blocks.block import Block
from zerobubble.blocks.layout import Layout, repeat, squeeze
from zerobubble.blocks.reordering import reorder


class Steps(NamedTuple):
    """The layouts of the four steps: one copy of the block, repeated, squeezed, and reordered."""

    block: Layout
    repeated: Layout
    squeezed: Layout
    reordered: Layout

    def __repr__(self) -> str:
        return f"<Steps {self.reordered._summary()}: {', '.join(self._fields)}>"


def four_steps(block: Block, num_microbatches: int, limit: int | None = None, *, keep_steady_phase: bool = True) -> Steps:
    """Return the steps from `block` to a schedule of `num_microbatches` microbatches.

    `limit` and `keep_steady_phase` are as in `reorder`.
    """
    repeated = repeat(block, num_microbatches)
    squeezed = squeeze(repeated)
    return Steps(repeat(block, block.num_microbatches), repeated, squeezed, reorder(squeezed, limit, keep_steady_phase=keep_steady_phase))
