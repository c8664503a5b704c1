"""What memory lets one rank do: how much work before the first of its passes of a kind, how much after the last.

A rank goes through its passes of a microbatch in the order F of its first stage to F of its last, B of its last to B of its first: with
v stages these are its visits 0 to 2v-1. While a stage has had its F and not its B, so have all the rank's stages before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import accumulate
from math import floor
from typing import NamedTuple

MOST_EXACT = 24
"""Microbatches times stages of a rank up to which the most work is found exactly, not by bounds on it."""

MOST_SUMS = 100
"""Different sums of bytes and work that are followed, beyond which bounds are taken."""


class MicrobatchState(NamedTuple):
    """How far a microbatch may have come on a rank: bytes and number of the stages that wait for B, and a time of work that goes with it.

    W of the stages from number `waiting` on may be pending besides.
    """

    held: int
    stages: int
    work: int
    waiting: int


@dataclass(frozen=True)
class RankLoad:
    """What one rank has to do: times (ns) and bytes of its stages in the order of their F, the microbatches, and its memory limit.

    `saved` is held from F until B, `pending` from B until W.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    weight: tuple[int, ...]
    saved: tuple[int, ...]
    pending: tuple[int, ...]
    microbatches: int
    limit: int

    @property
    def num_stages(self) -> int:
        return len(self.forward)

    @cached_property
    def pass_times(self) -> tuple[int, ...]:
        """The ns of the pass at each visit."""
        return self.forward + self.backward[::-1]

    @cached_property
    def work(self) -> int:
        """The time of all passes."""
        return self.microbatches * (sum(self.pass_times) + sum(self.weight))

    @cached_property
    def forwards(self) -> tuple[int, ...]:
        """The time of F of the first so many stages."""
        return (0, *accumulate(self.forward))

    @cached_property
    def backwards(self) -> tuple[int, ...]:
        """The time of B and W of the first so many stages."""
        return (0, *accumulate(b + w for b, w in zip(self.backward, self.weight, strict=True)))

    @cached_property
    def held(self) -> tuple[int, ...]:
        """The bytes that the first so many stages of a microbatch save."""
        return (0, *accumulate(self.saved))

    def open(self, visit: int) -> int:
        """How many stages of a microbatch wait for B after so many visits."""
        return min(visit, 2 * self.num_stages - visit)

    def during(self, visit: int) -> int:
        """The bytes that a microbatch saves while the pass of this visit runs."""
        return self.held[max(self.open(visit), self.open(visit + 1))]

    def done(self, visit: int) -> MicrobatchState:
        """A microbatch after so many visits, its W included, and the ns of work that took."""
        left, everything = self.open(visit), self.backwards[-1]
        work = self.forwards[visit] if visit <= self.num_stages else self.forwards[-1] + everything - self.backwards[left]
        return MicrobatchState(self.held[left], left, work, self.num_stages)

    def left(self, visit: int) -> MicrobatchState:
        """A microbatch after so many visits, and the ns of work that remain, without W of the stages that have had their B."""
        stages = self.open(visit)
        if visit < self.num_stages:
            return MicrobatchState(
                self.held[stages], stages, self.forwards[-1] - self.forwards[visit] + self.backwards[-1], self.num_stages
            )
        return MicrobatchState(self.held[stages], stages, self.backwards[stages], stages)

    @cached_property
    def before(self) -> tuple[int, ...]:
        """For each visit, the most ns of work before any microbatch makes it."""
        return tuple(map(self._before, range(2 * self.num_stages)))

    def _before(self, visit: int) -> int:
        others = [self.done(n) for n in range(visit + 1)]
        return self.done(visit).work + self._most(others, self.limit - self.during(visit), ())

    @cached_property
    def after(self) -> tuple[int, ...]:
        """For each visit, the most ns of work once the last microbatch begins it, itself not counted."""
        return tuple(map(self._after, range(2 * self.num_stages)))

    def _after(self, visit: int) -> int:
        own, others = self.left(visit), [self.left(n) for n in range(visit + 1, 2 * self.num_stages + 1)]
        return own.work - self.pass_times[visit] + self._most(others, self.limit - self.during(visit), range(own.waiting, self.num_stages))

    def _most(self, states: Sequence[MicrobatchState], room: int, waiting: Iterable[int]) -> int:
        """The most work of all microbatches but one, each in one of `states`, in `room` bytes, and of W of `waiting` of that one."""
        extra = tuple(waiting)
        if (exact := self._exactly(states, room, extra)) is not None:
            return exact
        prices = [(0, 1), *((state.work, state.held) for state in states)]
        for stage, (saved, pending) in enumerate(zip(self.saved, self.pending, strict=True)):
            prices += [(self.weight[stage], pending), (self.backward[stage], saved - pending)]
        by_price = min(self._at_price(*price, states, room, extra) for price in prices if price[1])
        return by_price if room >= (self.microbatches - 1) * self.held[-1] else min(by_price, self._by_number(states, room, len(extra)))

    def _exactly(self, states: Sequence[MicrobatchState], room: int, extra: Sequence[int]) -> int | None:
        """`_most` itself: all sums of bytes and work, microbatch after microbatch, that are worth it; None where these are too many."""
        if self.microbatches * self.num_stages > MOST_EXACT:
            return None
        one = [(state.held, state.work, range(state.waiting, self.num_stages)) for state in states]
        choices = worth([sums for held, work, stages in one for sums in self._with_weights([(held, work)], stages, room)], room)
        known = self._with_weights([(0, 0)], extra, room)
        for _ in range(self.microbatches - 1):
            further = worth([(held + more, work + gain) for held, work in known for more, gain in choices], room)
            if further == known:
                break
            if len(known := further) > MOST_SUMS:
                return None
        return known[-1][1]

    def _with_weights(self, sums: list[tuple[int, int]], stages: Iterable[int], room: int) -> list[tuple[int, int]]:
        """Bytes and work with W of any of these stages pending besides."""
        for stage in stages:
            sums = worth([*sums, *((held + self.pending[stage], work + self.weight[stage]) for held, work in sums)], room)
        return sums

    def _at_price(self, work: int, held: int, states: Sequence[MicrobatchState], room: int, extra: Iterable[int]) -> int:
        """A bound on `_most`: fill the room at this price, and take what is worth more than its bytes for nothing (LP duality)."""
        gains = [max(0, self.weight[s] * held - self.pending[s] * work) for s in range(self.num_stages)]
        best = max(state.work * held - state.held * work + sum(gains[state.waiting :]) for state in states)
        return (room * work + (self.microbatches - 1) * best + sum(gains[s] for s in extra)) // held

    def _by_number(self, states: Sequence[MicrobatchState], room: int, extra: int) -> int:
        """A bound on `_most` by whole numbers: stages that wait for B and for W, each as small and as long as the rank has them."""
        others = self.microbatches - 1
        saved, pending = min(self.saved), min(self.pending)
        weight = max((w for state in states for w in self.weight[state.waiting :]), default=0)
        rate = max((Fraction(state.work, state.stages) for state in states if state.stages), default=Fraction(0))
        top, places = others * max(state.work for state in states), others * self.num_stages
        most = min(places, room // saved) if saved else places
        best = 0
        for count in range(most, -1, -1) if rate * pending >= weight * saved else range(most + 1):
            if best >= count * rate + weight * Fraction(room - count * saved, pending or 1) and pending:
                break
            free = places + extra - count
            waiting = min(free, (room - count * saved) // pending) if pending else free
            best = max(best, min(floor(count * rate), top) + waiting * weight)
        return best

    @cached_property
    def in_order(self) -> tuple[tuple[bool, ...], ...]:
        """`in_order[first][last]`: in any order that fits, some microbatch makes visit `first` before the last one makes `last`."""
        visits = range(2 * self.num_stages)
        return tuple(tuple(first <= last or self._crowded(last + 1, first + 1) for last in visits) for first in visits)

    def _crowded(self, begin: int, end: int) -> bool:
        """Whether not all microbatches fit when each has made from `begin` to `end` - 1 visits."""
        return self.microbatches * min(self.held[self.open(n)] for n in range(begin, end)) > self.limit


def worth(sums: list[tuple[int, int]], room: int) -> list[tuple[int, int]]:
    """Of sums of bytes and work those within the room of which none with less bytes has as much work, in order."""
    kept: list[tuple[int, int]] = []
    for held, work in sorted(sums, key=lambda one: (one[0], -one[1])):
        if held <= room and (not kept or work > kept[-1][1]):
            kept.append((held, work))
    return kept
