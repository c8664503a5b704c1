"""ZB-V, the zero-bubble schedule on a V."""

from collections import deque

from zerobubble.ir import Kind, Op, Placement, Schedule


def zb_v(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Two stages per rank in a V: zero bubble at 1F1B's peak memory, for twice the messages.

    Rank r of p holds stages r (passes F B W below) and 2p-1-r (f b w): F x (2(p-r)-1); r times f F; p-r times f b w; then
    in turn F B W and f b w while F or f is left; then r times B b; then the B left, each with the oldest W; then the W left.
    For m < 2p-1 it is the schedule of 2p-1 microbatches with the surplus left out.

    - bubble (largest span), T_F = T_B = T_W, no communication, m >= 2p-1: 0
    - makespan at unit stage times, no communication, m >= 2p-1: 6m + p - 1
    - peak memory of rank r: min(m+r+1, 2m, 2p) stage activations, so p microbatches on every rank from m = 2p-1 on

    Good for: no bubble at 1F1B's memory, where F, B and W take about equal time and links are fast.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241 v1, section 6 and Figure 8.

    >>> from zerobubble import picture
    >>> print(picture(zb_v(2, 3)))
    F0 F1 F2 f0 b0 w0 f1 b1 w1 B0 W0 f2 b2 w2 B1 W1 B2 W2 .
    .  F0 f0 F1 f1 b0 w0 F2 B0 W0 f2 b1 w1 B1 b2 B2 W1 w2 W2
    """
    full = max(2 * ranks - 1, microbatches)
    rows = tuple(tuple(op for op in _row(rank, 2 * ranks - 1 - rank, ranks, full) if op.microbatch < microbatches) for rank in range(ranks))
    return Schedule("zb-v", Placement.vee(ranks), microbatches, rows)


def _row(down: int, back: int, ranks: int, microbatches: int) -> list[Op]:
    row: list[Op] = []
    count: dict[tuple[int, Kind], int] = {}
    pending: deque[Op] = deque()

    def run(stage: int, *kinds: Kind) -> None:
        for kind in kinds:
            op = Op(kind, stage, count.get((stage, kind), 0))
            if op.microbatch < microbatches:
                count[stage, kind] = op.microbatch + 1
                row.append(op)
                if kind is Kind.B:
                    pending.append(Op(Kind.W, stage, op.microbatch))
                if kind is Kind.W:
                    pending.remove(op)

    def left(stage: int, kind: Kind) -> bool:
        return count.get((stage, kind), 0) < microbatches

    run(down, *[Kind.F] * (2 * (ranks - down) - 1))
    for _ in range(down):
        run(back, Kind.F)
        run(down, Kind.F)
    for _ in range(ranks - down):
        run(back, Kind.F, Kind.B, Kind.W)
    while left(back, Kind.F):
        run(down, Kind.F, Kind.B, Kind.W)
        run(back, Kind.F, Kind.B, Kind.W)
    for _ in range(down):
        run(down, Kind.B)
        run(back, Kind.B)
    while left(down, Kind.B):
        run(down, Kind.B)
        oldest = pending[0]
        run(oldest.stage, Kind.W)
    while pending:
        run(pending[0].stage, Kind.W)
    return row
