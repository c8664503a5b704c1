"""What is planned together: one table of the axes of a problem, with the pairs that are not, and what to do instead."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

from zerobubble.errors import InputError

_APART = "BW's are placed among F, B and W of microbatches that are alike, and alone; costs.with_columns(fused=()) are without"
_EVEN = "ranks divide a head into equal parts, whatever their speed; a head that is the last of the layers is planned with speeds"

AXES = ("layers", "speeds", "links", "baseline", "sharded", "shares", "recompute", "head", "host", "fused", "period", "noise", "what_if")
"""What a plan may be asked for beyond costs, placements and memory; `period` is that objective, asked for by its name."""

NOT_TOGETHER = {
    ("speeds", "head"): _EVEN,
    ("shares", "fused"): _APART,
    ("recompute", "fused"): _APART,
}
"""Each pair of axes that is not planned together: why, and what helps besides leaving one of the two out."""


def refuse_pairs(asked: Mapping[str, str]) -> None:
    """Raise `InputError` with all pairs of the axes `asked`, each under the name that it was asked by, that are not planned together.

    >>> refuse_pairs({"shares": "shares", "recompute": "recompute"})
    >>> refuse_pairs({"shares": "--microbatch-costs", "fused": "--fused"})
    Traceback (most recent call last):
    ...
    zerobubble.errors.InputError: --microbatch-costs is not planned together with --fused (BW's are placed among F, B and W of \
microbatches that are alike, and alone; costs.with_columns(fused=()) are without): leave one of the two out
    """
    pairs = [(one, other) for one, other in combinations([axis for axis in AXES if axis in asked], 2) if (one, other) in NOT_TOGETHER]
    if pairs:
        each = [f"{asked[one]} is not planned together with {asked[other]} ({NOT_TOGETHER[one, other]})" for one, other in pairs]
        raise InputError(f"{'; '.join(each)}: leave one of {'the two' if len(pairs) == 1 else 'each two'} out")
