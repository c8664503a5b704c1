"""The chain of passes of one microbatch alone in the pipeline. It gives every rank the time before and after its work: head and tail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from itertools import accumulate
from math import gcd
from typing import NamedTuple

from zerobubble.bounds.rank_load import RankLoad
from zerobubble.costs import Costs, Limits
from zerobubble.ir import Kind, Op, Placement
from zerobubble.rules import makers, uses

Chain = dict[Op, int]
"""The F and B passes of one microbatch in order, each with its earliest start in ns if there is no other work."""

ChainNeeds = dict[Op, list[tuple[Op, int]]]
"""The passes of the chain in order, each with the passes that it waits for and the least ns from their start to its own."""


def earliest_starts(placement: Placement, costs: Costs) -> Chain:
    """Computes the chain of a placement with one route."""
    return starts_of(chain_needs(placement, costs))


def starts_of(needs: ChainNeeds) -> Chain:
    """Computes the earliest starts that follow from `needs`."""
    starts: Chain = {}
    for op, before in needs.items():
        starts[op] = max((starts[need] + lag for need, lag in before), default=0)
    return starts


def chain_needs(placement: Placement, costs: Costs, delay: int = 0) -> ChainNeeds:
    """Returns the passes that each pass of the chain waits for.

    `delay` is an additional time in ns between the last stage's F and its B.
    """
    stages, home = placement.num_stages, placement.routes[0]
    chain = [Op(kind, s, 0) for kind in (Kind.F, Kind.B) for s in range(stages)]
    ops = set(chain)
    needs = {op: [maker for value in uses(op, stages) for maker in makers(value) if maker in ops] for op in chain}
    lags = {op: [(need, _lag(need, op, home, costs)) for need in needs[op]] for op in TopologicalSorter(needs).static_order()}
    last = Op(Kind.B, stages - 1, 0)
    lags[last] = [(need, lag + delay) for need, lag in lags[last]]
    return lags


def total_time(costs: Costs, kind: Kind, stage: int, num_microbatches: int) -> int:
    """Returns the total ns of one kind of pass on one stage, over all microbatches, of which `num_microbatches` counts slices."""
    return num_microbatches // costs.num_different * sum(costs.times(kind, stage))


def first_starts(placement: Placement, costs: Costs) -> list[int]:
    """Returns, by rank, the earliest start of its first pass in ns."""
    starts = [0] * placement.num_ranks
    for op, start in reversed(earliest_starts(placement, costs).items()):
        starts[placement.routes[0][op.stage]] = start
    return starts


def _lag(maker: Op, user: Op, home: Sequence[int], costs: Costs) -> int:
    """Returns the ns from the start of a pass to the arrival of its output at its user."""
    message = costs.comm[min(maker.stage, user.stage)] if home[maker.stage] != home[user.stage] else 0
    return costs.time(maker.kind, maker.stage) + message


@dataclass(frozen=True)
class RankPasses:
    """The passes of a microbatch on one rank, in the order of its visits.

    `places` are their indices in the chain, and `starts` are their earliest starts (ns) in it. `load` is all the work of the rank.
    """

    rank: int
    load: RankLoad
    passes: tuple[Op, ...]
    places: tuple[int, ...]
    starts: tuple[int, ...]


def passes_by_rank(placement: Placement, microbatches: int, costs: Costs, limits: Limits | None, chain: Chain) -> list[RankPasses]:
    """Returns the passes of each rank, in order of ranks. Identical ranks share one `RankLoad`, and so its cached results."""
    visits: list[list[tuple[int, Op]]] = [[] for _ in range(placement.num_ranks)]
    for place, op in enumerate(chain):
        visits[placement.routes[0][op.stage]].append((place, op))
    load = cache(lambda *columns: RankLoad(*columns))
    by_rank = []
    for rank, rank_visits in enumerate(visits):
        stages = [op.stage for _, op in rank_visits if op.kind is Kind.F]
        columns = _columns(stages, costs, microbatches, limits.memory[rank] if limits else None)
        places, passes = zip(*rank_visits, strict=True)
        by_rank.append(RankPasses(rank, load(*columns), passes, places, tuple(chain[op] for op in passes)))
    return by_rank


def _columns(stages: Sequence[int], costs: Costs, microbatches: int, limit: int | None) -> tuple[object, ...]:
    """Returns the arguments of a `RankLoad`: bytes in the largest common unit, and a limit between one microbatch and all of them."""
    saved = [costs.held_after_f[s] for s in stages]
    pending = [min(costs.held_after_f[s], costs.held_after_b[s]) for s in stages]
    unit = gcd(*saved, *pending) or 1
    capacity = sum(saved) * microbatches if limit is None else max(sum(saved), min(limit, sum(saved) * microbatches))
    times = [tuple(column[s] for s in stages) for column in (costs.forward, costs.backward, costs.weight)]
    held = [tuple(number // unit for number in column) for column in (saved, pending)]
    return (*times, *held, microbatches, capacity // unit)


class BoundedTime(NamedTuple):
    """A time to be bounded: the span of a rank, or the makespan (`rank` None).

    It begins with the first pass at `place` in the chain, whose earliest start is `start` (ns), and ends with the last W. For a microbatch
    alone, `ends[place]` is the end of the last W that must follow the pass at that place.
    """

    rank: int | None
    place: int
    start: int
    ends: Sequence[int]


def whole_step(chain: Chain, costs: Costs) -> BoundedTime:
    """Returns the window of the makespan."""
    return BoundedTime(None, 0, 0, ends(chain, chain, costs))


def ends(chain: Chain, passes: Chain | Sequence[Op], costs: Costs) -> list[int]:
    """Returns, for each place of the chain, the end (ns) of the last W of `passes` whose B is there or later; 0 if there is none."""
    chosen = set(passes)
    last = [_end_of(op, chain, costs) if op.kind is Kind.B and op in chosen else 0 for op in reversed(chain)]
    return list(accumulate(last, max))[::-1]


def spans_of(by_rank: Sequence[RankPasses], chain: Chain, costs: Costs) -> list[BoundedTime]:
    """Returns the spans to bound: the span of the first stage's rank, and any longer span of a microbatch alone.

    Other spans need no bound of their own: anything that makes one of them long makes the span of the first stage's rank at least as long.
    """
    first = min(by_rank, key=lambda home: home.places[0])
    limit = _end_of(first.passes[-1], chain, costs)
    longest = [home for home in by_rank if home is first or _end(home, chain, costs) - home.starts[0] > limit]
    return [BoundedTime(home.rank, home.places[0], home.starts[0], ends(chain, home.passes, costs)) for home in longest]


def _end(home: RankPasses, chain: Chain, costs: Costs) -> int:
    return max(_end_of(op, chain, costs) for op in home.passes if op.kind is Kind.B)


def _end_of(op: Op, chain: Chain, costs: Costs) -> int:
    """Returns the end of the W that follows this B immediately."""
    return chain[op] + costs.time(Kind.BW, op.stage)
