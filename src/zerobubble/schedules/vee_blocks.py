"""V-Min, V-Half and V-ZB, the schedules of Pipeline Parallelism with Controllable Memory (arXiv 2405.15362)."""

from zerobubble.blocks import four_steps, known_block
from zerobubble.ir import Schedule
from zerobubble.schedules.recipe import OF_SHAPE


@OF_SHAPE
def v_min(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Two stages per rank in a V with the shortest hops: a third of 1F1B's memory, for a larger bubble.

    The block v-min, repeated, squeezed and reordered. Rank r of p holds stages r and 2p-1-r.

    - bubble (largest span, and makespan), unit stage times, no communication, p >= 2, m >= max(p, 3): 4p-5 stage passes, 4p-7 if
      3 divides p
    - peak memory of every rank: min(2m, 2 floor((p+4)/3)) stage activations, one less on rank 0 if p mod 3 = 2 and
      m >= 2 floor((p+4)/3) - 1

    Good for: models whose activations fit in no other schedule. If T_F, T_B and T_W differ widely, every copy of the block leaves a gap,
    so the bubble grows with m.

    Source: Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024, arXiv 2405.15362, section 3 and table 8.

    >>> from zerobubble import picture
    >>> print(picture(v_min(2, 4)))
    F0 F1 .  f0 b0 w0 .  B0 W0 f1 b1 w1 F2 B1 W1 f2 b2 w2 F3 B2 W2 f3 b3 w3 .  B3 W3
    .  F0 f0 .  .  b0 B0 F1 f1 w0 W0 b1 B1 F2 f2 w1 W1 b2 B2 F3 f3 w2 W2 b3 B3 w3 W3
    """
    return four_steps(known_block("v-min", ranks), microbatches).reordered.schedule


@OF_SHAPE
def v_half(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Two stages per rank in a V with even lifespans: half of 1F1B's memory and at most half of its bubble.

    The block v-half, repeated, squeezed and reordered. Rank r of p holds stages r and 2p-1-r.

    - bubble (largest span), unit stage times, no communication, p >= 3, m >= p: 3p-7 stage passes for even p, 3p-4 for odd p
    - peak memory of every rank: min(2m, 2 floor((p+2)/2)) stage activations

    Good for: half of 1F1B's activation memory at a higher speed, if 2 T_F <= T_W + 2 T_B and 2 T_B <= T_W + 2 T_F.

    Source: Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024, arXiv 2405.15362, section 3 and table 9.

    >>> from zerobubble import picture
    >>> print(picture(v_half(3, 4)))
    F0 F1 F2 .  .  f0 b0 w0 f1 b1 w1 .  B0 W0 F3 f2 b2 B1 w2 W1 .  f3 b3 B2 w3 W2 .  B3 W3
    .  F0 F1 .  f0 .  f1 b0 w0 F2 b1 B0 w1 W0 f2 F3 B1 b2 w2 W1 f3 .  B2 b3 w3 W2 B3 W3 .
    .  .  F0 f0 F1 f1 .  .  b0 w0 B0 W0 F2 f2 b1 B1 w1 F3 W1 f3 b2 B2 w2 W2 b3 B3 w3 W3 .
    """
    return four_steps(known_block("v-half", ranks), microbatches).reordered.schedule


@OF_SHAPE
def v_zb(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Two stages per rank in a V, with hops long enough for zero bubble if F, B and W take equal time; 1F1B's memory.

    The block v-zb, repeated, squeezed and reordered. Rank r of p holds stages r and 2p-1-r.

    - bubble (largest span), T_F = T_B = T_W, no communication, m >= 2p-1: 0
    - peak memory of every rank: min(2m, 2p) stage activations, so p microbatches

    Good for: the same use as zb-v, with a smaller bubble below 2p-1 microbatches.

    Source: Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024, arXiv 2405.15362, section 3.

    >>> from zerobubble import picture
    >>> print(picture(v_zb(2, 4)))
    F0 F1 F2 f0 b0 w0 f1 b1 B0 w1 W0 F3 f2 b2 B1 w2 W1 f3 b3 B2 w3 B3 W2 W3 .
    .  F0 f0 F1 f1 b0 B0 w0 W0 F2 f2 b1 B1 w1 F3 W1 f3 b2 B2 b3 B3 w2 w3 W2 W3
    """
    return four_steps(known_block("v-zb", ranks), microbatches).reordered.schedule
