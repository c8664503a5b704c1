"""ZB-H1 and ZB-H2, the handcrafted schedules of Zero Bubble Pipeline Parallelism (arXiv 2401.10241, section 2)."""

from zerobubble.ir import Kind, Op, Placement, Schedule


def zb_h1(ranks: int, microbatches: int, stages_per_rank: int = 1) -> Schedule:
    """Split backward with W delayed into the bubbles: a third of 1F1B's bubble at 1F1B's peak memory.

    Rank r of p: F x (p-r); then r times B F; then B W F until no F is left; then B W; then the W left.

    - bubble (largest span), no communication, T_W <= T_F and T_B: (p-1)(T_F + T_B) - (min(p, m)-1) T_W
    - bubble (largest span), c = T_comm, m > p, 2c <= T_W <= T_F + 2c and T_B + 2c: (p-1)(T_F + T_B - T_W + 4c)
    - makespan at unit times, no communication, m >= p: 3m + p - 1
    - peak memory: min(p, m) microbatches on every rank (what is held from B to W counted in full)

    >>> print(zb_h1(2, 3).to_text().split("microbatches 3")[1])
    <BLANKLINE>
    rank 0: 0F0 0F1 0B0 0W0 0F2 0B1 0W1 0B2 0W2
    rank 1: 1F0 1B0 1F1 1B1 1W0 1F2 1B2 1W1 1W2
    <BLANKLINE>
    """
    rows = tuple(_row(rank, ranks - rank, rank, microbatches) for rank in range(ranks))
    return Schedule("zb-h1", Placement.linear(ranks), microbatches, rows)


def zb_h2(ranks: int, microbatches: int, stages_per_rank: int = 1) -> Schedule:
    """Every rank works without a gap; needs nearly twice the memory and an optimizer step without a barrier.

    Rank r of p: F x (2(p-r)-1); then 2r times B F; then B W F until no F is left; then B W; then the W left.

    - bubble (largest span), no communication, T_W <= T_F and T_B: (p-1)(T_F + T_B) - (min(2p-1, m)-1) T_W
    - bubble (largest span), c = T_comm, m >= 2p-1, T_W <= T_F and T_B, 2c <= T_F + T_B: (p-1)(T_F + T_B - 2 T_W + 2c)
    - makespan at unit times, no communication, m >= 2p-1: 3m + p - 1
    - peak memory: min(2p-1, m) microbatches on every rank (what is held from B to W counted in full)

    >>> print(zb_h2(2, 4).to_text().split("microbatches 4")[1])
    <BLANKLINE>
    rank 0: 0F0 0F1 0F2 0B0 0W0 0F3 0B1 0W1 0B2 0W2 0B3 0W3
    rank 1: 1F0 1B0 1F1 1B1 1F2 1B2 1W0 1F3 1B3 1W1 1W2 1W3
    <BLANKLINE>
    """
    rows = tuple(_row(rank, 2 * (ranks - rank) - 1, 2 * rank, microbatches) for rank in range(ranks))
    return Schedule("zb-h2", Placement.linear(ranks), microbatches, rows)


def _row(stage: int, warmup: int, delay: int, microbatches: int) -> tuple[Op, ...]:
    """`warmup` F, then B and F in turn, where W of microbatch j follows B of microbatch j + `delay`."""
    row = [Op(Kind.F, stage, j) for j in range(min(warmup, microbatches))]
    for j in range(microbatches):
        row.append(Op(Kind.B, stage, j))
        if j >= delay:
            row.append(Op(Kind.W, stage, j - delay))
        if warmup + j < microbatches:
            row.append(Op(Kind.F, stage, warmup + j))
    row += [Op(Kind.W, stage, j) for j in range(max(microbatches - delay, 0), microbatches)]
    return tuple(row)
