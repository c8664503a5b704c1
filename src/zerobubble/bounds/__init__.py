"""Lower bounds on the time of any schedule for a problem: the certificate of every plan.

Microbatches are alike, so they may be taken to go through every stage in order. The first one must reach a pass through the chain of
passes before it, and memory limits what its rank can do meanwhile (`load`). The last one must return from a pass through the chain
after it, and memory limits what can still be waiting then. All other work of the rank lies in between.
Those are claims about one rank each. Besides, the earliest start of every pass follows from those of the microbatches before it, over all
ranks (`microbatch_starts`), and in small problems every rank is busy between these and what must follow (`one_machine`).

Where forwards may be recomputed, time is short for R's, so what these save in memory is limited, too (`recompute`, `slack`).

Microbatches of unequal cost (`Costs.shares`) are not alike. A schedule of them holds schedules of some of them alone, and none of these is
shorter than one of as many of the smallest share among them; and every rank has all its work to do.

A pass that computes B and W in one is a B with its W at once. It never holds more than F saved, so no bound counts pending work as
more than that. Overlapped passes count without the time that they can hide, and W with no more than a BW takes beyond its B (`overlap`).
"""

from zerobubble.bounds.certificate import Bound, Bounds, lower_bounds, shortage
from zerobubble.bounds.divided_head import bounds_divided
from zerobubble.bounds.recompute import bounds_again, shortage_again

__all__ = ["Bound", "Bounds", "bounds_again", "bounds_divided", "lower_bounds", "shortage", "shortage_again"]
