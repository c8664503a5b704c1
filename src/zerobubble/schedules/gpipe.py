"""GPipe, all forwards and then all backwards, and breadth-first, its order on looped stages."""

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


@OF_SHAPE
def breadth_first(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """GPipe's order on v stages per rank: a v times smaller bubble than GPipe, at the same memory.

    Rank r of p with v stages, m microbatches: F x m on its first stage, then F x m on its second, and so on; then BW with stages and
    microbatches in reverse order.

    - bubble (gaps of rank 0, and makespan), no communication: (p-1 + (v-1) max(p-m, 0))(T_F + T_B + T_W)/v, T per rank and microbatch
    - peak memory of every rank: mv stage activations

    Good for: fully sharded weights, since each stage is gathered once per direction, and few microbatches, on links that can carry
    v times the messages.

    Source: Lamy-Poirier, Breadth-First Pipeline Parallelism, MLSys 2023, arXiv 2211.05953.

    >>> from zerobubble import picture
    >>> print(picture(breadth_first(2, 2)))
    F0 F1 f0 f1 .  .  .  bw1   bw0   BW1   BW0
    .  F0 F1 f0 f1 bw1   bw0   BW1   BW0   .  .
    """
    rows = tuple(_row(range(rank, ranks * stages_per_rank, ranks), range(microbatches)) for rank in range(ranks))
    return Schedule("breadth-first", Placement.looped(ranks, stages_per_rank), microbatches, rows)


def _row(stages: range, microbatches: range) -> tuple[Op, ...]:
    forward = [Op(Kind.F, stage, j) for stage in stages for j in microbatches]
    return (*forward, *(Op(Kind.BW, stage, j) for _, stage, j in reversed(forward)))
