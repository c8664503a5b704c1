"""Interleaved zero bubble (PyTorch's ScheduleInterleavedZeroBubble)."""

from zerobubble.ir import Kind, Op, Placement, Schedule
from zerobubble.schedules.orders import groups_of, round_trips
from zerobubble.schedules.recipe import OF_SHAPE


@OF_SHAPE
def interleaved_zb(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Interleaving with W delayed into the bubbles: a third of interleaved 1F1B's bubble, under its peak memory.

    Microbatches form groups of p (if p does not divide m, max(1, m div p) groups of nearly equal size, g in the first). A group
    passes through the rank's first stage, then its second, and so on; B and W mirror that. Rank r of p with v stages:
    F x (v-1)g + p-1-r, then F B in turn, each W r turns after its B; then the remaining W.

    - bubble (makespan), no communication, T_W <= T_F and T_B, T per rank and microbatch, k = min(m, p):
      ((p-1)(T_F + T_B) - (k-1) T_W + (v-1)((p-k) T_F + max((p-k) T_B - k T_W, 0)))/v; (p-1)(T_F + T_B - T_W)/v for m >= p
    - peak memory: min((v-1)g + p, mv) stage activations on every rank; g = p if p divides m, so p microbatches

    Good for: replacing interleaved 1F1B if backward can be split into B and W; links that carry v times the messages without delay.

    Source: ScheduleInterleavedZeroBubble of torch.distributed.pipelining, which requires equal groups: the idea of ZB-H1
    (arXiv 2401.10241) in the order of interleaved 1F1B (arXiv 2104.04473).

    >>> from zerobubble import picture
    >>> print(picture(interleaved_zb(2, 4)))
    F0 F1 f0 f1 .  b0 w0 F2 b1 w1 F3 B0 W0 f2 B1 W1 f3 b2 w2 b3 w3 B2 W2 B3 W3
    .  F0 F1 f0 b0 f1 b1 w0 F2 B0 w1 F3 B1 W0 f2 b2 W1 f3 b3 w2 B2 w3 B3 W2 W3
    """
    rows = tuple(_row(rank, ranks, microbatches, stages_per_rank) for rank in range(ranks))
    return Schedule("interleaved-zb", Placement.looped(ranks, stages_per_rank), microbatches, rows)


def _row(rank: int, ranks: int, microbatches: int, loops: int) -> tuple[Op, ...]:
    groups = groups_of(microbatches, max(1, microbatches // ranks))
    stages = range(rank, ranks * loops, ranks)
    forward, backward, weight = (round_trips(kind, stages, groups) for kind in (Kind.F, Kind.B, Kind.W))
    warmup = (loops - 1) * len(groups[0]) + ranks - 1 - rank
    row = forward[:warmup]
    for k, back in enumerate(backward):
        row += forward[warmup + k : warmup + k + 1]
        row.append(back)
        if k >= rank:
            row.append(weight[k - rank])
    return tuple(row + weight[max(len(weight) - rank, 0) :])
