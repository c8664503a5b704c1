"""The published blocks as data: for a number of ranks, where each pass of a microbatch stands.

Slots are for times of one slot for F, B and W. Where no other source is named, the offsets are those of Pipeline Parallelism with
Controllable Memory (arXiv 2405.15362): section 3 and tables 8 and 9, figure 18 for the gallery of older schedules.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from math import gcd

from zerobubble.blocks.block import Block, Start, path_slots
from zerobubble.errors import InputError, near
from zerobubble.ir import Kind, Op, Placement


def gpipe_block(ranks: int) -> Block:
    """All forwards of p microbatches, then all their backwards; the next p after that, since closer copies would collide."""
    forward = [[Start(Op(Kind.F, r, j), r + j) for j in range(ranks)] for r in range(ranks)]
    backward = [[Start(Op(Kind.BW, r, j), 2 * ranks - 1 + 2 * (ranks - 1 - r + j)) for j in range(ranks)] for r in range(ranks)]
    rows = tuple(tuple(f + b) for f, b in zip(forward, backward, strict=True))
    return Block("gpipe", Placement.linear(ranks), 3 * ranks + 3 * (ranks - 1), rows)


def one_f_one_b_block(ranks: int) -> Block:
    """1F1B: out one slot a rank, back two, so a stage lives three slots longer for every rank behind it."""
    return Block.of("1f1b", Placement.linear(ranks), 3, path_slots(0, (ranks - 1, 1), (1, 1), (ranks - 1, 2)), split=False)


def eager_1f1b_block(ranks: int) -> Block:
    """Eager 1F1B: a slot or two of slack on every hop, for messages to travel in."""
    return Block.of("eager-1f1b", Placement.linear(ranks), 3, path_slots(0, (ranks - 1, 2), (1, 1), (ranks - 1, 4)), split=False)


def zb_h1_block(ranks: int) -> Block:
    """ZB-H1: 1F1B's way, with W of rank r held back for r copies (arXiv 2401.10241, section 2)."""
    return Block("zb-h1", Placement.linear(ranks), 3, tuple(_held_back(r, r, 3 * ranks - 2 * r - 2, 3 * r) for r in range(ranks)))


def zb_h2_block(ranks: int) -> Block:
    """ZB-H2: twice the way back, with W of rank r held back for 2r copies (arXiv 2401.10241, section 2)."""
    return Block("zb-h2", Placement.linear(ranks), 3, tuple(_held_back(r, r, 6 * ranks - 5 * r - 5, 6 * r) for r in range(ranks)))


def _held_back(rank: int, forward: int, backward: int, wait: int) -> tuple[Start, ...]:
    weight = Start(Op(Kind.W, rank, 0), backward + 1 + wait)
    return Start(Op(Kind.F, rank, 0), forward), Start(Op(Kind.B, rank, 0), backward), weight


def v_min_block(ranks: int) -> Block:
    """V-Min: one slot a hop all the way; two slots of waiting at the loss where 3 divides p, or copies would collide."""
    return _vee("v-min", ranks, (1, 1), 1 + 2 * (ranks % 3 == 0), (1, 1), 1)


def v_half_block(ranks: int) -> Block:
    """V-Half: two slots a hop on the way out, one on the way home; three slots of waiting at the loss where p is even."""
    return _vee("v-half", ranks, (2, 1), 1 + 3 * (ranks % 2 == 0), (2, 1), 2)


def v_zb_block(ranks: int) -> Block:
    """V-ZB: four slots a hop on the way out, two on the way home, which never collide; the memory of 1F1B."""
    return _vee("v-zb", ranks, (4, 2), 1, (4, 2), 1)


def _vee(name: str, ranks: int, forward: tuple[int, int], loss: int, backward: tuple[int, int], turn: int) -> Block:
    """A block of the V: gaps out and home for F, at the loss on the first rank, out and home for B, and where B turns at the last."""
    hops = ranks - 1
    legs = [(hops, forward[0]), (1, 1), (hops, forward[1]), (1, loss), (hops, backward[0]), (1, turn), (hops, backward[1])]
    return Block.of(name, Placement.vee(ranks), 6, path_slots(0, *legs))


def one_f_one_b_v_block(ranks: int) -> Block:
    """1F1B-V: one slot a hop for F, two for BW, with three slots of waiting after every third BW, or copies would collide."""
    turn = 4 if ranks % 3 == 0 else 1
    gaps = [2 + 3 * ((k + 1 - ranks) % 3 == 0) for k in range(1, 2 * ranks)]
    slots = list(accumulate([*([1] * (2 * ranks - 1)), turn, *gaps], initial=0))
    return Block.of("1f1b-v", Placement.vee(ranks), 6, slots, split=False)


def two_thirds_block(ranks: int) -> Block:
    """Two thirds of 1F1B's memory on one stage a rank: pairs of microbatches, since one alone every three slots would collide.

    The paper tells that there is such a block, of pairs; these offsets are this project's own.
    """
    apart, turn = (4, 3) if ranks % 3 == 0 else (2, 1)
    pair = (path_slots(first, (ranks - 1, 1), (1, loss), (ranks - 1, 1)) for first, loss in ((0, turn), (apart, 1)))
    return Block.of("two-thirds", Placement.linear(ranks), 6, *pair)


def interleaved_uniform_block(ranks: int, stages_per_rank: int = 2) -> Block:
    """Interleaved 1F1B with one interval: waits where a microbatch comes round to the first rank keep copies from colliding."""
    v = stages_per_rank
    out = next(gap for gap in range(1, 9 * v) if _spreads(ranks - 1 + gap, v))
    home = next(gap for gap in range(2, 9 * v) if _spreads(2 * (ranks - 1) + gap, v))
    forward = [(ranks - 1, 1), *[(1, out), (ranks - 1, 1)] * (v - 1)]
    backward = [(ranks - 1, 2), *[(1, home), (ranks - 1, 2)] * (v - 1)]
    return Block.of("interleaved-uniform", Placement.looped(ranks, v), 3 * v, path_slots(0, *forward, (1, 1), *backward), split=False)


def _spreads(turn: int, count: int) -> bool:
    """Whether `count` visits `turn` slots apart fall on as many thirds of an interval of 3 x `count` slots."""
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


def known_block(name: str, ranks: int) -> Block:
    """The published block `name` for `ranks` ranks; raises `InputError` for an unknown name or no rank."""
    if name not in KNOWN:
        raise InputError(f"there is no block {name!r}: {near(name, KNOWN)}known are {', '.join(KNOWN)}")
    if ranks < 1:
        raise InputError(f"a block needs at least 1 rank, got {ranks}")
    return KNOWN[name](ranks)
