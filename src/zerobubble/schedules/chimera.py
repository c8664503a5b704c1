"""Chimera: two pipelines in opposite directions."""

from zerobubble.ir import Placement, Schedule
from zerobubble.schedules.orders import lockstep_rows
from zerobubble.schedules.recipe import OF_SHAPE


@OF_SHAPE
def chimera(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Two copies of the model in opposite directions: at most about two thirds of 1F1B's bubble, for twice the weights.

    Even microbatches flow down the ranks, odd ones up; in each direction one enters every other tick. A microbatch advances one stage
    per tick, forward to the last stage and straight back as BW. Each rank runs its passes in the order of their ticks, BW first.

    - bubble (makespan), no communication, T_F <= T_B + T_W: (p-2 + m mod 2)(T_B + T_W) + max(p-m, 0) T_F
    - bubble rate, no communication, T_F = T_B + T_W, m even and m >= p: (p-2)/(2m + p-2)
    - peak memory of rank r: min(p, min(p-r, ceil(m/2)) + min(r+1, floor(m/2))) microbatches; p/2+1 to p for m = p

    Good for: few microbatches, about as many as ranks, if two copies of the weights and their gradients fit.

    Source: Li and Hoefler, Chimera, SC 2021, arXiv 2107.06925. For m > p the paper concatenates units of p microbatches, and each adds
    (p-2)(T_B + T_W - T_F); here both directions continue without a break. At T_B + T_W = 2 T_F no order within the same memory ends
    earlier for m = p = 4, 6, 8 and for m = 2p, p = 4, 6 (solved exactly).

    >>> from zerobubble import picture
    >>> print(picture(chimera(4, 4)))
    F0 F2 .  f1 bw1   f3 bw3   .  BW0   .  .  BW2
    .  F0 f1 F2 f3 .  bw1   BW0   bw3   BW2   .  .
    .  f1 F0 f3 F2 .  BW0   bw1   BW2   bw3   .  .
    f1 f3 .  F0 BW0   F2 BW2   .  bw1   .  .  bw3
    """
    placement = Placement.bidirectional(ranks)
    routes = tuple(j % 2 for j in range(microbatches))
    entries = [(j - route, route) for j, route in enumerate(routes)]
    return Schedule("chimera", placement, microbatches, lockstep_rows(placement, entries), microbatch_routes=routes)


def even_ranks(ranks: int, microbatches: int, stages_per_rank: int) -> str:
    """An even number of ranks: with an odd number both directions would compete for the middle rank."""
    return f"needs an even number of ranks, got {ranks}" if ranks % 2 else ""
