"""1F1B and eager 1F1B."""

from zerobubble.ir import Kind, Op, Placement, Schedule
from zerobubble.schedules.recipe import OF_SHAPE


@OF_SHAPE
def one_f_one_b(ranks: int, microbatches: int, stages_per_rank: int = 1) -> Schedule:
    """One forward and one backward in turn, after a short warm-up: GPipe's bubble with at most p microbatches in memory.

    Rank r of p, m microbatches: F x min(p-1-r, m), then F BW in turn, then the remaining BW.

    - bubble (gaps of rank 0, and makespan), no communication: (p-1)(T_F + T_B + T_W)
    - makespan if p > 1 divides m: an additional 2((p-1)m/p + p-2) T_comm, which grows with m
    - peak memory of rank r: min(p-r, m) microbatches

    Good for: fast links, and as the baseline for other schedules.

    Source: Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training (PipeDream-flush), ICML 2021, arXiv 2006.09503;
    Fan et al., DAPPLE, PPoPP 2021, arXiv 2007.01045.

    >>> from zerobubble import picture
    >>> print(picture(one_f_one_b(2, 3)))
    F0 F1 .  .  BW0   F2 BW1   .  BW2
    .  F0 BW0   F1 BW1   F2 BW2   .  .
    """
    rows = tuple(_in_turn(rank, min(ranks - 1 - rank, microbatches), microbatches) for rank in range(ranks))
    return Schedule("1f1b", Placement.linear(ranks), microbatches, rows)


@OF_SHAPE
def eager_1f1b(ranks: int, microbatches: int, stages_per_rank: int = 1) -> Schedule:
    """1F1B with twice the warm-up: forwards hide the messages, for nearly twice the memory on the first ranks.

    Rank r of p, m microbatches: F x min(2(p-1-r), m), then F BW in turn, then the remaining BW.

    - bubble (gaps of rank 0, and makespan), 2 T_comm <= T_F + T_B + T_W: (p-1)(T_F + T_B + T_W + 2 T_comm)
    - peak memory of rank r: min(2(p-r)-1, m) microbatches

    Good for: slow links between ranks with spare memory.

    Source: Zhuang et al., On Optimizing the Communication of Model Parallelism, MLSys 2023, arXiv 2211.05322.

    >>> from zerobubble import picture
    >>> print(picture(eager_1f1b(2, 3)))
    F0 F1 F2 .  BW0   .  BW1   .  BW2
    .  F0 BW0   F1 BW1   F2 BW2   .  .
    """
    rows = tuple(_in_turn(rank, min(2 * (ranks - 1 - rank), microbatches), microbatches) for rank in range(ranks))
    return Schedule("eager-1f1b", Placement.linear(ranks), microbatches, rows)


def _in_turn(stage: int, warmup: int, microbatches: int) -> tuple[Op, ...]:
    row = [Op(Kind.F, stage, j) for j in range(warmup)]
    for j in range(microbatches):
        if warmup + j < microbatches:
            row.append(Op(Kind.F, stage, warmup + j))
        row.append(Op(Kind.BW, stage, j))
    return tuple(row)
