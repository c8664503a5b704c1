"""What is planned and run together: tables of the pairs of axes that are not, and what to do instead."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import combinations

from zerobubble.errors import InputError

_EVEN = "ranks divide a head into equal parts, whatever their speed; a head that is the last of the layers is planned with speeds"

AXES = ("layers", "speeds", "links", "baseline", "sharded", "shares", "recompute", "head", "host", "fused", "period", "noise", "what_if")
"""What a plan may be asked for beyond costs, placements and memory; `period` is that objective, asked for by its name."""

NOT_TOGETHER = {("speeds", "head"): _EVEN}
"""Each pair of axes that is not planned together: why, and what helps besides leaving one of the two out."""

NOT_RUN = {
    ("sharded", "head"): "its ranks already divide the head",
    ("head", "host"): "offloads are made for passes of stages alone",
}
"""Each pair of axes that is planned and that no pipeline runs yet, and why. A head counts if it is divided: a whole one is a layer."""
_RUN = {"sharded": "weights in shards", "head": "a divided head", "host": "offload"}


def not_run(used: Collection[str]) -> tuple[str, ...]:
    """A sentence for each pair of the axes `used` by a schedule that no pipeline runs, with the reason and the remedy.

    >>> not_run({"sharded", "shares"})
    ()
    >>> not_run({"head", "host"})
    ('No pipeline runs a divided head with offload yet: offloads are made for passes of stages alone. To run the plan, leave one of the \
two out, or count the head in the last stage or layer.',)
    """
    pairs = [(one, other) for one, other in NOT_RUN if one in used and other in used]
    remedy = "To run the plan, leave one of the two out, or count the head in the last stage or layer"
    return tuple(
        f"No pipeline runs a divided head with {_RUN[one if other == 'head' else other]} yet: {NOT_RUN[one, other]}. {remedy}."
        for one, other in pairs
    )


def refuse_pairs(asked: Mapping[str, str]) -> None:
    """Raise `InputError` with all pairs of the axes `asked`, each under the name that it was asked by, that are not planned together.

    >>> refuse_pairs({"shares": "shares", "recompute": "recompute"})
    >>> refuse_pairs({"speeds": "--speeds", "head": "--head"})
    Traceback (most recent call last):
    ...
    zerobubble.errors.InputError: --speeds is not planned together with --head (ranks divide a head into equal parts, whatever their \
speed; a head that is the last of the layers is planned with speeds): leave one of the two out
    """
    pairs = [(one, other) for one, other in combinations([axis for axis in AXES if axis in asked], 2) if (one, other) in NOT_TOGETHER]
    if pairs:
        each = [f"{asked[one]} is not planned together with {asked[other]} ({NOT_TOGETHER[one, other]})" for one, other in pairs]
        raise InputError(f"{'; '.join(each)}: leave one of {'the two' if len(pairs) == 1 else 'each two'} out")
