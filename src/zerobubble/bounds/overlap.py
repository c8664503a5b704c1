"""What overlapped passes can hide, left out of the times of passes, so that bounds for passes one at a time hold for pairs as well.

A step of two passes a and b takes at least the sum of their times less the hidden time, and no pass is in two steps. So each pass gives up
half of the most that it can hide. Any schedule with pairs is then one of these shorter passes, one at a time: first a, then b, within the
time of their step. Its rows are the same, so it holds the same bytes.

A BW that takes less than B and W (`Costs.fused`) counts alike: W takes what is left of the BW after its B. Every schedule is then one
with B and W apart that is no longer.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from zerobubble.bounds.reasons import FUSED, HIDDEN
from zerobubble.costs import Costs
from zerobubble.ir import Kind, Placement
from zerobubble.kinds import traits_of

ROUNDING = 3
"""More ns than the times of a step of two passes, or of a BW, with shares are rounded by."""


def saves_time(costs: Costs) -> bool:
    """Whether steps of several passes can take less time than these passes one at a time."""
    return any(costs.hidden) or fusing_saves(costs)


def fusing_saves(costs: Costs) -> bool:
    """Whether the BW of some stage takes less than its B and W."""
    return any(whole < b + w for whole, b, w in zip(costs.fused, costs.backward, costs.weight, strict=bool(costs.fused)))


def without_savings(placement: Placement, costs: Costs) -> Costs:
    """Costs of passes one at a time with which no schedule takes longer than with `costs`, whatever its steps save."""
    plain = without_fused(costs)
    return without_hidden(placement, plain) if any(costs.hidden) else plain


def remark_on_savings(costs: Costs) -> str:
    """What reasons of bounds for `without_savings` add to their figures."""
    return ", ".join([FUSED] * fusing_saves(costs) + [HIDDEN] * any(costs.hidden))


def without_fused(costs: Costs) -> Costs:
    """`costs` with B and W that take no longer than a BW together; themselves where no BW takes less."""
    if not fusing_saves(costs):
        return costs
    fewer, rounding = tuple(column for column in costs.further if column[0] != traits_of(Kind.BW).in_one), _rounding(costs)
    backward = tuple(map(min, costs.backward, costs.fused))
    both = map(min, map(sum, zip(costs.backward, costs.weight, strict=True)), costs.fused)
    weight = tuple(max(0, time - first - rounding) for time, first in zip(both, backward, strict=True))
    return replace(costs, backward=backward, weight=weight, further=fewer)


def without_hidden(placement: Placement, costs: Costs) -> Costs:
    """`costs` with each time of a pass less half of what an overlapped step can hide of it, and nothing left to hide."""
    most, rounding = _most_hidden(placement, costs), _rounding(costs)
    columns = {name: [_shorter(*pair, rounding) for pair in zip(costs.column(name), most, strict=True)] for name in costs.time_columns}
    return replace(costs, hidden=()).with_columns(**columns)


def _most_hidden(placement: Placement, costs: Costs) -> list[int]:
    """For each stage, the most ns that any step of its rank hides: the stage of its first pass tells."""
    home = placement.routes[0]
    by_rank = {rank: max(hidden for hidden, here in zip(costs.hidden, home, strict=True) if here == rank) for rank in home}
    return [by_rank[rank] for rank in home]


def _rounding(costs: Costs) -> int:
    """The ns that each pass gives up in addition where times are rounded, each by the share of its microbatch."""
    return ceil(ROUNDING / min(costs.shares)) if costs.shares else 0


def _shorter(time: int, hidden: int, rounding: int) -> int:
    """`time` less half of what can be hidden of it, rounded down."""
    return max(0, time - (min(time, hidden) + 1) // 2 - (rounding if hidden else 0))
