"""Interleaved 1F1B with half the lead between ranks."""

from zerobubble.ir import Kind, Op, Placement, Schedule
from zerobubble.schedules.orders import groups_of, round_trips


def interleaved_lean(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Interleaved 1F1B with each rank one forward ahead of the next, not two: the same bubble at 1F1B's memory.

    Microbatches go in max(1, m div p) groups of nearly equal size, g in the first, as in interleaved 1F1B. Rank r of p with v
    stages: F x (v-1)g + p-r, then BW F in turn, then the BW left. Messages get no slack: where they take time, each adds to every
    round, as in 1F1B.

    - bubble (gaps of rank 0, and makespan), no communication: (p-1 + (v-1) max(p-m, 0))(T_F + T_B + T_W)/v, T per rank and microbatch
    - peak memory of rank r: (v-1)g + min(p-r, m) stage activations, so p microbatches where p divides m, p-1 stage activations
      less than interleaved 1F1B; less has no looped schedule of this bubble with whole backward passes (p = 2 to 4, by exhaustion)

    Good for: interleaving on fast links, or where the last few activations do not fit.

    Source: this project; Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024, arXiv 2405.15362, tells that such a
    schedule exists.

    >>> from zerobubble import picture
    >>> print(picture(interleaved_lean(2, 4)))
    F0 F1 f0 f1 .  .  bw0   F2 bw1   F3 BW0   f2 BW1   f3 bw2   .  bw3   BW2   BW3
    .  F0 F1 f0 bw0   f1 bw1   F2 BW0   F3 BW1   f2 bw2   f3 bw3   BW2   BW3   .  .
    """
    placement = Placement.looped(ranks, stages_per_rank)
    groups = groups_of(microbatches, max(1, microbatches // ranks))
    lead = (stages_per_rank - 1) * len(groups[0])
    rows = tuple(_row(range(rank, placement.num_stages, ranks), lead + ranks - rank, groups) for rank in range(ranks))
    return Schedule("interleaved-lean", placement, microbatches, rows)


def _row(stages: range, ahead: int, groups: list[range]) -> tuple[Op, ...]:
    """`ahead` F, then BW and F in turn."""
    forward, backward = (round_trips(kind, stages, groups) for kind in (Kind.F, Kind.BW))
    row = forward[:ahead]
    for k, back in enumerate(backward):
        row += [back, *forward[ahead + k : ahead + k + 1]]
    return tuple(row)
