"""Where to cut so that the slowest rank is as fast as it can be."""

from __future__ import annotations

from collections.abc import Sequence

from zerobubble.arguments import WHOLE, each, optional, takes
from zerobubble.costs import Limits
from zerobubble.errors import InputError
from zerobubble.ir import Placement
from zerobubble.partition.descent import descend
from zerobubble.partition.exact import CutProblem, Loads, exact_cuts
from zerobubble.partition.layers import Cuts, Layer

_NO_FIT = "no cuts fit the memory limits: raise them, use more ranks, or keep fewer microbatches in flight"


@takes(layers=each(Layer), num_stages=WHOLE)
def balance(layers: Sequence[Layer], num_stages: int) -> Cuts:
    """The cuts with the smallest largest stage time (F + B + W), exactly; among those, with the smallest sum of squared stage times.

    Raises `InputError` for fewer layers than stages.
    """
    return balance_placement(layers, Placement.linear(num_stages))


@takes(layers=each(Layer), placement=Placement, limits=optional(Limits), in_flight=WHOLE)
def balance_placement(layers: Sequence[Layer], placement: Placement, limits: Limits | None = None, in_flight: int = 1) -> Cuts:
    """The cuts with the smallest largest rank time (F + B + W of its stages), among them with the smoothest stage times.

    Exact where each rank holds one stage, and for the vee; elsewhere a local search that ends where moving a layer along any run
    of stages helps no more. `limits` bound what each rank holds: its parameters and the activations of `in_flight` microbatches in
    each of its stages (1 is the least with which anything runs). Raises `InputError` for fewer layers than stages, for a placement of
    several routes, and where no cuts fit the limits.
    """
    if len(placement.routes) > 1:
        raise InputError(f"layers are cut for one route, the placement {placement.name!r} has {len(placement.routes)}")
    if len(layers) < placement.num_stages:
        raise InputError(f"{len(layers)} layers cannot be cut into {placement.num_stages} stages: a stage is at least one layer")
    if limits is not None and len(limits.memory) != placement.num_ranks:
        raise InputError(f"the placement has {placement.num_ranks} ranks, the limits describe {len(limits.memory)}")
    home, ranks, loads = placement.routes[0], placement.num_ranks, Loads.of(layers, in_flight)
    if len(home) == ranks or (len(home) == 2 * ranks and home == home[::-1]):
        memory_limits = None if limits is None else [limits.memory[rank] for rank in home[:ranks]]
        found = exact_cuts(CutProblem(loads, ranks, len(home) > ranks, memory_limits))
    else:
        found = _by_descent(loads, home, None if limits is None else limits.memory)
    if found is None:
        raise InputError(_NO_FIT)
    return found


def _by_descent(loads: Loads, home: Sequence[int], memory_limits: Sequence[int] | None) -> Cuts | None:
    """The better end of two descents, from equal stage times and from equal numbers of layers; None where both are over the memory."""
    stages, num_layers = len(home), len(loads.time) - 1
    starts = [exact_cuts(CutProblem(loads, stages, False)), tuple(num_layers * stage // stages for stage in range(1, stages))]
    (over, *_), cuts = min(descend(loads, home, memory_limits, start) for start in starts if start is not None)
    return None if over else cuts
