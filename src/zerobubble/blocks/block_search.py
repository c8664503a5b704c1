"""Search for building blocks on a placement, given a memory limit and the times of passes, among the paths of a microbatch through it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from heapq import nsmallest
from itertools import groupby, pairwise
from typing import NamedTuple

from zerobubble.arguments import takes, wrong
from zerobubble.blocks.block import UNIT, Block, Times, lengths
from zerobubble.blocks.layout import Layout, repeat, squeeze
from zerobubble.blocks.memory import steady_peaks
from zerobubble.blocks.reordering import reorder
from zerobubble.costs import Costs
from zerobubble.errors import InputError
from zerobubble.ir import Kind, Placement
from zerobubble.simulation import simulate


class FoundBlock(NamedTuple):
    """A `block`, the `layout` of its finished schedule, and the longest `span` of a rank under the costs of the search, in ns."""

    block: Block
    layout: Layout
    span: int


@takes()
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
    """Return blocks on `placement` whose schedules hold at most `memory` stage activations on any rank, shortest span first.

    The search enumerates all paths from the first stage to the last and back with one gap per direction (see `Paths`). F and B have
    independent gaps. The search makes schedules of the `tries` blocks that use the most memory; shorter blocks come first. The result is
    empty if no block fits. Raises `InputError` for `memory` or `tries` below 1, and for an interval shorter than the work.

    Source: after the adaptive scheduler of Pipeline Parallelism with Controllable Memory, arXiv 2405.15362, appendix A.

    Arguments:
        placement: the placement of the stages.
        memory: the most stage activations on a rank.
        num_microbatches: microbatches of the schedules; 3p by default.
        times: slots of F, B and W; without `split`, a BW takes those of B and W.
        split: whether backward is split into B and W.
        interval: slots between copies; by default the work of a rank for one microbatch.
        slack: the most slots that a message waits between two ranks; by default one interval. With three or more stages per rank, give
            less, or there are too many paths.
        costs: the costs under which schedules are compared; by default `times`.
        tries: the number of blocks that are made into schedules.
    """
    for name, count in (("memory", memory), ("number of tries", tries)):
        if count < 1:
            raise wrong(f"the {name} of a search", count, "at least 1")
    work = placement.stages_per_rank * sum(times)
    interval = work if interval is None else interval
    if interval < work:
        raise wrong("the interval of a search, in slots,", interval, f"at least {work}, the work of a rank for one microbatch")
    paths = Paths(placement, interval, times, Kind.B if split else Kind.BW, memory, interval - 1 if slack is None else slack)
    blocks = _blocks(placement, interval, paths, split, times)
    fitting = ((block, held) for block in blocks if (held := max(steady_peaks(block))) <= memory)
    chosen = nsmallest(tries, fitting, key=lambda pair: (-pair[1], max(row[-1].slot for row in pair[0].starts)))
    repeated = ((block, squeeze(repeat(block, num_microbatches or 3 * placement.num_ranks))) for block, _ in chosen)
    found_blocks = (_best_layout(block, layout, memory, costs) for block, layout in repeated if max(layout.peaks) <= memory)
    return tuple(sorted(found_blocks, key=lambda block: block.span))


def _blocks(placement: Placement, interval: int, paths: Iterable[list[int]], split: bool, times: Times) -> Iterator[Block]:
    """Yield the blocks of `paths` in which every W finds a slot."""
    for path in paths:
        with suppress(InputError):
            yield Block.from_paths("found", placement, interval, path, split=split, times=times)


def _best_layout(block: Block, squeezed: Layout, memory: int, costs: Costs | None) -> FoundBlock:
    """Reorder with and without keeping the steady phase, and return the better result."""
    layouts = [reorder(squeezed, memory, keep_steady_phase=keep_steady_phase) for keep_steady_phase in (True, False)]
    timed = (FoundBlock(block, layout, simulate(layout.schedule, costs or layout.costs).span) for layout in layouts)
    return min(timed, key=lambda block: block.span)


class Paths:
    """The start slots of a microbatch's passes, F from the first to the last stage, then backward from the last to the first.

    A path consists of runs of hops in one direction over the ranks, and of single hops that stay on a rank. All hops of a run have the same
    gap. In a run of several hops each waits up to `slack` slots after its pass; a single hop waits up to an interval. Paths in which a rank
    holds more than `memory` stage activations, counting whole intervals, are pruned as soon as a pass exceeds it.
    """

    def __init__(self, placement: Placement, interval: int, times: Times, backward_kind: Kind, memory: int, slack: int) -> None:
        route = placement.routes[0]
        self.interval, self.memory, self.slack = interval, memory, slack
        self._ranks = route + route[::-1]
        self._length = [lengths(times)[kind] for kind in (Kind.F, backward_kind) for _ in route]
        self._run_lengths = _run_lengths(self._ranks)
        self._slots: list[int] = []
        self._taken = [0] * placement.num_ranks
        self._held = [0] * placement.num_ranks

    def __iter__(self) -> Iterator[list[int]]:
        """Yield every path, in order of its gaps."""
        self._step(0)
        yield from self._from(0)
        self._undo_step()

    def _from(self, run: int) -> Iterator[list[int]]:
        if run == len(self._run_lengths):
            yield list(self._slots)
            return
        shortest = self._length[len(self._slots) - 1]
        waits = self.slack + 1 if self._run_lengths[run] > 1 else self.interval
        for gap in range(shortest, shortest + waits):
            hops = 0
            while hops < self._run_lengths[run] and self._step(gap):
                hops += 1
            if hops == self._run_lengths[run]:
                yield from self._from(run + 1)
            for _ in range(hops):
                self._undo_step()

    def _step(self, gap: int) -> bool:
        """Add the next pass `gap` slots after the last one if its rank has a free slot and memory. Return whether it was added."""
        number = len(self._slots)
        slot = self._slots[-1] + gap if number else 0
        rank, bits = self._ranks[number], self._bits(number, slot)
        held = self._holds(number, slot)
        if self._taken[rank] & bits or self._held[rank] + held > self.memory:
            return False
        self._slots.append(slot)
        self._taken[rank] |= bits
        self._held[rank] += held
        return True

    def _undo_step(self) -> None:
        """Remove the last pass."""
        number = len(self._slots) - 1
        slot = self._slots.pop()
        self._taken[self._ranks[number]] &= ~self._bits(number, slot)
        self._held[self._ranks[number]] -= self._holds(number, slot)

    def _bits(self, number: int, slot: int) -> int:
        """Return the slots of an interval that a pass takes, as a bit mask."""
        return sum(1 << (part % self.interval) for part in range(slot, slot + self._length[number]))

    def _holds(self, number: int, slot: int) -> int:
        """Return the whole intervals from F of a stage to its backward, 0 if the pass is a forward."""
        forward = len(self._ranks) - 1 - number
        return (slot + self._length[number] - self._slots[forward]) // self.interval if forward < number else 0


def _run_lengths(ranks: tuple[int, ...]) -> list[int]:
    """Return the number of hops in each run."""
    lengths_of_runs: list[int] = []
    for step, run in groupby(there - here for here, there in pairwise(ranks)):
        hops = len(list(run))
        lengths_of_runs += [hops] if step else [1] * hops
    return lengths_of_runs
