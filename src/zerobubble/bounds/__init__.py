"""Lower bounds on the time of any schedule for a problem: the certificate of every plan.

Microbatches are equal, so we may assume that they pass every stage in order. For each pass of a rank,

- the first microbatch reaches it only after the chain of passes before it, and memory limits the work that the rank can do meanwhile;
- the last microbatch leaves it through the chain of passes after it, and memory limits the work that can be left for that time;
- all other work of the rank lies in between.

These are claims about one rank each (`certificate`, `rank_load`, `memory`). Two more combine ranks: the earliest start of every pass
follows from the passes before it on all ranks (`microbatch_starts`), and in small problems each rank is bounded as a single machine with
release times and tails (`one_machine`).

After its last pass, a rank sums the gradients of at least one stage over replicas, if that takes time (`sums`).

With recomputation, time limits the R passes, and so the memory that they can save (`recompute`, `slack`).

Microbatches with `Costs.shares` are not equal. Removing some of them from a schedule leaves a schedule of the others, which is
no shorter than one of equal microbatches of the smallest remaining share. In addition, every rank has to do all its work.

Slices of a sequence count as microbatches of their own, and the B of the last stage waits for the F of all slices (`slices`).

A BW is a B with its W immediately after. It never holds more than F saved, so no bound counts more pending bytes than that. Overlapped
passes count without the time that they can hide, and W with no more than a BW takes beyond its B (`overlap`).
"""

from zerobubble.bounds.bound import Bound, Bounds
from zerobubble.bounds.certificate import shortage
from zerobubble.bounds.divided_head import bounds_with_divided_head
from zerobubble.bounds.lower import lower_bounds
from zerobubble.bounds.recompute import bounds_with_recompute, shortage_with_recompute
from zerobubble.listing import listing

__all__ = ["Bound", "Bounds", "bounds_with_divided_head", "bounds_with_recompute", "lower_bounds", "shortage", "shortage_with_recompute"]

__dir__ = listing(__all__)
