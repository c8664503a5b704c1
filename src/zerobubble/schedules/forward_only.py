"""Forward passes only, for inference."""

from zerobubble.ir import Kind, Op, Placement, Schedule
from zerobubble.schedules.recipe import OF_SHAPE


@OF_SHAPE
def forward_only(ranks: int, microbatches: int, stages_per_rank: int = 1) -> Schedule:
    """Forward passes only, for inference: no rank waits after its first microbatch arrives, and nothing is saved.

    Rank r of p with v stages, m microbatches: F x m on its first stage, then F x m on its second, and so on. With equal stages no
    order is faster. For m > p, m-p passes hide the messages between a rank's stages.

    - bubble (makespan), no communication: (p-1 + (v-1) max(p-m, 0)) T_F/v, T per rank and microbatch
    - peak memory of every rank: 0 stage activations, since nothing is saved for a backward

    Good for: evaluation and batched serving; one stage per rank needs the fewest messages, more stages shorten the fill.

    Source: the forward half of GPipe (arXiv 1811.06965) and, looped, of breadth-first (arXiv 2211.05953).

    >>> from zerobubble import picture
    >>> print(picture(forward_only(2, 3, 2)))
    F0 F1 F2 f0 f1 f2 .
    .  F0 F1 F2 f0 f1 f2
    """
    stages = ranks * stages_per_rank
    placement = Placement.linear(ranks) if stages == ranks else Placement.looped(ranks, stages_per_rank)
    rows = tuple(tuple(Op(Kind.F, s, j) for s in range(rank, stages, ranks) for j in range(microbatches)) for rank in range(ranks))
    return Schedule("forward-only", placement, microbatches, rows)
