"""Tables of the pairs of axes that cannot be planned or run together, with reasons and remedies."""

from __future__ import annotations

from collections.abc import Collection, Mapping
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

NOT_RUN = {
    ("sharded", "head"): "the head is already divided over the ranks",
    ("head", "host"): "offload moves activations of stages only",
}
"""Pairs of axes that can be planned but that no pipeline runs yet, with the reason. Only a divided head counts: a whole one is a layer."""
_RUN = {"sharded": "weights in shards", "head": "a divided head", "host": "offload"}


def not_run(used: Collection[str]) -> tuple[str, ...]:
    """A sentence with reason and remedy for each pair of the axes `used` that no pipeline runs.

    >>> not_run({"sharded", "shares"})
    ()
    >>> not_run({"head", "host"})
    ('No pipeline runs a divided head with offload yet: offload moves activations of stages only. To run the plan, leave one of the two \
out, or include the head in the last stage or layer.',)
    """
    pairs = [(one, other) for one, other in NOT_RUN if one in used and other in used]
    remedy = "To run the plan, leave one of the two out, or include the head in the last stage or layer"
    return tuple(
        f"No pipeline runs a divided head with {_RUN[one if other == 'head' else other]} yet: {NOT_RUN[one, other]}. {remedy}."
        for one, other in pairs
    )


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
