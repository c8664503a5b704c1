"""Interleaved 1F1B with half the warm-up distance between ranks."""

from zerobubble.ir import Kind, Op, Placement, Schedule
from zerobubble.schedules.orders import groups_of, round_trips
from zerobubble.schedules.recipe import OF_SHAPE


@OF_SHAPE
def interleaved_lean(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Interleaved 1F1B with each rank one forward ahead of the next instead of two: the same bubble at 1F1B's memory.

    Microbatches form max(1, m div p) groups of nearly equal size, g in the first, as in interleaved 1F1B. Rank r of p with v
    stages: F x (v-1)g + p-r, then BW F in turn, then the remaining BW. Messages have no slack: as in 1F1B, their time adds to every
    round.

    - bubble (gaps of rank 0, and makespan), no communication: (p-1 + (v-1) max(p-m, 0))(T_F + T_B + T_W)/v, T per rank and microbatch
    - peak memory of rank r: (v-1)g + min(p-r, m) stage activations, so p microbatches if p divides m, which is p-1 stage activations
      less than interleaved 1F1B; no looped schedule with this bubble and unsplit backward passes needs less (p = 2 to 4, by exhaustion)

    Good for: interleaving on fast links, or if interleaved 1F1B is a few activations over the memory limit.

    Source: this project; Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024, arXiv 2405.15362, mention that such a
    schedule exists.

    >>> from zerobubble import picture
    >>> print(picture(interleaved_lean(2, 4)))
    F0 F1 f0 f1 .  .  bw0   F2 bw1   F3 BW0   f2 BW1   f3 bw2   .  bw3   BW2   BW3
    .  F0 F1 f0 bw0   f1 bw1   F2 BW0   F3 BW1   f2 bw2   f3 bw3   BW2   BW3   .  .
    """
    placement = Placement.looped(ranks, stages_per_rank)
    groups = groups_of(microbatches, max(1, microbatches // ranks))
    earlier_stages = (stages_per_rank - 1) * len(groups[0])
    rows = tuple(_row(range(rank, placement.num_stages, ranks), earlier_stages + ranks - rank, groups) for rank in range(ranks))
    return Schedule("interleaved-lean", placement, microbatches, rows)


def _row(stages: range, warmup: int, groups: list[range]) -> tuple[Op, ...]:
    """Return `warmup` F, then BW and F in turn."""
    forward, backward = (round_trips(kind, stages, groups) for kind in (Kind.F, Kind.BW))
    row = forward[:warmup]
    for k, back in enumerate(backward):
        row += [back, *forward[warmup + k : warmup + k + 1]]
    return tuple(row)
