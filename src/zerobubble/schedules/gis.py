"""GIS and GIS-H, the generalized interleaved schedules of PipeOffload."""

from zerobubble.ir import Kind, Op, Placement, Schedule
from zerobubble.schedules.orders import groups_of, round_trips
from zerobubble.schedules.recipe import OF_SHAPE


@OF_SHAPE
def gis(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Interleaving in which B sends its gradient before W runs: smaller bubble and less memory than interleaved 1F1B.

    Microbatches form the fewest possible groups of at most p, of nearly equal size: g in the first, h in the last. A group passes
    through the rank's first stage, then its second, and so on; B and W mirror that. Rank r of p with v stages: F x (v-1)g + p-r,
    then B W F in turn, then the remaining B W.

    - bubble (makespan), no communication, T per rank and microbatch, p divides m: (p-1)(T_F + T_B)/v
    - bubble (makespan) otherwise, |T_F - T_B| <= T_W <= max(T_F, T_B): that and (v-1)((p-g) T_F + max((p-h) T_B - h T_W, 0))/v
    - peak memory of rank r: min((v-1)g + p-r, mv) stage activations, never more than p microbatches

    Good for: interleaving in little memory. W runs right after B, so memory is freed at once even if B and W are hard to separate.

    Source: Wan et al., PipeOffload, ICML 2025, arXiv 2503.01328, which adds offloading to the host on top.

    >>> from zerobubble import picture
    >>> print(picture(gis(2, 4)))
    F0 F1 f0 f1 .  b0 w0 F2 b1 w1 F3 B0 W0 f2 B1 W1 f3 b2 w2 .  b3 w3 B2 W2 B3 W3
    .  F0 F1 f0 b0 w0 f1 b1 w1 F2 B0 W0 F3 B1 W1 f2 b2 w2 f3 b3 w3 B2 W2 B3 W3 .
    """
    groups = groups_of(microbatches, -(-microbatches // ranks))
    return _schedule("gis", ranks, microbatches, stages_per_rank, groups)


@OF_SHAPE
def gis_h(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """GIS in groups half as large: close to half the memory of GIS, for a larger bubble that does not grow with m.

    The rule of GIS with the smallest groups that keep ranks busy between groups: max(1, m div ceil(p/2)) groups of nearly equal size,
    g in the first.

    - bubble (makespan), no communication, T per rank and microbatch, |T_F - T_B| <= T_W <= max(T_F, T_B), all groups of g:
      ((p-1)(T_F + T_B) + (v-1)((p-g) T_F + max((p-g) T_B - g T_W, 0)))/v
    - bubble (makespan), p even, p/2 divides m, |T_F - T_B| <= T_W <= T_B: ((p-1)(T_F + T_B) + (v-1)p (T_F + T_B - T_W)/2)/v
    - peak memory of rank r: min((v-1)g + p-r, mv) stage activations; for even p and m >= p divisible by p/2, at most
      (v+1)/(2v) of p microbatches

    Good for: several stages per rank and many microbatches, if GIS does not fit in memory.

    Source: Wan et al., PipeOffload, ICML 2025, arXiv 2503.01328, which adds offloading to the host on top.

    >>> from zerobubble import picture
    >>> print(picture(gis_h(4, 4)))
    F0 F1 .  .  f0 f1 F2 F3 .  .  .  b0 w0 .  f2 b1 w1 f3 B0 W0 B1 W1 .  b2 w2 .  b3 w3 B2 W2 B3 W3
    .  F0 F1 .  .  f0 f1 F2 .  .  b0 w0 F3 b1 w1 f2 B0 W0 f3 B1 W1 .  b2 w2 .  b3 w3 B2 W2 B3 W3 .
    .  .  F0 F1 .  .  f0 f1 .  b0 w0 F2 b1 w1 F3 B0 W0 f2 B1 W1 f3 b2 w2 .  b3 w3 B2 W2 B3 W3 .  .
    .  .  .  F0 F1 .  .  f0 b0 w0 f1 b1 w1 F2 B0 W0 F3 B1 W1 f2 b2 w2 f3 b3 w3 B2 W2 B3 W3 .  .  .
    """
    groups = groups_of(microbatches, max(1, microbatches // -(-ranks // 2)))
    return _schedule("gis-h", ranks, microbatches, stages_per_rank, groups)


def _schedule(name: str, ranks: int, microbatches: int, loops: int, groups: list[range]) -> Schedule:
    rows = tuple(_row(range(rank, ranks * loops, ranks), (loops - 1) * len(groups[0]) + ranks - rank, groups) for rank in range(ranks))
    return Schedule(name, Placement.looped(ranks, loops), microbatches, rows)


def _row(stages: range, warmup: int, groups: list[range]) -> tuple[Op, ...]:
    forward, backward, weight = (round_trips(kind, stages, groups) for kind in (Kind.F, Kind.B, Kind.W))
    row = forward[:warmup]
    for k, pair in enumerate(zip(backward, weight, strict=True)):
        row += [*pair, *forward[warmup + k : warmup + k + 1]]
    return tuple(row)
