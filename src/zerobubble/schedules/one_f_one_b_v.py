"""1F1B-V: 1F1B on a V."""

from zerobubble.blocks import four_steps, known_block
from zerobubble.ir import Schedule
from zerobubble.schedules.recipe import OF_SHAPE


@OF_SHAPE
def one_f_one_b_v(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """1F1B on two stages per rank in a V: two thirds of 1F1B's memory and a smaller bubble, with unsplit backward passes.

    The block 1f1b-v, repeated, squeezed and reordered, including its steady phase. Rank r of p holds stages r and 2p-1-r.

    - bubble (largest span, and makespan), T_F = T_B = T_W, no communication, p >= 3, m >= p: 5(p-1) stage passes if p mod 3 = 1,
      otherwise at most 5p-7; 1F1B has 6(p-1)
    - peak memory of rank r: min(2m, m + 1 + floor(3r/2), 2 floor(2p/3) + 2) stage activations

    Good for: saving memory if backward cannot be split into B and W.

    Source: Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024, arXiv 2405.15362, section 3 and its published code.

    >>> from zerobubble import picture
    >>> print(picture(one_f_one_b_v(2, 4)))
    F0 F1 F2 f0 bw0   f1 bw1   F3 BW0   f2 bw2   .  BW1   f3 bw3   .  BW2   .  .  BW3
    .  F0 f0 F1 f1 .  bw0   BW0   F2 f2 bw1   BW1   F3 f3 bw2   BW2   bw3   BW3   .  .
    """
    return four_steps(known_block("1f1b-v", ranks), microbatches, keep_steady_phase=False).reordered.schedule
