"""The lower bounds of schedules whose passes are F, B and W, for whole microbatches and for slices of a sequence."""

from __future__ import annotations

from zerobubble.arguments import WHOLE, optional, takes
from zerobubble.bounds.bound import Bounds
from zerobubble.bounds.certificate import bounds_with_delay
from zerobubble.bounds.slices import bounds_with_slices
from zerobubble.bounds.sums import with_sums
from zerobubble.costs import Costs, Limits
from zerobubble.ir import Placement


@takes(placement=Placement, num_microbatches=WHOLE, costs=Costs, limits=optional(Limits))
def lower_bounds(placement: Placement, num_microbatches: int, costs: Costs, limits: Limits | None) -> Bounds:
    """Computes lower bounds on span and makespan of schedules on `placement`; `limits=None` stands for unlimited memory.

    If overlapped passes hide time (`Costs.hidden`), or a BW takes less than B and W (`Costs.fused`), the bounds hold for schedules with
    such steps, too. If `shortage` finds that nothing fits, the bounds are computed for a limit that holds one microbatch. Microbatches with
    shares may come in any order. If the costs have slices, `num_microbatches` counts them, as in a `Schedule`. The sums over replicas of
    `costs` count. Raises `InputError` for arguments that do not match, and for a placement of several routes.
    """
    if costs.slices:
        return bounds_with_slices(placement, num_microbatches, costs, limits)
    return with_sums(bounds_with_delay(placement, num_microbatches, costs, limits, 0), placement, num_microbatches, costs)
