"""GPipe: all forwards, then all backwards."""

from zerobubble.ir import Kind, Op, Placement, Schedule
from zerobubble.schedules.recipe import OF_SHAPE


@OF_SHAPE
def gpipe(ranks: int, microbatches: int, stages_per_rank: int = 1) -> Schedule:
    """All forwards, then all backwards: the simplest schedule, with every microbatch in memory at once.

    Rank r of p, m microbatches: F x m, then BW x m.

    - bubble (gaps of rank 0, and makespan), no communication: (p-1)(T_F + T_B + T_W)
    - peak memory of every rank: m microbatches

    Good for: a first run, and few microbatches whose activations are small or recomputed.

    Source: Huang et al., GPipe, NeurIPS 2019, arXiv 1811.06965.

    >>> from zerobubble import picture
    >>> print(picture(gpipe(2, 3)))
    F0 F1 F2 .  .  .  BW0   BW1   BW2
    .  F0 F1 F2 BW0   BW1   BW2   .  .
    """
    rows = tuple(tuple(Op(kind, rank, j) for kind in (Kind.F, Kind.BW) for j in range(microbatches)) for rank in range(ranks))
    return Schedule("gpipe", Placement.linear(ranks), microbatches, rows)
