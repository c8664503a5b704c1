"""Two thirds of 1F1B's memory on one stage per rank."""

from zerobubble.blocks import four_steps, known_block
from zerobubble.ir import Schedule
from zerobubble.schedules.recipe import OF_SHAPE


@OF_SHAPE
def two_thirds(ranks: int, microbatches: int, stages_per_rank: int = 1) -> Schedule:
    """Split backward on one stage per rank: two thirds of 1F1B's memory and a smaller bubble than 1F1B.

    The block two-thirds, a pair of microbatches, repeated, squeezed and reordered.

    - bubble (largest span, and makespan), T_F = T_B = T_W, no communication, p >= 2, m >= p: 2p-3 passes for even m; for odd m
      2p-4 if 3 divides p, else 2p-2; 1F1B has 3(p-1)
    - peak memory, maximum over ranks: min(m, floor((2p+1)/3) + 1) microbatches

    Good for: saving memory without a V, which needs a second stage per rank and more messages.

    Source: Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024, arXiv 2405.15362, mention that such a schedule exists;
    the offsets are this project's.

    >>> from zerobubble import picture
    >>> print(picture(two_thirds(3, 4)))
    F0 F1 F2 .  .  B0 W0 B1 F3 B2 W1 W2 .  B3 W3
    .  F0 F1 .  B0 F2 B1 W0 B2 F3 W1 W2 B3 W3 .
    .  .  F0 B0 F1 B1 F2 B2 W0 W1 F3 B3 W2 W3 .
    """
    return four_steps(known_block("two-thirds", ranks), microbatches).reordered.schedule
