"""What steps of several passes save, left out of the times of passes, so that bounds for passes one at a time hold for these steps as well.

A step of F and B, or F and BW, takes at least the sum of their times less the hidden time, and no pass is in two steps; other pairs hide
nothing. So F gives up a share of the most that it can hide, and B the rest, any share: the strongest bound counts. Any schedule with pairs
is then one of these shorter passes, one at a time: first a, then b, within the time of their step. Its rows are the same, so it holds the
same bytes.

A BW that takes less than B and W (`Costs.fused`) counts alike: W takes what is left of the BW after its B. Every schedule is then one
with B and W apart that is no longer.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from operator import sub

from zerobubble.bounds.reasons import FUSED, HIDDEN
from zerobubble.costs import Costs
from zerobubble.ir import Kind, Placement
from zerobubble.kinds import traits_of

SHARES_OF_F = (0.0, 0.5, 1.0)
"""The shares of what pairs hide that F gives up: which one gives the strongest bound depends on whether F or B is in the way."""

ROUNDING = 3
"""More ns than the times of a step of two passes, or of a BW, with shares are rounded by."""


def saves_time(costs: Costs) -> bool:
    """Whether steps of several passes can take less time than these passes one at a time."""
    return any(costs.hidden) or fusing_saves(costs)


def fusing_saves(costs: Costs) -> bool:
    """Whether the BW of some stage takes less than its B and W."""
    return any(whole < b + w for whole, b, w in zip(costs.fused, costs.backward, costs.weight, strict=bool(costs.fused)))


def without_savings(placement: Placement, costs: Costs) -> list[Costs]:
    """Costs of passes one at a time with which no schedule takes longer than with `costs`, whatever its steps save: some, each so."""
    plain = without_fused(costs)
    return [without_hidden(placement, plain, share) for share in SHARES_OF_F] if any(costs.hidden) else [plain]


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


def without_hidden(placement: Placement, costs: Costs, share: float = 0.5) -> Costs:
    """`costs` with F and B each less its part of what an overlapped step can hide, F this `share` of it, and nothing left to hide.

    What is more than all of B is left out of W, which a BW has with it.
    """
    most, rounding = _most_hidden(placement, costs), _rounding(costs)
    both = list(map(sum, zip(costs.backward, costs.weight, strict=True)))
    of_f, of_b = (
        [min(time, ceil(part * min(time, hidden)) + rounding * (hidden > 0)) for time, hidden in zip(times, most, strict=True)]
        for part, times in ((share, costs.forward), (1 - share, both))
    )
    first = list(map(min, of_b, costs.backward))
    return replace(
        costs,
        hidden=(),
        forward=tuple(map(sub, costs.forward, of_f)),
        backward=tuple(map(sub, costs.backward, first)),
        weight=tuple(max(0, w - more + part) for w, more, part in zip(costs.weight, of_b, first, strict=True)),
    )


def _most_hidden(placement: Placement, costs: Costs) -> list[int]:
    """For each stage, the most ns that any step of its rank hides: looked up by the stage of its first pass."""
    home = placement.routes[0]
    by_rank = {rank: max(hidden for hidden, here in zip(costs.hidden, home, strict=True) if here == rank) for rank in home}
    return [by_rank[rank] for rank in home]


def _rounding(costs: Costs) -> int:
    """The ns that each pass gives up in addition where times are rounded, each by the share of its microbatch."""
    return ceil(ROUNDING / min(costs.shares)) if costs.shares else 0
