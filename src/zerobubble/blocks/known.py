"""The published blocks: functions from the number of ranks to the slots of the passes of a microbatch.

F, B and W take one slot each. Unless another source is given, the offsets come from Pipeline Parallelism with Controllable Memory
(arXiv 2405.15362): section 3, tables 8 and 9, and figure 18 for older schedules.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from math import gcd

from zerobubble.arguments import WHOLE, takes
from zerobubble.blocks.block import Block, Start, path_slots
from zerobubble.errors import InputError, near
from zerobubble.ir import Kind, Op, Placement


def gpipe_block(ranks: int) -> Block:
    """GPipe: all forwards of p microbatches, then all their backwards. The next p follow after that, to avoid collisions."""
    forward = [[Start(Op(Kind.F, r, j), r + j) for j in range(ranks)] for r in range(ranks)]
    backward = [[Start(Op(Kind.BW, r, j), 2 * ranks - 1 + 2 * (ranks - 1 - r + j)) for j in range(ranks)] for r in range(ranks)]
    rows = tuple(tuple(f + b) for f, b in zip(forward, backward, strict=True))
    return Block("gpipe", Placement.linear(ranks), 3 * ranks + 3 * (ranks - 1), rows)


def one_f_one_b_block(ranks: int) -> Block:
    """1F1B: F moves one rank per slot, BW one rank per two slots, so lifespans grow by three slots from each rank to the previous one."""
    return Block.from_paths("1f1b", Placement.linear(ranks), 3, path_slots(0, (ranks - 1, 1), (1, 1), (ranks - 1, 2)), split=False)


def eager_1f1b_block(ranks: int) -> Block:
    """Eager 1F1B: one or two slots of slack on every hop, which hide messages."""
    return Block.from_paths("eager-1f1b", Placement.linear(ranks), 3, path_slots(0, (ranks - 1, 2), (1, 1), (ranks - 1, 4)), split=False)


def zb_h1_block(ranks: int) -> Block:
    """ZB-H1: the path of 1F1B, with W of rank r delayed by r intervals (arXiv 2401.10241, section 2)."""
    return Block("zb-h1", Placement.linear(ranks), 3, tuple(_with_delayed_w(r, r, 3 * ranks - 2 * r - 2, 3 * r) for r in range(ranks)))


def zb_h2_block(ranks: int) -> Block:
    """ZB-H2: B moves one rank per five slots (ZB-H1: two), with W of rank r delayed by 2r intervals (arXiv 2401.10241, section 2)."""
    return Block("zb-h2", Placement.linear(ranks), 3, tuple(_with_delayed_w(r, r, 6 * ranks - 5 * r - 5, 6 * r) for r in range(ranks)))


def _with_delayed_w(rank: int, forward: int, backward: int, wait: int) -> tuple[Start, ...]:
    weight = Start(Op(Kind.W, rank, 0), backward + 1 + wait)
    return Start(Op(Kind.F, rank, 0), forward), Start(Op(Kind.B, rank, 0), backward), weight


def v_min_block(ranks: int) -> Block:
    """V-Min: one slot per hop. If 3 divides p, two slots of waiting at the loss avoid collisions."""
    return _vee("v-min", ranks, (1, 1), 1 + 2 * (ranks % 3 == 0), (1, 1), 1)


def v_half_block(ranks: int) -> Block:
    """V-Half: two slots per hop down the ranks, one back up. If p is even, three slots of waiting at the loss avoid collisions."""
    return _vee("v-half", ranks, (2, 1), 1 + 3 * (ranks % 2 == 0), (2, 1), 2)


def v_zb_block(ranks: int) -> Block:
    """V-ZB: four slots per hop down the ranks, two back up, which never collide; the memory of 1F1B."""
    return _vee("v-zb", ranks, (4, 2), 1, (4, 2), 1)


def _vee(name: str, ranks: int, forward: tuple[int, int], loss: int, backward: tuple[int, int], turn: int) -> Block:
    """Return a block on the V, given the gaps of F and B down the ranks and back up, at the loss on the first rank, and at B's turn."""
    hops = ranks - 1
    runs = [(hops, forward[0]), (1, 1), (hops, forward[1]), (1, loss), (hops, backward[0]), (1, turn), (hops, backward[1])]
    return Block.from_paths(name, Placement.vee(ranks), 6, path_slots(0, *runs))


