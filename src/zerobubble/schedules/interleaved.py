"""Interleaved 1F1B, also over slices (SlimPipe), its depth-first special case, and a variant with half the warm-up distance."""

from zerobubble.errors import InputError
from zerobubble.ir import Kind, Op, Placement, Schedule
from zerobubble.schedules.orders import groups_of, round_trips
from zerobubble.schedules.recipe import OF_SHAPE, OF_SLICES


@OF_SLICES
def interleaved_1f1b(ranks: int, microbatches: int, stages_per_rank: int = 2, group: int | None = None, slices: int = 1) -> Schedule:
    """Several stages per rank in a loop: a v times smaller bubble than 1F1B for v times the messages.

    Microbatches form groups of g. A group passes through the rank's first stage, then its second, and so on; backward mirrors that.
    Rank r of p with v stages: F x 2(p-r-1) + (v-1)g, then F BW in turn. By default there are max(1, m div p) groups of nearly equal
    size, g in the first. With `group`, a short last group runs as if it were full, skipping the missing microbatches. Raises
    `InputError` for a `group` below p-1, which would deadlock. Over n `slices` of a sequence, it is SlimPipe without its exchange of
    attention between ranks: the slices of one microbatch are a group, n-1 more F come first, and BW takes the slices in reverse order.

    - bubble (gaps of rank 0, and makespan), no communication, no group of fewer than min(p, m): (p-1 + (v-1) max(p-m, 0))
      (T_F + T_B + T_W)/v, T per rank and microbatch
    - the same over n >= p equal slices: (p-1)(T_F + T_B + T_W)/(vn)
    - peak memory of rank r: (v-1)g + min(2(p-r)-1, m) stage activations; g = p if p divides m and no `group` is given
    - the same over n slices: min(2(p-r-1) + vn, mvn) stage activations of a slice

    Good for: few microbatches per rank, on links that carry v times the messages without delay; over slices for very long sequences.

    Source: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM, SC 2021,
    arXiv 2104.04473, section 2.2; Li et al., SlimPipe, SC 2025, arXiv 2504.14519.

    >>> from zerobubble import picture
    >>> print(picture(interleaved_1f1b(2, 4)))
    F0 F1 f0 f1 F2 .  bw0   F3 bw1   f2 BW0   f3 BW1   .  bw2   .  bw3   BW2   BW3
    .  F0 F1 f0 bw0   f1 bw1   F2 BW0   F3 BW1   f2 bw2   f3 bw3   BW2   BW3   .  .
    """
    if slices > 1:
        return _over_slices(ranks, microbatches, stages_per_rank, group, slices)
    # Even groups have at least p microbatches if m >= p. A rank needs p of them to stay busy until its next group.
    even = groups_of(microbatches, max(1, microbatches // ranks))
    groups = even if group is None else _full_groups(ranks, microbatches, stages_per_rank, group)
    return _interleaved("interleaved-1f1b", ranks, microbatches, stages_per_rank, groups)


@OF_SHAPE
def depth_first(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Interleaved 1F1B in groups of exactly p: the least memory of that order, for a longer bubble unless p divides m.

    Interleaved 1F1B with `group` p, which is the default order if p divides m. A short last group leaves gaps.

    - bubble (gaps of rank 0, and makespan), no communication, p divides m: (p-1)(T_F + T_B + T_W)/v, T per rank and microbatch
    - makespan, no communication, v = 2, otherwise and m > p, T_F <= T_B + T_W: that and (p - m mod p)(T_B + T_W)/2
    - peak memory of rank r: (v-1) min(p, m) + min(2(p-r)-1, m) stage activations

    Good for: interleaving in little memory, with a number of microbatches that p does not divide.

    Source: Lamy-Poirier, Breadth-First Pipeline Parallelism, MLSys 2023, arXiv 2211.05953, which gave the order of arXiv 2104.04473 its
    name.

    >>> from zerobubble import picture
    >>> print(picture(depth_first(2, 3)))
    F0 F1 f0 f1 F2 .  bw0   .  bw1   f2 BW0   BW1   .  bw2   .  .  BW2
    .  F0 F1 f0 bw0   f1 bw1   F2 BW0   BW1   f2 bw2   .  .  BW2   .  .
    """
    groups = _full_groups(ranks, microbatches, stages_per_rank, ranks)
    return _interleaved("depth-first", ranks, microbatches, stages_per_rank, groups)


def _full_groups(ranks: int, microbatches: int, loops: int, group: int) -> list[range]:
    """Split the microbatches into groups of one size, of which the last may extend past the last microbatch."""
    least = max(1, min(ranks - 1, microbatches) if loops > 1 else 1)
    if group < least:
        raise InputError(
            ("interleaved-1f1b of {ranks} ranks needs groups of at least {least} microbatches, got {group}: smaller groups would deadlock"),
            ranks=ranks,
            least=least,
            group=group,
        )
    size = min(group, microbatches)
    return [range(first, first + size) for first in range(0, microbatches, size)]


def _interleaved(name: str, ranks: int, microbatches: int, loops: int, groups: list[range]) -> Schedule:
    """Build the schedule, dropping microbatches past the last: leaving out whole microbatches keeps an order legal."""
    rows = (_row(rank, ranks, loops, groups) for rank in range(ranks))
    kept = tuple(tuple(op for op in row if op.microbatch < microbatches) for row in rows)
    return Schedule(name, Placement.looped(ranks, loops), microbatches, kept)


def _over_slices(ranks: int, microbatches: int, loops: int, group: int | None, slices: int) -> Schedule:
    """Build the schedule in which the slices of each microbatch are a group."""
    if group is not None:
        raise InputError("the slices of a microbatch are a group, so group={group} contradicts slices", group=group, remedy="leave it out")
    if loops > 1 and slices < ranks:
        raise InputError(
            "interleaved-1f1b of {ranks} ranks needs at least {ranks} slices, got {slices}: fewer would leave gaps or deadlock",
            ranks=ranks,
            slices=slices,
            remedy="give more slices, or choose 1f1b",
        )
    groups = [range(first, first + slices) for first in range(0, microbatches * slices, slices)]
    rows = tuple(tuple(_row(rank, ranks, loops, groups, slices)) for rank in range(ranks))
    return Schedule("interleaved-1f1b", Placement.looped(ranks, loops), microbatches * slices, rows, slices=slices)


def _row(rank: int, ranks: int, loops: int, groups: list[range], slices: int = 1) -> list[Op]:
    stages, direction = range(rank, ranks * loops, ranks), -1 if slices > 1 else 1
    forward, backward = round_trips(Kind.F, stages, groups), round_trips(Kind.BW, stages, [group[::direction] for group in groups])
    warmup = 2 * (ranks - rank - 1) + (loops - 1) * len(groups[0]) + slices - 1
    row = forward[:warmup]
    for k, back in enumerate(backward):
        row += forward[warmup + k : warmup + k + 1]
        row.append(back)
    return row


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
    rows = tuple(_lean_row(range(rank, placement.num_stages, ranks), earlier_stages + ranks - rank, groups) for rank in range(ranks))
    return Schedule("interleaved-lean", placement, microbatches, rows)


def _lean_row(stages: range, warmup: int, groups: list[range]) -> tuple[Op, ...]:
    """Return `warmup` F, then BW and F in turn."""
    forward, backward = (round_trips(kind, stages, groups) for kind in (Kind.F, Kind.BW))
    row = forward[:warmup]
    for k, back in enumerate(backward):
        row += [back, *forward[warmup + k : warmup + k + 1]]
    return tuple(row)
