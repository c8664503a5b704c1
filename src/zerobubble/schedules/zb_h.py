"""ZB-H1 and ZB-H2: the handcrafted zero-bubble schedules."""

from zerobubble.ir import Kind, Op, Placement, Schedule
from zerobubble.schedules.orders import slices_in_reverse
from zerobubble.schedules.recipe import OF_SHAPE, OF_SLICES


@OF_SLICES
def zb_h1(ranks: int, microbatches: int, stages_per_rank: int = 1, slices: int = 1) -> Schedule:
    """Split backward with W delayed into the bubbles: a third of 1F1B's bubble at 1F1B's peak memory.

    Rank r of p: F x (p-r); then r times B F; then B W F until no F is left; then B W; then the remaining W. Over n `slices` of a sequence,
    n-1 more F come first, and the slices of a microbatch run B in reverse order.

    - bubble (largest span), no communication, T_W <= T_F and T_B: (p-1)(T_F + T_B) - (min(p, m)-1) T_W
    - the same over n equal slices, (m-1)n >= p-1: (p-1)(T_F + T_B - T_W)/n
    - bubble (largest span), c = T_comm, m > p, 2c <= T_W <= T_F + 2c and T_B + 2c: (p-1)(T_F + T_B - T_W + 4c)
    - makespan at unit times, no communication, m >= p: 3m + p - 1
    - peak memory: min(p, m) microbatches on every rank (memory held from B to W counts in full); over n slices min(p-1+n, mn)/n

    Good for: a smaller bubble in the memory of 1F1B; a drop-in replacement for 1F1B.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, arXiv 2401.10241, section 2 and Figure 3; slices as in Seq1F1B,
    NAACL 2025, arXiv 2406.03488.

    >>> from zerobubble import picture
    >>> print(picture(zb_h1(3, 4)))
    F0 F1 F2 .  .  B0 W0 F3 B1 W1 B2 W2 B3 W3
    .  F0 F1 .  B0 F2 B1 W0 F3 B2 W1 B3 W2 W3
    .  .  F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3
    """
    rows = tuple(_row(rank, ranks - rank, rank, microbatches, slices) for rank in range(ranks))
    return Schedule("zb-h1", Placement.linear(ranks), microbatches * slices, rows, slices=slices)


@OF_SHAPE
def zb_h2(ranks: int, microbatches: int, stages_per_rank: int = 1) -> Schedule:
    """No gap on any rank; needs nearly twice 1F1B's memory and an optimizer step without a barrier.

    Rank r of p: F x (2(p-r)-1); then 2r times B F; then B W F until no F is left; then B W; then the remaining W.

    - bubble (largest span), no communication, T_W <= T_F and T_B: (p-1)(T_F + T_B) - (min(2p-1, m)-1) T_W
    - bubble (largest span), c = T_comm, m >= 2p-1, T_W <= T_F and T_B, 2c <= T_F + T_B: (p-1)(T_F + T_B - 2 T_W + 2c)
    - makespan at unit times, no communication, m >= 2p-1: 3m + p - 1
    - peak memory: min(2p-1, m) microbatches on every rank (memory held from B to W counts in full)

    Good for: ranks with memory for nearly twice 1F1B's activations, and at least 2p-1 microbatches.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, arXiv 2401.10241, section 2 and Figure 3.

    >>> from zerobubble import picture
    >>> print(picture(zb_h2(3, 5)))
    F0 F1 F2 F3 F4 B0 W0 B1 W1 B2 W2 B3 W3 B4 W4 .  .
    .  F0 F1 F2 B0 F3 B1 F4 B2 W0 B3 W1 B4 W2 W3 W4 .
    .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 W0 W1 W2 W3 W4
    """
    rows = tuple(_row(rank, 2 * (ranks - rank) - 1, 2 * rank, microbatches) for rank in range(ranks))
    return Schedule("zb-h2", Placement.linear(ranks), microbatches, rows)


def _row(stage: int, ahead: int, delay: int, microbatches: int, slices: int = 1) -> tuple[Op, ...]:
    """Return the F of all but the last slice of a microbatch and of `ahead` more slices, then B and F in turn, each W `delay` B later."""
    forwards, order = [Op(Kind.F, stage, j) for j in range(microbatches * slices)], slices_in_reverse(microbatches, slices)
    warmup = slices - 1 + ahead
    row = forwards[:warmup]
    for place, j in enumerate(order):
        row.append(Op(Kind.B, stage, j))
        if place >= delay:
            row.append(Op(Kind.W, stage, order[place - delay]))
        row += forwards[warmup + place : warmup + place + 1]
    row += [Op(Kind.W, stage, j) for j in order[max(len(order) - delay, 0) :]]
    return tuple(row)
