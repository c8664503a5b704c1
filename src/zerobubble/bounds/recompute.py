"""Lower bounds with recomputation, which hold for every choice of levels, by stage and microbatch.

For any choice, F keeps at least the bytes of the level with the least memory, and no pass takes less time. So every bound for stages that
keep only these bytes holds. Two more inequalities for each rank are linear in the share of microbatches that have each level: recomputing
costs time, and not recomputing fills memory over time. The least span that satisfies both follows by duality: any convex combination of the
two, with each stage at its best level, is a bound.

Before the first B of a rank, more forwards fit in memory if they keep little, but each of them leaves an R for later. So such a forward
gains only its own time minus that of its R. The forward of the first B itself gains its full time, because by then it is held in full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache, lru_cache, partial
from itertools import combinations
from math import ceil, gcd
from typing import NamedTuple

from zerobubble.arguments import takes
from zerobubble.bounds.bound import Bound, Bounds, strongest
from zerobubble.bounds.certificate import WORK, bounds_with_delay, bounds_with_shares, check_parts, shortage_text
from zerobubble.bounds.chain import earliest_starts, passes_by_rank, spans_of, whole_step
from zerobubble.bounds.memory import unused_memory
from zerobubble.bounds.overlap import remark_on_savings, saves_time, without_fused, without_savings
from zerobubble.bounds.rank_load import RankLoad
from zerobubble.bounds.reasons import first_backward_reason
from zerobubble.bounds.slack import Slack, bounds_from_slack, knapsack, microbatch_groups
from zerobubble.bounds.sums import with_sums
from zerobubble.costs import Costs, Level, Limits
from zerobubble.ir import Kind, Op, Placement
from zerobubble.units import show_ms

TRIES_BY_PASSES = ((300, 14), (20_000, 6), (100_000, 2))
"""Pairs (most passes, tries): in a problem of at most this many passes, the slack bound bisects the length of a schedule in this many
tries. In larger problems it is skipped, because a try takes too long."""


RecomputeClaim = tuple[bool, int, Callable[[], str]]
"""A lower bound in ns, with whether it bounds the span as well as the makespan, and the function that gives its reason."""


class Price(NamedTuple):
    """The least that a level costs the rank of a stage per microbatch: ns of R, and byte-ns of memory."""

    time: int
    memory: int


@takes()
def bounds_with_recompute(
    placement: Placement, num_microbatches: int, costs: Costs, limits: Limits, levels: Sequence[Level], is_quick: bool = False
) -> Bounds:
    """Computes lower bounds for schedules of `num_microbatches` on `placement` in which each forward has one of `levels`.

    `costs` are those without recomputation. The memory `limits` are ignored if a rank cannot hold even one microbatch. A level that keeps
    everything and takes no time stands for a forward that is not recomputed. `is_quick` leaves out the slack bound, which takes most of the
    time.

    >>> import zerobubble as zb
    >>> costs, limits = zb.Costs.uniform(2, times=(10, 10, 10)), zb.Limits((1_100_000,) * 2)
    >>> for levels in ([zb.costs.NONE], [zb.costs.NONE, zb.costs.FULL]):
    ...     print(bounds_with_recompute(zb.Placement.linear(2), 8, costs, limits, levels).span.time / 1e6)
    400.0
    286.308725
    """
    check_parts(placement, costs, limits)
    plain = replace(without_fused(costs), further=())
    if saves_time(costs):
        by_level = zip(*(without_savings(placement, plain.with_recompute(level)) for level in levels), strict=True)
        shorter = zip(without_savings(placement, plain), by_level, strict=True)
        alone = [_bounds_by_level(placement, num_microbatches, unsaved, limits, at_levels, is_quick) for unsaved, at_levels in shorter]
        passes = strongest(alone).with_remark(remark_on_savings(costs))
    else:
        by_level_of_plain = [plain.with_recompute(level) for level in levels]
        passes = _bounds_by_level(placement, num_microbatches, plain, limits, by_level_of_plain, is_quick)
    return with_sums(passes, placement, num_microbatches, costs)


def _bounds_by_level(
    placement: Placement, num_microbatches: int, plain: Costs, limits: Limits, by_level: Sequence[Costs], is_quick: bool
) -> Bounds:
    """`bounds_with_recompute` for one set of costs: `plain` has no recomputation, `by_level` has the recompute columns of each level."""
    if not plain.shares:
        return _bounds(placement, num_microbatches, plain, limits, tuple(map(_level_in, by_level)), is_quick)
    least = list(map(min, *(costs.column("recompute") for costs in by_level), by_level[0].column("recompute")))
    worked = plain.with_columns(recompute=least, held_input=[0] * plain.num_stages)

    def bounds_of_equal(count: int, share: float) -> Bounds:
        levels = tuple(_level_in(costs.scaled(share)) for costs in by_level)
        return _bounds(placement, count, plain.scaled(share), limits, levels, is_quick)

    return bounds_with_shares(placement, worked, (*WORK, Kind.R), bounds_of_equal)


def _level_in(costs: Costs) -> Level:
    """The level that the recompute columns of `costs` describe, to the ns and byte."""
    return costs.with_level("of columns", costs.column("recompute"), costs.column("held_input")).levels[0]


@lru_cache(maxsize=64)
def _bounds(placement: Placement, num_microbatches: int, costs: Costs, limits: Limits, levels: tuple[Level, ...], is_quick: bool) -> Bounds:
    """The bounds, cached for plans that differ only in the levels of their stages."""
    fits = not shortage_with_recompute(placement, costs, limits, [levels] * placement.num_stages)
    kept = tuple(round(min(level.kept_in(stage) for level in levels) * held) for stage, held in enumerate(costs.held_after_f))
    pending = tuple(map(min, kept, costs.held_after_b))
    reduced = replace(costs, held_after_f=kept, held_after_b=pending)
    memory = limits if fits else None
    span, makespan = bounds_with_delay(placement, num_microbatches, reduced, memory, 0)
    problem = (placement, num_microbatches, costs, memory, levels)
    for is_span, time, why in [*_work_and_memory(*problem), *_before_first_backward(*problem)]:
        if is_span and time > span.time:
            span = Bound(time, why())
        if time > makespan.time:
            makespan = Bound(time, why())
    bounds = Bounds(span, makespan)
    passes = 3 * placement.num_stages * num_microbatches
    tries = next((tries for most, tries in TRIES_BY_PASSES if passes <= most), 0)
    if not fits or not tries or is_quick:
        return bounds
    groups = microbatch_groups(costs, num_microbatches, levels)
    slack = Slack(placement, limits, groups)
    without = partial(bounds_with_delay, placement, num_microbatches, groups[0].costs, delay=0)
    return bounds_from_slack(slack, bounds, without, _unit(costs, levels), tries)


def _unit(costs: Costs, levels: Sequence[Level]) -> int:
    """The greatest number of ns that divides the times of all passes and messages."""
    columns = [costs.with_recompute(level).column("recompute") for level in levels]
    return gcd(*costs.forward, *costs.backward, *costs.weight, *costs.comm, *(time for column in columns for time in column)) or 1


@takes()
def shortage_with_recompute(
    placement: Placement, costs: Costs, limits: Limits, levels: Sequence[Sequence[Level]], sizes: Sequence[int] = ()
) -> str:
    """Names the ranks of `placement` whose `limits` cannot hold one microbatch if each stage has one of its `levels`; empty if one fits.

    `costs` are those without recomputation. While a B runs, its stage holds all that its forward saves, and the earlier stages of its rank
    hold the bytes that their levels keep. Of microbatches of unequal cost the largest counts. With `sizes`, the bytes of a microbatch on
    each rank, figures are in microbatches.
    """
    which = "the largest" if costs.shares else "one"
    costs = costs.scaled(max(costs.shares)) if costs.shares else costs
    kept, needed = [0] * placement.num_ranks, [0] * placement.num_ranks
    for stage, rank in enumerate(placement.routes[0]):
        saved = costs.held_after_f[stage]
        needed[rank] = max(needed[rank], kept[rank] + saved)
        kept[rank] += min(round(level.kept_in(stage) * saved) for level in levels[stage])
    return shortage_text(needed, limits.memory, sizes, which)


def _work_and_memory(
    placement: Placement, microbatches: int, costs: Costs, limits: Limits | None, levels: Sequence[Level]
) -> Iterator[RecomputeClaim]:
    """Yields the bounds that follow from the work of each rank and the memory that it holds over time, for any choice of R."""
    starts = earliest_starts(placement, costs)
    least = cache(_least_span)
    for rank in range(placement.num_ranks):
        stages = [stage for stage, home in enumerate(placement.routes[0]) if home == rank]
        prices = tuple(tuple(_price(starts, costs, stage, level) for level in levels) for stage in stages)
        columns = (costs.forward, costs.backward, costs.weight, costs.held_after_f)
        of_stages = [tuple(column[stage] for stage in stages) for column in columns]
        pending = tuple(min(costs.held_after_f[stage], costs.held_after_b[stage]) for stage in stages)
        everything = sum(of_stages[-1]) * microbatches
        limit = everything if limits is None else min(limits.memory[rank], everything)
        load = RankLoad(of_stages[0], of_stages[1], of_stages[2], of_stages[3], pending, microbatches, limit)
        begin, time = min(starts[Op(Kind.F, stage, 0)] for stage in stages), least(load, prices)
        reason = partial(_reason, rank, time, load.work)
        yield True, time, partial(reason, 0)
        yield False, begin + time, partial(reason, begin)


def _before_first_backward(
    placement: Placement, microbatches: int, costs: Costs, limits: Limits | None, levels: Sequence[Level]
) -> Iterator[RecomputeClaim]:
    """Yields lower bounds that follow from the work that a rank can do before its first B."""
    chain = earliest_starts(placement, costs)
    by_rank = passes_by_rank(placement, microbatches, costs, limits, chain)
    most = []
    for here in by_rank:
        stages, limit = [op.stage for op in here.passes if op.kind is Kind.F], limits.memory[here.rank] if limits else None
        most.append(_most_before(costs, stages, limit, microbatches, levels))
    for window in [*spans_of(by_rank, chain, costs), whole_step(chain, costs)]:
        for here in by_rank:
            load, first = here.load, here.load.num_stages
            if (end := window.ends[here.places[-1]]) and here.places[first] >= window.place:
                head, tail = here.starts[first] - window.start, end - here.starts[-1]
                # Every R runs before the last B of the rank begins; only W's follow that.
                between = load.work - most[here.rank] - load.after[-1] - load.pass_times[-1]
                time = head + max(0, between) + tail
                yield window.rank is not None, time, partial(first_backward_reason, here, window, most[here.rank])


def _most_before(costs: Costs, stages: Sequence[int], limit: int | None, microbatches: int, levels: Sequence[Level]) -> int:
    """The most work (ns) of a rank before its first B, net of the R's that it leaves for later.

    `limit` is the rank's memory in bytes, None for no limit. The first B is of the last of `stages`, whose forward is held in full.
    """
    columns = [(stage, costs.forward[stage], costs.held_after_f[stage]) for stage in stages]
    # A forward whose R is also done before the first B holds everything and leaves nothing for later.
    options = [
        [(saved, time), *((round(level.kept_in(stage) * saved), time - round(level.extra_in(stage) * time)) for level in levels)]
        for stage, time, saved in columns
    ]
    needed, first = options[-1][0]
    others = tuple((microbatches - (ways is options[-1]), tuple(ways)) for ways in options)
    if limit is None:
        return first + sum(count * max(won for _, won in ways) for count, ways in others)
    return first + knapsack(limit - needed, others)


def _price(starts: dict[Op, int], costs: Costs, stage: int, level: Level) -> Price:
    """Returns the least cost of a level: a microbatch stays as long as if it were alone, and is held in full from the start of its R."""
    saved, forward, backward = costs.held_after_f[stage], costs.forward[stage], costs.backward[stage]
    pending = min(saved, costs.held_after_b[stage]) * costs.weight[stage]
    stay = starts[Op(Kind.B, stage, 0)] + backward - starts[Op(Kind.F, stage, 0)]
    kept, recompute_time = round(level.kept_in(stage) * saved), round(level.extra_in(stage) * forward)
    if kept == saved:
        return Price(recompute_time, saved * stay + pending)
    full = recompute_time + backward
    return Price(recompute_time, kept * max(stay - full, forward) + saved * full + pending)


def _least_span(load: RankLoad, prices: tuple[tuple[Price, ...], ...]) -> int:
    """The least ns of a rank whose stages have levels at these prices: the best convex combination of the two inequalities."""
    if not load.limit:
        return load.work
    unused = unused_memory(load)
    weights = {Fraction(0), Fraction(1)}
    for of_stage in prices:
        for first, second in combinations(of_stage, 2):
            slower, saved_memory = first.time - second.time, Fraction(second.memory - first.memory, load.limit)
            if slower + saved_memory and 0 < saved_memory / (slower + saved_memory) < 1:
                weights.add(saved_memory / (slower + saved_memory))
    return max(ceil(_combination(load, prices, unused, weight)) for weight in weights)


def _combination(load: RankLoad, prices: tuple[tuple[Price, ...], ...], unused: Fraction, weight: Fraction) -> Fraction:
    """The convex combination with this weight on work and the rest on memory, each stage at the level that minimizes it."""
    rest = (1 - weight) / load.limit
    best = sum(min(weight * price.time + rest * price.memory for price in of_stage) for of_stage in prices)
    return weight * load.work + rest * unused + load.microbatches * best


def _reason(rank: int, time: int, work: int, begin: int) -> str:
    """Returns why work and memory of a rank together need this long."""
    after = f" and cannot begin before {show_ms(begin)}" if begin else ""
    more = f"even with the cheapest choice of R, this work, together with the memory that it holds over time, needs {show_ms(time)}"
    return f"rank {rank} has {show_ms(work)} of work without R{after}; {more}"
