"""Upper bounds on the work of one rank, given its memory: before the first microbatch begins a visit, and after the last one begins it.

A rank runs its passes of a microbatch in the order F of its first stage to F of its last, B of its last to B of its first. With v stages,
these are its visits 0 to 2v-1. While a microbatch waits for B of a stage, it also waits for B of all the rank's earlier stages.

The most work that the other microbatches can do in the remaining bytes is a knapsack problem. It is solved exactly if it is small.
Otherwise, it is bounded from above by LP duality and by counting stages, and the smaller bound is used.
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
"""The knapsack is solved exactly if the microbatches times the stages of a rank are at most this."""

MOST_SUMS = 100
"""Maximum number of pairs of bytes and work that the exact solution keeps; with more, bounds are used."""


class MicrobatchState(NamedTuple):
    """The progress of a microbatch on a rank: the bytes `held` for the `stages` that wait for B, and the `work` done or left, in ns.

    In addition, W may be pending in stages `first_pending` and later.
    """

    held: int
    stages: int
    work: int
    first_pending: int


@dataclass(frozen=True)
class RankLoad:
    """The work of one rank: times (ns) and bytes of its stages in the order of their F, the microbatches, and its memory limit.

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
        """The ns of all passes of all microbatches."""
        return self.microbatches * (sum(self.pass_times) + sum(self.weight))

    @cached_property
    def forwards(self) -> tuple[int, ...]:
        """The ns of F of the first n stages, for each n."""
        return (0, *accumulate(self.forward))

    @cached_property
    def backwards(self) -> tuple[int, ...]:
        """The ns of B and W of the first n stages, for each n."""
        return (0, *accumulate(b + w for b, w in zip(self.backward, self.weight, strict=True)))

    @cached_property
    def held(self) -> tuple[int, ...]:
        """The bytes that the first n stages of a microbatch save, for each n."""
        return (0, *accumulate(self.saved))

    def stages_in_flight(self, visit: int) -> int:
        """Returns the number of stages of a microbatch that still need their B after this many visits."""
        return min(visit, 2 * self.num_stages - visit)

    def held_during(self, visit: int) -> int:
        """Returns the bytes that a microbatch holds while the pass of this visit runs."""
        return self.held[max(self.stages_in_flight(visit), self.stages_in_flight(visit + 1))]

    def done(self, visit: int) -> MicrobatchState:
        """Returns a microbatch after this many visits, with the work done so far, including every W that can be done."""
        left, everything = self.stages_in_flight(visit), self.backwards[-1]
        work = self.forwards[visit] if visit <= self.num_stages else self.forwards[-1] + everything - self.backwards[left]
        return MicrobatchState(self.held[left], left, work, self.num_stages)

    def left(self, visit: int) -> MicrobatchState:
        """Returns a microbatch after this many visits, with the work left, not counting W of stages whose B is done."""
        stages = self.stages_in_flight(visit)
        if visit < self.num_stages:
            return MicrobatchState(
                self.held[stages], stages, self.forwards[-1] - self.forwards[visit] + self.backwards[-1], self.num_stages
            )
        return MicrobatchState(self.held[stages], stages, self.backwards[stages], stages)

    @cached_property
    def before(self) -> tuple[int, ...]:
        """For each visit, the most work (ns) that the rank can do before the first microbatch begins that visit."""
        return tuple(map(self._before, range(2 * self.num_stages)))

    def _before(self, visit: int) -> int:
        others = [self.done(n) for n in range(visit + 1)]
        return self.done(visit).work + self._most(others, self.limit - self.held_during(visit), ())

    @cached_property
    def after(self) -> tuple[int, ...]:
        """For each visit, the most work (ns) that can be left when the last microbatch begins it, not counting that pass."""
        return tuple(map(self._after, range(2 * self.num_stages)))

    def _after(self, visit: int) -> int:
        state, others = self.left(visit), [self.left(n) for n in range(visit + 1, 2 * self.num_stages + 1)]
        return (
            state.work
            - self.pass_times[visit]
            + self._most(others, self.limit - self.held_during(visit), range(state.first_pending, self.num_stages))
        )

    def _most(self, states: Sequence[MicrobatchState], headroom: int, own_weights: Sequence[int]) -> int:
        """Returns the most work that fits in `headroom` bytes: that of all microbatches but one, each of them in one of `states`.

        W of the stages `own_weights` of the remaining microbatch may use these bytes, too, and then counts.
        """
        if (exact := self._exact_most(states, headroom, own_weights)) is not None:
            return exact
        prices = [(0, 1), *((state.work, state.held) for state in states)]
        for stage, (saved, pending) in enumerate(zip(self.saved, self.pending, strict=True)):
            prices += [(self.weight[stage], pending), (self.backward[stage], saved - pending)]
        by_price = min(self.dual_bound(*price, states, headroom, own_weights) for price in prices if price[1])
        return (
            by_price
            if headroom >= (self.microbatches - 1) * self.held[-1]
            else min(by_price, self._count_bound(states, headroom, len(own_weights)))
        )

    def _exact_most(self, states: Sequence[MicrobatchState], headroom: int, own_weights: Sequence[int]) -> int | None:
        """Computes `_most` exactly by dynamic programming over undominated sums; None if there are too many."""
        if self.microbatches * self.num_stages > MOST_EXACT:
            return None
        stages = range(self.num_stages)
        by_state = [self._with_weights([(state.held, state.work)], stages[state.first_pending :], headroom) for state in states]
        choices = undominated([pair for pairs in by_state for pair in pairs], headroom)
        sums = self._with_weights([(0, 0)], own_weights, headroom)
        for _ in range(self.microbatches - 1):
            further = undominated([(held + more, work + gain) for held, work in sums for more, gain in choices], headroom)
            if further == sums:
                break
            if len(sums := further) > MOST_SUMS:
                return None
        return sums[-1][1]

    def _with_weights(self, sums: list[tuple[int, int]], stages: Iterable[int], headroom: int) -> list[tuple[int, int]]:
        """Returns the pairs of bytes and work, with and without the pending W of each of these stages."""
        for stage in stages:
            sums = undominated([*sums, *((held + self.pending[stage], work + self.weight[stage]) for held, work in sums)], headroom)
        return sums

    def dual_bound(self, work: int, held: int, states: Sequence[MicrobatchState], headroom: int, own_weights: Sequence[int]) -> int:
        """Computes an upper bound on `_most` by LP duality: the price of all bytes at `work` ns per `held` bytes, plus all profits."""
        gains = [max(0, self.weight[s] * held - self.pending[s] * work) for s in range(self.num_stages)]
        best = max(state.work * held - state.held * work + sum(gains[state.first_pending :]) for state in states)
        return (headroom * work + (self.microbatches - 1) * best + sum(gains[s] for s in own_weights)) // held

    def _count_bound(self, states: Sequence[MicrobatchState], headroom: int, own_weights: int) -> int:
        """Computes an upper bound on `_most` by counting stages that wait for B and for W, each with the least bytes and the most work."""
        others = self.microbatches - 1
        saved, pending = min(self.saved), min(self.pending)
        weight = max((w for state in states for w in self.weight[state.first_pending :]), default=0)
        rate = max((Fraction(state.work, state.stages) for state in states if state.stages), default=Fraction(0))
        top, places = others * max(state.work for state in states), others * self.num_stages
        most = min(places, headroom // saved) if saved else places
        best = 0
        # In this order, the bound on a count never rises: once it is at most `best`, no later count can beat that.
        for count in range(most, -1, -1) if rate * pending >= weight * saved else range(most + 1):
            if pending and best >= count * rate + weight * Fraction(headroom - count * saved, pending):
                break
            free = places + own_weights - count
            weights = min(free, (headroom - count * saved) // pending) if pending else free
            best = max(best, min(floor(count * rate), top) + weights * weight)
        return best

    @cached_property
    def in_order(self) -> tuple[tuple[bool, ...], ...]:
        """`in_order[first][last]`: in any order that fits, some microbatch makes visit `first` before the last one makes `last`."""
        visits = range(2 * self.num_stages)
        return tuple(tuple(first <= last or self._crowded(last + 1, first + 1) for last in visits) for first in visits)

    def _crowded(self, begin: int, end: int) -> bool:
        """Returns whether memory is too small for all microbatches if each has made between `begin` and `end` - 1 visits."""
        return self.microbatches * min(self.held[self.stages_in_flight(n)] for n in range(begin, end)) > self.limit


def undominated(sums: list[tuple[int, int]], headroom: int) -> list[tuple[int, int]]:
    """Returns the pairs of bytes and work within `headroom`, sorted, without pairs that another one beats in both."""
    kept: list[tuple[int, int]] = []
    for held, work in sorted(sums):
        if held > headroom:
            break
        if not kept or work > kept[-1][1]:
            if kept and kept[-1][0] == held:
                kept.pop()
            kept.append((held, work))
    return kept
