"""Reduces costs with overlapped or fused passes to costs of separate passes, so that lower bounds for separate passes apply.

An overlapped step of F and B, or of F and BW, takes at least the sum of their times minus the hidden time, and each pass is in at most one
step. So a fraction of the largest possible hidden time is subtracted from F, and the rest from B. The shortened passes then fit one after
another into the time of their step, in the same order and the same memory. The bound is valid for every share, so the strongest counts.

A BW that takes less than B and W (`Costs.fused`) is handled in the same way: W is shortened to what the BW takes beyond its B. Every
schedule then has a counterpart with B and W split that takes no longer.
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
"""Shares of the hidden time that are subtracted from F. Which gives the strongest bound depends on whether F or B is critical."""

ROUNDING = 3
"""Upper bound in ns on the rounding error of a step of two passes, or of a BW, if microbatches have `Costs.shares`."""


def saves_time(costs: Costs) -> bool:
    """Returns whether overlapped or fused passes can take less time than the same passes one at a time."""
    return any(costs.hidden) or fusing_saves(costs)


def fusing_saves(costs: Costs) -> bool:
    """Returns whether the BW of some stage takes less than its B and W."""
    return any(whole < b + w for whole, b, w in zip(costs.fused, costs.backward, costs.weight, strict=bool(costs.fused)))


def without_savings(placement: Placement, costs: Costs) -> list[Costs]:
    """Returns costs of separate passes under which every schedule takes at most its time under `costs`. Each item gives a valid bound."""
    plain = without_fused(costs)
    return [without_hidden(placement, plain, share) for share in SHARES_OF_F] if any(costs.hidden) else [plain]


def remark_on_savings(costs: Costs) -> str:
    """Returns the remark for the reasons of bounds that use `without_savings`; empty if that changes nothing."""
    return ", ".join([FUSED] * fusing_saves(costs) + [HIDDEN] * any(costs.hidden))


def without_fused(costs: Costs) -> Costs:
    """Returns `costs` with B and W shortened to take no longer than a BW; unchanged if no BW takes less than they do."""
    if not fusing_saves(costs):
        return costs
    fewer, rounding = tuple(column for column in costs.further if column[0] != traits_of(Kind.BW).fused_time), _rounding(costs)
    backward = tuple(map(min, costs.backward, costs.fused))
    both = map(min, map(sum, zip(costs.backward, costs.weight, strict=True)), costs.fused)
    weight = tuple(max(0, time - first - rounding) for time, first in zip(both, backward, strict=True))
    return replace(costs, backward=backward, weight=weight, further=fewer)


def without_hidden(placement: Placement, costs: Costs, share: float = 0.5) -> Costs:
    """Returns `costs` without hidden time: this `share` of the most that a step can hide is subtracted from F, the rest from B.

    Any excess over B is subtracted from W, because an F may overlap a BW, which contains W.
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
    """Returns, for each stage, the most ns that any step of its rank hides: `hidden` is indexed by the stage of a step's first pass."""
    home = placement.routes[0]
    by_rank = {rank: max(hidden for hidden, here in zip(costs.hidden, home, strict=True) if here == rank) for rank in home}
    return [by_rank[rank] for rank in home]


def _rounding(costs: Costs) -> int:
    """Returns the ns to subtract from each pass in addition, because shares round its time; 0 without shares."""
    return ceil(ROUNDING / min(costs.shares)) if costs.shares else 0
