"""Costs of passes one at a time that no schedule with combined steps can beat, so that bounds for them hold for such steps as well.

A step of F and B, or F and BW, takes at least the sum of their times less the hidden time, and no pass is in two steps. So take a share of
the most that it can hide off F, and the rest off B: any schedule with pairs then contains the shortened passes one at a time, within the
time of their step, in the same rows and bytes. The bound holds for every share, and the strongest counts.

A BW that takes less than B and W (`Costs.fused`) is treated alike: W takes what is left of the BW after its B. Every schedule is then one
with B and W split that is no longer.
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
"""Shares of the hidden time that are taken off F. Which gives the strongest bound depends on whether F or B is critical."""

ROUNDING = 3
"""Upper bound in ns on the rounding of a step of two passes, or of a BW, with shares."""


def saves_time(costs: Costs) -> bool:
    """Whether steps of several passes can take less time than these passes one at a time."""
    return any(costs.hidden) or fusing_saves(costs)


def fusing_saves(costs: Costs) -> bool:
    """Whether the BW of some stage takes less than its B and W."""
    return any(whole < b + w for whole, b, w in zip(costs.fused, costs.backward, costs.weight, strict=bool(costs.fused)))


def without_savings(placement: Placement, costs: Costs) -> list[Costs]:
    """Costs of passes one at a time with which no schedule takes longer than with `costs` and any steps; several, each valid."""
    plain = without_fused(costs)
    return [without_hidden(placement, plain, share) for share in SHARES_OF_F] if any(costs.hidden) else [plain]


def remark_on_savings(costs: Costs) -> str:
    """What to append to the reasons of bounds for `without_savings`; empty if nothing is left out."""
    return ", ".join([FUSED] * fusing_saves(costs) + [HIDDEN] * any(costs.hidden))


def without_fused(costs: Costs) -> Costs:
    """`costs` whose B and W take no longer than a BW; unchanged if no BW takes less."""
    if not fusing_saves(costs):
        return costs
    fewer, rounding = tuple(column for column in costs.further if column[0] != traits_of(Kind.BW).in_one), _rounding(costs)
    backward = tuple(map(min, costs.backward, costs.fused))
    both = map(min, map(sum, zip(costs.backward, costs.weight, strict=True)), costs.fused)
    weight = tuple(max(0, time - first - rounding) for time, first in zip(both, backward, strict=True))
    return replace(costs, backward=backward, weight=weight, further=fewer)


def without_hidden(placement: Placement, costs: Costs, share: float = 0.5) -> Costs:
    """`costs` with what an overlapped step can hide taken off F (this `share` of it) and B (the rest), and nothing left to hide.

    What exceeds B is taken off W, which a BW contains.
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
    """For each stage, the most ns that any step of its rank hides. `hidden` is indexed by the stage of a step's first pass."""
    home = placement.routes[0]
    by_rank = {rank: max(hidden for hidden, here in zip(costs.hidden, home, strict=True) if here == rank) for rank in home}
    return [by_rank[rank] for rank in home]


def _rounding(costs: Costs) -> int:
    """The ns that each pass gives up in addition if shares round its time."""
    return ceil(ROUNDING / min(costs.shares)) if costs.shares else 0
