"""Hanayo: a pipeline in waves."""

from zerobubble.ir import Placement, Schedule
from zerobubble.schedules.orders import lockstep_rows
from zerobubble.schedules.recipe import OF_SHAPE


@OF_SHAPE
def hanayo(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Stages placed down and up the ranks in W waves, 2W per rank: the bubble shrinks with W at 1F1B's peak memory.

    Microbatches form groups of p (h in the last). A group enters every v p ticks; within a group one microbatch enters every other
    tick. A microbatch advances one stage per tick, forward to the last stage and straight back as BW. Each rank runs its passes in the
    order of their ticks, BW first.

    - bubble (makespan), no communication, T_F <= T_B + T_W, T per rank and microbatch:
      (2(p-1) + (v-2)(p-h)) (T_B + T_W)/v + max(p-m, 0) T_F; 2(p-1)(T_B + T_W)/v if p divides m
    - bubble rate, no communication, T_B + T_W = 2 T_F, m = p: (2p-2)/(3pW + 2p-2)
    - peak memory of rank r: min(vk, (v-2)k + m + r+1) stage activations, k = min(m, p): p microbatches on every rank from m = 2p-1 on

    Good for: few microbatches, backward passes that cannot be split into B and W, and a fast network: each microbatch sends messages
    for 2W stages per rank.

    Source: Liu et al., Hanayo, SC 2023, arXiv 2308.15762, for placement and waves. The rule is this project's, since the paper's action
    lists come from a greedy algorithm. At T_B + T_W = 2 T_F, m = p = 2, 3, 4 and one or two waves no order ends earlier (solved exactly).

    >>> from zerobubble import picture
    >>> print(picture(hanayo(3, 3)))
    F0 F1 F2 .  .  f0 bw0   f1 bw1   f2 bw2   .  .  BW0   .  .  BW1   .  .  BW2
    .  F0 F1 .  f0 F2 f1 .  bw0   f2 bw1   .  BW0   bw2   BW1   .  .  BW2   .  .
    .  .  F0 f0 F1 f1 F2 f2 .  .  bw0   BW0   bw1   BW1   bw2   BW2   .  .  .  .
    """
    placement = Placement.wave(ranks, stages_per_rank // 2)
    entries = [(2 * (j % ranks) + placement.num_stages * (j // ranks), 0) for j in range(microbatches)]
    return Schedule("hanayo", placement, microbatches, lockstep_rows(placement, entries))


def whole_waves(ranks: int, microbatches: int, stages_per_rank: int) -> str:
    """An even number of stages per rank, two for each wave."""
    return f"needs an even number of stages per rank, two for each wave, got {stages_per_rank}" if stages_per_rank % 2 else ""
