"""Enumeration of the paths of a microbatch through a placement, with one gap per direction and without colliding copies."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, pairwise

from zerobubble.blocks.block import Times, lengths
from zerobubble.ir import Kind, Placement


class Paths:
    """The start slots of a microbatch's passes, F from the first to the last stage, then backward from the last to the first.

    A path consists of runs of hops in one direction over the ranks, and of single hops that stay on a rank. All hops of a run have the same
    gap. In a run of several hops each waits up to `slack` slots after its pass; a single hop waits up to an interval. Paths in which a rank
    holds more than `memory` stage activations, counting whole intervals, are pruned as soon as a pass exceeds it.
    """

    def __init__(self, placement: Placement, interval: int, times: Times, backward_kind: Kind, memory: int, slack: int) -> None:
        there = placement.routes[0]
        self.interval, self.memory, self.slack = interval, memory, slack
        self._ranks = there + there[::-1]
        self._length = [lengths(times)[kind] for kind in (Kind.F, backward_kind) for _ in there]
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
