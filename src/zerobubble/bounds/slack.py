"""Lower bounds by slack: R's fit only into the time that work leaves, so the length of a schedule limits what they can save in memory.

Take a schedule whose objective is at most T. No rank is busy for longer than T, so its R's take at most T minus its other work. Remove
the R's, and let each forward keep all that it saves: passes F, B and W stay where they are, and at any time the rank holds more than before
by no more than what R's of that duration can save, a knapsack (`Slack.memory`). So the result is a schedule without R in that much more
memory. If no such schedule is as short as T, T is refuted. Savings grow with T, so the largest refuted T is found by bisection.

If every forward is recomputed, the quickest level counts as fixed, with its time as work. Savings are then the bytes that other levels keep
less, and their price is the time that they take more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from itertools import product
from math import floor
from typing import NamedTuple, TypeVar

from zerobubble.bounds.bound import Bound, Bounds
from zerobubble.bounds.chain import BoundedTime, RankPasses, earliest_starts, passes_by_rank, spans_of, whole_step
from zerobubble.bounds.rank_load import MOST_SUMS, undominated
from zerobubble.costs import MAX_LIMIT, Costs, Level, Limits
from zerobubble.ir import Placement
from zerobubble.units import show_ms

MOST_FORWARDS = 100
"""The knapsack over forwards and levels is solved exactly for at most this many forwards of a rank."""

Value = TypeVar("Value")

Options = tuple[tuple[int, int], ...]
"""For each level of a forward, the amount of a limited resource that it takes and its gain."""


class MicrobatchGroup(NamedTuple):
    """Microbatches of equal cost: their number, and the `costs` of one at its quickest level.

    By stage, `recompute_time` is the ns of R at that level, and `saved` and `left` are the bytes after F in full and after B. `options` are
    the additional ns and the bytes saved of each level that keeps less.
    """

    num_microbatches: int
    costs: Costs
    recompute_time: tuple[int, ...]
    saved: tuple[int, ...]
    left: tuple[int, ...]
    options: tuple[Options, ...]

    def with_option(self, stage: int, place: int, count: int) -> list[MicrobatchGroup]:
        """The group split in two: `count` of its microbatches use that option of a stage, the others exclude it."""
        time, saved = self.options[stage][place]
        kept = _with(self.costs.held_after_f, stage, self.costs.held_after_f[stage] - saved)
        having = self._replace(
            num_microbatches=count,
            costs=replace(self.costs, held_after_f=kept, held_after_b=tuple(map(min, kept, self.left))),
            recompute_time=_with(self.recompute_time, stage, self.recompute_time[stage] + time),
            options=_with(self.options, stage, ()),
        )
        options = (*self.options[stage][:place], *self.options[stage][place + 1 :])
        others = self._replace(num_microbatches=self.num_microbatches - count, options=_with(self.options, stage, options))
        return [group for group in (having, others) if group.num_microbatches]


def microbatch_groups(costs: Costs, microbatches: int, levels: Sequence[Level]) -> list[MicrobatchGroup]:
    """The microbatches in groups of equal cost, the smallest share first."""
    plain = replace(costs, further=())
    by_level = [plain.with_recompute(level) for level in levels]
    groups = []
    counts = sorted(Counter(costs.shares).items()) or [(1.0, microbatches)]
    for share, count in counts:
        at_levels = [priced.scaled(share) if costs.shares else priced for priced in by_level]
        recompute_time, kept, options = [], [], []
        for stage in range(costs.num_stages):
            ways = sorted({(priced.column("recompute")[stage], priced.column("held_input")[stage]) for priced in at_levels})
            least, most = ways[0]
            recompute_time.append(least)
            kept.append(most)
            options.append(tuple((time - least, most - held) for time, held in ways if held < most))
        first = at_levels[0]
        alone = replace(first, held_after_f=tuple(kept), held_after_b=tuple(map(min, kept, first.held_after_b)), further=())
        groups.append(MicrobatchGroup(count, alone, tuple(recompute_time), first.held_after_f, first.held_after_b, tuple(options)))
    return groups


class LeastWork(NamedTuple):
    """By rank, the least span and makespan (ns) without R. All R run between its first F and its last B, so they add to these."""

    span: tuple[int, ...]
    makespan: tuple[int, ...]


def least_work(placement: Placement, groups: Sequence[MicrobatchGroup]) -> LeastWork:
    """The least work of all ranks."""
    by_group = []
    for group in groups:
        chain = earliest_starts(placement, group.costs)
        by_group.append((chain, passes_by_rank(placement, group.num_microbatches, group.costs, None, chain)))
    chain, by_rank = by_group[0]
    works = [sum(here.load.work for here in of_groups) for of_groups in zip(*(by_rank for _, by_rank in by_group), strict=True)]
    span, makespan = list(works), [here.starts[0] + work for here, work in zip(by_rank, works, strict=True)]
    if len(groups) == 1:
        step = whole_step(chain, groups[0].costs)
        for here in by_rank:
            within = (_within(here, window) for window in spans_of(by_rank, chain, groups[0].costs))
            span[here.rank] = max([span[here.rank], *within])
            makespan[here.rank] = max(makespan[here.rank], span[here.rank], _within(here, step))
    return LeastWork(tuple(span), tuple(makespan))


def _within(here: RankPasses, window: BoundedTime) -> int:
    """The least length (ns) of the window without R: until the rank's first F, its work until its last B, and what follows."""
    end = window.ends[here.places[-1]]
    if not end or here.places[0] < window.place:
        return 0
    between = here.load.work - here.load.after[-1] - here.load.pass_times[-1]
    return here.starts[0] - window.start + max(0, between) + end - here.starts[-1]


