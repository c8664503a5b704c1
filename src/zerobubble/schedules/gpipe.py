"""GPipe (arXiv 1811.06965)."""

from zerobubble.ir import Kind, Op, Placement, Schedule


def gpipe(ranks: int, microbatches: int, stages_per_rank: int = 1) -> Schedule:
    """All forwards, then all backwards: the simplest fill and drain, with every microbatch in memory at once.

    Rank r of p, m microbatches: F x m, then BW x m.

    - bubble (gaps of rank 0, and makespan): (p-1)(T_F + T_B + T_W), no communication
    - peak memory of every rank: m microbatches

    >>> print(gpipe(2, 3).to_text().split("microbatches 3")[1])
    <BLANKLINE>
    rank 0: 0F0 0F1 0F2 0BW0 0BW1 0BW2
    rank 1: 1F0 1F1 1F2 1BW0 1BW1 1BW2
    <BLANKLINE>
    """
    rows = tuple(tuple(Op(kind, rank, j) for kind in (Kind.F, Kind.BW) for j in range(microbatches)) for rank in range(ranks))
    return Schedule("gpipe", Placement.linear(ranks), microbatches, rows)
