"""What overlapped passes can hide, left out of the times of passes, so that bounds for passes one at a time hold for pairs as well.

A step of two passes a and b takes at least the sum of their times less the hidden time, and no pass is in two steps. So each pass gives up
half of the most that it can hide. Any schedule with pairs is then one of these shorter passes, one at a time: first a, then b, within the
time of their step. Its rows are the same, so it holds the same bytes.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from zerobubble.costs import Costs
from zerobubble.ir import Placement

ROUNDING = 3
"""More ns than the times of a step of two passes with shares are rounded by."""


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