def recompute_times(placement: Placement, groups: Sequence[MicrobatchGroup]) -> list[int]:
    """By rank, the ns of R at the quickest levels."""
    times = [[group.num_microbatches * time for time in group.recompute_time] for group in groups]
    return placement.rank_sums(list(map(sum, zip(*times, strict=True))))


class Savings(NamedTuple):
    """The most that the R's of a rank can save.

    `forwards` has the number of forwards with each set of options (ns and bytes), and `most` the most bytes saved at once.
    """

    forwards: tuple[tuple[int, Options], ...]
    most: int

    def within(self, time: int) -> int:
        """The most bytes saved at once if additional R's take at most this many ns."""
        return min(self.most, knapsack(max(0, time), self.forwards))


def rank_savings(placement: Placement, limits: Limits, groups: Sequence[MicrobatchGroup]) -> list[Savings]:
    """The savings of all ranks."""
    forwards: list[list[tuple[int, Options]]] = [[] for _ in limits.memory]
    held: list[list[tuple[int, int, Options]]] = [[] for _ in limits.memory]
    for group in groups:
        for stage, rank in enumerate(placement.routes[0]):
            options, kept = group.options[stage], group.costs.held_after_f[stage]
            forwards[rank].append((group.num_microbatches, options))
            held[rank].append((group.num_microbatches, group.saved[stage], tuple((kept - saved, saved) for _, saved in options)))
    ranks = zip(forwards, limits.memory, held, strict=True)
    return [Savings(tuple(rank_forwards), _most_at_once(limit, here)) for rank_forwards, limit, here in ranks]


def _most_at_once(limit: int, held: Sequence[tuple[int, int, Options]]) -> int:
    """The most bytes that forwards can save at once.

    When the first of their B runs, its forward is held in full, and all others are still held.

    `held` are, by stage, the number of forwards, the bytes of one in full, and its options as bytes kept and saved.
    """
    forwards = tuple((count, options) for count, _, options in held)
    firsts = ((full, max((saved for _, saved in options), default=0)) for _, full, options in held if full <= limit)
    return max((saved + knapsack(limit - full, forwards) for full, saved in firsts), default=0)


class Slack:
    """The memory in which schedules of some length fit without R, except for the R's of the quickest levels."""

    def __init__(self, placement: Placement, limits: Limits, groups: Sequence[MicrobatchGroup]) -> None:
        self.limits, self.savings = limits, rank_savings(placement, limits, groups)
        recompute_time = recompute_times(placement, groups)
        self.span, self.makespan = (list(map(sum, zip(work, recompute_time, strict=True))) for work in least_work(placement, groups))

    def memory(self, taken: Sequence[int], time: int) -> Limits:
        """That memory for a schedule of at most `time` ns, if each rank needs `taken` ns for other work: `span` or `makespan`."""
        saved = (savings.within(time - need) for need, savings in zip(taken, self.savings, strict=True))
        return Limits(tuple(min(sum(both), MAX_LIMIT) for both in zip(self.limits.memory, saved, strict=True)))


def bounds_from_slack(slack: Slack, bounds: Bounds, without: Callable[[Limits], Bounds], unit: int, tries: int) -> Bounds:
    """The bounds by slack if they exceed `bounds`. `without` bounds schedules without R, in multiples of `unit` ns.

    Each try calls `without`. With few tries, the bounds are weaker but still valid.
    """
    by_memory: dict[Limits, Bounds] = {}

    def sharper(least: Bound, taken: Sequence[int], which: int) -> Bound:
        def bound_within(time: int) -> Bound:
            memory = slack.memory(taken, time)
            if memory not in by_memory:
                by_memory[memory] = without(memory)
            return by_memory[memory][which]

        low, best = least.time, bound_within(least.time)
        if best.time <= low:
            return least
        high = best.time
        for _ in range(tries):
            if high - low <= unit:
                break
            middle = low + max(1, (high - low) // unit // 2) * unit
            bound = bound_within(middle)
            low, high, best = (middle, high, bound) if bound.time > middle else (low, middle, best)
        why = f"in {show_ms(low)} there is no time for R that saves enough memory; with what there is: {best.reason}"
        return Bound(min(-(-(low + 1) // unit) * unit, best.time), why)

    span = sharper(bounds.span, slack.span, 0)
    makespan = sharper(bounds.makespan, slack.makespan, 1)
    return Bounds(span, max(makespan, span, key=lambda bound: bound.time))


def _with(column: tuple[Value, ...], stage: int, value: Value) -> tuple[Value, ...]:
    """Returns the column with one stage's value replaced."""
    return tuple(value if here == stage else entry for here, entry in enumerate(column))


@lru_cache(maxsize=4096)
def knapsack(limit: int, forwards: tuple[tuple[int, Options], ...]) -> int:
    """The most that forwards gain within a limit; exact for few forwards, otherwise an upper bound by LP duality.

    For each stage, `forwards` has their number and their options: the amount taken and gained. Each forward uses at most one option.
    """
    if sum(count for count, _ in forwards) <= MOST_FORWARDS:
        sums = [(0, 0)]
        for options in (options for count, options in forwards for _ in range(count)):
            sums = undominated([*sums, *((held + more, won + gain) for held, won in sums for more, gain in options)], limit)
            if len(sums) > MOST_SUMS:
                break
        else:
            return sums[-1][1]
    prices = {Fraction(0)}
    for _, options in forwards:
        for (held, won), (less, other) in product(options, [(0, 0), *options]):
            if held > less and won > other:
                prices.add(Fraction(won - other, held - less))
    return floor(min(price * limit + sum(count * _profit(options, price) for count, options in forwards) for price in prices))


def _profit(options: Options, price: Fraction) -> Fraction:
    """The gain of a forward at its best level, minus the price of the amount it takes."""
    return max([Fraction(0), *(won - price * held for held, won in options)])
