"""Every path of a microbatch through a placement, forward and back, with one gap per leg and without copies that collide."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, pairwise

from zerobubble.blocks.block import Times, lengths
from zerobubble.ir import Kind, Placement


class Paths:
    """The slots a microbatch starts its passes in, F from first to last stage, then backward from last to first.

    A leg is a run of hops in one direction over the ranks, or a single hop that stays on its rank; all hops of a leg have one gap.
    Where a leg has several, each waits up to `slack` slots beyond its pass; a single one waits for any slot of the interval. No rank
    holds more than `memory` stage activations, whole intervals counted.
    """

    def __init__(self, placement: Placement, interval: int, times: Times, backward_kind: Kind, memory: int, slack: int) -> None:
        there = placement.routes[0]
        self.interval, self.memory, self.slack = interval, memory, slack
        self._ranks = there + there[::-1]
        self._length = [lengths(times)[kind] for kind in (Kind.F, backward_kind) for _ in there]
        self._leg_lengths = _leg_lengths(self._ranks)
        self._slots: list[int] = []
        self._taken = [0] * placement.num_ranks
        self._held = [0] * placement.num_ranks

    def __iter__(self) -> Iterator[list[int]]:
        """Every path, in order of its gaps."""
        self._step(0)
        yield from self._from(0)
        self._undo_step()

    def _from(self, leg: int) -> Iterator[list[int]]:
        if leg == len(self._leg_lengths):
            yield list(self._slots)
            return
        shortest = self._length[len(self._slots) - 1]
        waits = self.slack + 1 if self._leg_lengths[leg] > 1 else self.interval
        for gap in range(shortest, shortest + waits):
            hops = 0
            while hops < self._leg_lengths[leg] and self._step(gap):
                hops += 1
            if hops == self._leg_lengths[leg]:
                yield from self._from(leg + 1)
            for _ in range(hops):
                self._undo_step()

    def _step(self, gap: int) -> bool:
        """Take the next pass `gap` slots after the last one, unless its rank has no room for it; whether it was taken."""
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
        """Take the last pass back."""
        number = len(self._slots) - 1
        slot = self._slots.pop()
        self._taken[self._ranks[number]] &= ~self._bits(number, slot)
        self._held[self._ranks[number]] -= self._holds(number, slot)

    def _bits(self, number: int, slot: int) -> int:
        return sum(1 << (part % self.interval) for part in range(slot, slot + self._length[number]))

    def _holds(self, number: int, slot: int) -> int:
        """The whole intervals from a stage's F to its backward, if this is one."""
        forward = len(self._ranks) - 1 - number
        return (slot + self._length[number] - self._slots[forward]) // self.interval if forward < number else 0


def _leg_lengths(ranks: tuple[int, ...]) -> list[int]:
    """The number of hops in each leg."""
    legs: list[int] = []
    for step, run in groupby(there - here for here, there in pairwise(ranks)):
        hops = len(list(run))
        legs += [hops] if step else [1] * hops
    return legs
