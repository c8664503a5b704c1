"""1F1B, also over slices of a sequence (Seq1F1B), eager 1F1B, and 1F1B on a V."""

from zerobubble.blocks import four_steps, known_block
from zerobubble.ir import Kind, Op, Placement, Schedule
from zerobubble.schedules.orders import slices_in_reverse
from zerobubble.schedules.recipe import OF_SHAPE, OF_SLICES


@OF_SLICES
def one_f_one_b(ranks: int, microbatches: int, stages_per_rank: int = 1, slices: int = 1) -> Schedule:
    """One forward and one backward in turn, after a short warm-up: GPipe's bubble with at most p microbatches in memory.

    Rank r of p, m microbatches: F x min(p-1-r, m), then F BW in turn, then the remaining BW. Over n `slices` of a sequence, it is Seq1F1B:
    F x min(p-2-r+n, mn), then F BW in turn, then the remaining BW, where the slices of a microbatch run BW in reverse order.

    - bubble (gaps of rank 0, and makespan), no communication: (p-1)(T_F + T_B + T_W)
    - the same over n equal slices: (p-1)(T_F + T_B + T_W)/n
    - makespan if p > 1 divides m: an additional 2((p-1)m/p + p-2) T_comm, which grows with m
    - peak memory of rank r: min(p-r, m) microbatches; over n slices min(p-r-1+n, mn)/n

    Good for: fast links, and as the baseline for other schedules; over slices for few long sequences.

    Source: Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training (PipeDream-flush), ICML 2021, arXiv 2006.09503;
    Fan et al., DAPPLE, PPoPP 2021, arXiv 2007.01045; Sun et al., Seq1F1B, NAACL 2025, arXiv 2406.03488.

    >>> from zerobubble import picture
    >>> print(picture(one_f_one_b(2, 3)))
    F0 F1 .  .  BW0   F2 BW1   .  BW2
    .  F0 BW0   F1 BW1   F2 BW2   .  .
    """
    rows = tuple(_in_turn(rank, ranks - 1 - rank, microbatches, slices) for rank in range(ranks))
    return Schedule("1f1b", Placement.linear(ranks), microbatches * slices, rows, slices=slices)


@OF_SHAPE
def eager_1f1b(ranks: int, microbatches: int, stages_per_rank: int = 1) -> Schedule:
    """1F1B with twice the warm-up: forwards hide the messages, for nearly twice the memory on the first ranks.

    Rank r of p, m microbatches: F x min(2(p-1-r), m), then F BW in turn, then the remaining BW.

    - bubble (gaps of rank 0, and makespan), 2 T_comm <= T_F + T_B + T_W: (p-1)(T_F + T_B + T_W + 2 T_comm)
    - peak memory of rank r: min(2(p-r)-1, m) microbatches

    Good for: slow links between ranks with spare memory.

    Source: Zhuang et al., On Optimizing the Communication of Model Parallelism, MLSys 2023, arXiv 2211.05322.

    >>> from zerobubble import picture
    >>> print(picture(eager_1f1b(2, 3)))
    F0 F1 F2 .  BW0   .  BW1   .  BW2
    .  F0 BW0   F1 BW1   F2 BW2   .  .
    """
    rows = tuple(_in_turn(rank, 2 * (ranks - 1 - rank), microbatches) for rank in range(ranks))
    return Schedule("eager-1f1b", Placement.linear(ranks), microbatches, rows)


def _in_turn(stage: int, ahead: int, microbatches: int, slices: int = 1) -> tuple[Op, ...]:
    """Return the forwards of all but the last slice of a microbatch and of `ahead` more slices, then F and BW in turn."""
    forwards, warmup = [Op(Kind.F, stage, j) for j in range(microbatches * slices)], slices - 1 + ahead
    row = forwards[:warmup]
    for place, j in enumerate(slices_in_reverse(microbatches, slices), warmup):
        row += forwards[place : place + 1]
        row.append(Op(Kind.BW, stage, j))
    return tuple(row)


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
