"""Interleaved 1F1B (Megatron-LM, arXiv 2104.04473)."""

from itertools import pairwise

from zerobubble.ir import Kind, Op, Placement, Schedule


def interleaved_1f1b(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Several stages per rank in a loop: a v times smaller bubble than 1F1B for v times the messages.

    Microbatches go in groups of p (when p does not divide m: in max(1, m div p) groups of nearly equal size, g in the first):
    a group passes through the rank's first stage, then its second, and so on; backward mirrors that. Rank r of p with v
    stages: F x 2(p-r-1) + (v-1)g, then F BW in turn.

    - bubble (gaps of rank 0, and makespan), no communication: (p-1 + (v-1) max(p-m, 0)) (T_F + T_B + T_W)/v, T per rank and microbatch
    - peak memory of rank r: min(2(p-r-1) + (v-1)g + 1, mv) stage activations; g = p where p divides m

    >>> print(interleaved_1f1b(2, 2).to_text().split("microbatches 2")[1])
    <BLANKLINE>
    rank 0: 0F0 0F1 2F0 2F1 2BW0 2BW1 0BW0 0BW1
    rank 1: 1F0 1F1 3F0 3BW0 3F1 3BW1 1BW0 1BW1
    <BLANKLINE>
    """
    rows = tuple(_row(rank, ranks, microbatches, stages_per_rank) for rank in range(ranks))
    return Schedule("interleaved-1f1b", Placement.looped(ranks, stages_per_rank), microbatches, rows)


def _groups(ranks: int, microbatches: int) -> list[range]:
    """Cut the microbatches so that no group is shorter than p, which a rank needs to stay busy until its next group."""
    count = max(1, microbatches // ranks)
    ends = [k * (microbatches // count) + min(k, microbatches % count) for k in range(count + 1)]
    return [range(first, last) for first, last in pairwise(ends)]


def _row(rank: int, ranks: int, microbatches: int, loops: int) -> tuple[Op, ...]:
    groups = _groups(ranks, microbatches)
    forward = [Op(Kind.F, c * ranks + rank, j) for group in groups for c in range(loops) for j in group]
    backward = [Op(Kind.BW, c * ranks + rank, j) for group in groups for c in reversed(range(loops)) for j in group]
    warmup = min(2 * (ranks - rank - 1) + (loops - 1) * len(groups[0]), len(forward))
    row = forward[:warmup]
    for k, back in enumerate(backward):
        row += forward[warmup + k : warmup + k + 1]
        row.append(back)
    return tuple(row)
