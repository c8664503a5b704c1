"""Tables of the pairs of axes that cannot be planned or run together, with reasons and remedies."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

from zerobubble.errors import InputError

_EVEN = "a divided head has equal parts on all ranks; give a head as the last layer to plan it with speeds"

AXES = ("layers", "speeds", "links", "baseline", "sharded", "shares", "recompute", "head", "host", "fused", "slices", "period", "what_if")
"""Axes that a plan may include in addition to costs, placements and memory. `period` is the objective of that name, if requested."""

_WHOLE = "it is planned for whole microbatches"

NOT_TOGETHER = {
    ("speeds", "head"): _EVEN,
    **{(axis, "slices"): _WHOLE for axis in ("layers", "speeds", "baseline", "sharded", "shares", "recompute", "head", "host")},
    ("slices", "what_if"): "times are varied for whole microbatches",
}
"""Pairs of axes that cannot be planned together, each with the reason and how to avoid it."""


def refuse_pairs(asked: Mapping[str, str]) -> None:
    """Raises `InputError` with all pairs of the axes `asked`, by the names of their arguments, that cannot be planned together.

    >>> refuse_pairs({"shares": "shares", "recompute": "recompute"})
    >>> refuse_pairs({"speeds": "--speeds", "head": "--head"})
    Traceback (most recent call last):
    ...
    zerobubble.errors.InputError: --speeds cannot be planned with --head (a divided head has equal parts on all ranks; give a head as the \
last layer to plan it with speeds): leave one of the two out
    """
    pairs = [(one, other) for one, other in combinations([axis for axis in AXES if axis in asked], 2) if (one, other) in NOT_TOGETHER]
    if pairs:
        each = [f"{asked[one]} cannot be planned with {asked[other]} ({NOT_TOGETHER[one, other]})" for one, other in pairs]
        raise InputError("{each}: leave one of {which} out", each="; ".join(each), which="the two" if len(pairs) == 1 else "each two")