def one_f_one_b_v_block(ranks: int) -> Block:
    """1F1B-V: one slot per hop for F, two for BW. Three slots of waiting after every third BW avoid collisions."""
    turn = 4 if ranks % 3 == 0 else 1
    gaps = [2 + 3 * ((k + 1 - ranks) % 3 == 0) for k in range(1, 2 * ranks)]
    slots = list(accumulate([*([1] * (2 * ranks - 1)), turn, *gaps], initial=0))
    return Block.from_paths("1f1b-v", Placement.vee(ranks), 6, slots, split=False)


def two_thirds_block(ranks: int) -> Block:
    """Two thirds of 1F1B's memory on one stage per rank. Copies of a single microbatch every three slots would collide, so it has pairs.

    The paper mentions a block of pairs without its offsets. These offsets are this project's own.
    """
    apart, turn = (4, 3) if ranks % 3 == 0 else (2, 1)
    pair = (path_slots(first, (ranks - 1, 1), (1, loss), (ranks - 1, 1)) for first, loss in ((0, turn), (apart, 1)))
    return Block.from_paths("two-thirds", Placement.linear(ranks), 6, *pair)


def interleaved_uniform_block(ranks: int, stages_per_rank: int = 2) -> Block:
    """Interleaved 1F1B with a constant interval. Waits where a microbatch returns to the first rank avoid collisions."""
    v = stages_per_rank
    forward_gap = next(gap for gap in range(1, 9 * v) if _spreads(ranks - 1 + gap, v))
    backward_gap = next(gap for gap in range(2, 9 * v) if _spreads(2 * (ranks - 1) + gap, v))
    forward = [(ranks - 1, 1), *[(1, forward_gap), (ranks - 1, 1)] * (v - 1)]
    backward = [(ranks - 1, 2), *[(1, backward_gap), (ranks - 1, 2)] * (v - 1)]
    return Block.from_paths(
        "interleaved-uniform", Placement.looped(ranks, v), 3 * v, path_slots(0, *forward, (1, 1), *backward), split=False
    )


def _spreads(turn: int, count: int) -> bool:
    """Return whether `count` visits, `turn` slots apart, begin at different multiples of 3, modulo 3 x `count` slots."""
    return turn % 3 == 0 and gcd(turn // 3, count) == 1


KNOWN: dict[str, Callable[[int], Block]] = {
    "gpipe": gpipe_block,
    "1f1b": one_f_one_b_block,
    "eager-1f1b": eager_1f1b_block,
    "interleaved-uniform": interleaved_uniform_block,
    "zb-h1": zb_h1_block,
    "zb-h2": zb_h2_block,
    "two-thirds": two_thirds_block,
    "1f1b-v": one_f_one_b_v_block,
    "v-min": v_min_block,
    "v-half": v_half_block,
    "v-zb": v_zb_block,
}
"""The published blocks as functions of the number of ranks, by name."""


@takes(name=str, ranks=WHOLE)
def known_block(name: str, ranks: int) -> Block:
    """Return the published block `name` for `ranks` ranks; raises `InputError` for an unknown name or less than 1 rank."""
    if name not in KNOWN:
        raise InputError("there is no block {name!r}: {hint}known are {known}", name=name, hint=near(name, KNOWN), known=", ".join(KNOWN))
    if ranks < 1:
        raise InputError("a block needs at least 1 rank, got {got}", got=ranks)
    return KNOWN[name](ranks)
