"""Finding blocks for a placement, a memory budget and times."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from heapq import nsmallest
from typing import NamedTuple

from zerobubble.blocks.block import UNIT, Block, Times
from zerobubble.blocks.layout import Layout, repeat, squeeze
from zerobubble.blocks.memory import steady_peaks
from zerobubble.blocks.paths import Paths
from zerobubble.blocks.reordering import reorder
from zerobubble.costs import Costs
from zerobubble.errors import InputError
from zerobubble.ir import Kind, Placement
from zerobubble.simulation import simulate


class FoundBlock(NamedTuple):
    """A block, the finished schedule made of it, and the longest span of a rank under the costs of the search, in ns."""

    block: Block
    layout: Layout
    span: int


def search(
    placement: Placement,
    memory: int,
    num_microbatches: int | None = None,
    *,
    times: Times = UNIT,
    split: bool = True,
    interval: int | None = None,
    slack: int | None = None,
    costs: Costs | None = None,
    tries: int = 100,
) -> tuple[FoundBlock, ...]:
    """Blocks on `placement` whose schedules hold at most `memory` stage activations on any rank, the shortest span first.

    Every path from the first stage to the last and back is looked at that has one gap per leg (see `Paths`); the gaps of F and B are
    free of each other. Those that hold most, then the shortest, become schedules of `num_microbatches` (not given: 3p), `tries` of
    them. `times` are the slots of F, B and W, or of F and BW without `split`; `interval` is a rank's work for a microbatch if not
    given; `slack` bounds how long hops within a leg wait (not given: an interval, which is too much to look at from three stages per
    rank on); `costs` judge the schedules (not given: those of `times`). Empty where no block holds so little. Raises `InputError` for
    a `memory` or `tries` below 1, or an interval shorter than the work.

    Source: after the adaptive scheduler of Pipeline Parallelism with Controllable Memory, arXiv 2405.15362, appendix A.
    """
    for name, count in (("memory", memory), ("number of tries", tries)):
        if count < 1:
            raise InputError(f"a search needs a {name} of at least 1, got {count}")
    work = placement.stages_per_rank * sum(times)
    pace = work if interval is None else interval
    if pace < work:
        raise InputError(f"a rank works {work} slots for a microbatch, which an interval of {pace} does not hold: choose at least {work}")
    paths = Paths(placement, pace, times, Kind.B if split else Kind.BW, memory, pace - 1 if slack is None else slack)
    blocks = _blocks(placement, pace, paths, split, times)
    fitting = ((block, held) for block in blocks if (held := max(steady_peaks(block))) <= memory)
    chosen = nsmallest(tries, fitting, key=lambda pair: (-pair[1], max(row[-1].slot for row in pair[0].starts)))
    repeated = ((block, squeeze(repeat(block, num_microbatches or 3 * placement.num_ranks))) for block, _ in chosen)
    found = (_judged(block, layout, memory, costs) for block, layout in repeated if max(layout.peaks) <= memory)
    return tuple(sorted(found, key=lambda one: one.span))


def _blocks(placement: Placement, interval: int, paths: Iterable[list[int]], split: bool, times: Times) -> Iterator[Block]:
    """The blocks of `paths`, without those that leave W no room."""
    for path in paths:
        with suppress(InputError):
            yield Block.of("found", placement, interval, path, split=split, times=times)


def _judged(block: Block, squeezed: Layout, memory: int, costs: Costs | None) -> FoundBlock:
    """The better of the two ways to reorder."""
    layouts = [reorder(squeezed, memory, keep_steady_phase=keep_steady_phase) for keep_steady_phase in (True, False)]
    return min((FoundBlock(block, one, simulate(one.schedule, costs or one.costs).span) for one in layouts), key=lambda found: found.span)
