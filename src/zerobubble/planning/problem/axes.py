"""What is planned together: one table of the axes of a problem, with the pairs that are not, and what to do instead."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

from zerobubble.errors import InputError

_IN_TURN = "plan the layers alone, and give the costs of that plan with the rest"
_HEAD_ALONE = "both ways to place a head are planned for stages alone"
_HOST_ALONE = "what goes to the host is chosen for passes that are alike, of stages alone"

_APART = "BW's are placed among F, B and W of microbatches that are alike, and alone; costs.with_columns(fused=()) are without"

AXES = ("layers", "baseline", "sharded", "shares", "recompute", "head", "host", "fused", "period", "noise", "what_if")
"""What a plan may be asked for beyond costs, placements and memory; `period` is that objective, asked for by its name."""

NOT_TOGETHER = {
    ("layers", "baseline"): f"the planners of the papers cut no layers: {_IN_TURN}",
    ("layers", "sharded"): f"the cut says which stage has which weights: {_IN_TURN}",
    ("layers", "shares"): f"layers are balanced for microbatches that are alike: {_IN_TURN}",
    ("layers", "recompute"): f"layers are cut by their times and bytes without R: {_IN_TURN}",
    ("layers", "head"): f"layers are cut with the head whole among them: {_IN_TURN}",
    ("layers", "host"): f"layers are cut for what fits without the host: {_IN_TURN}",
    ("layers", "noise"): f"an order is made robust for stages that stay: {_IN_TURN}",
    ("baseline", "sharded"): "the planners of the papers know nothing of gathers: `zerobubble show` with --weights counts those of a plan",
    ("baseline", "shares"): "the planners of the papers take all microbatches for alike",
    ("baseline", "recompute"): "the planners of the papers place no R: zb.schedules.with_recompute puts R's into a baseline's schedule",
    ("baseline", "head"): _HEAD_ALONE,
    ("baseline", "host"): _HOST_ALONE,
    ("sharded", "shares"): "gathers are chosen for microbatches that are alike",
    ("sharded", "recompute"): "gathers are planned for schedules without R: `zerobubble show` with --weights counts those of a plan with R",
    ("sharded", "head"): _HEAD_ALONE,
    ("sharded", "host"): _HOST_ALONE,
    ("sharded", "fused"): _APART,
    ("sharded", "noise"): "an order is made robust by the times of passes alone, and its weights could have to be gathered more often",
    ("shares", "head"): _HEAD_ALONE,
    ("shares", "host"): _HOST_ALONE,
    ("shares", "fused"): _APART,
    ("shares", "noise"): "an order is made robust for microbatches that are alike",
    ("recompute", "head"): _HEAD_ALONE,
    ("recompute", "host"): _HOST_ALONE,
    ("recompute", "fused"): _APART,
    (
        "recompute",
        "noise",
    ): "the search for a robust order puts each R right before its B and gives it no noise; "
    "zb.planning.sensitivity and --what-if show what noise does to a plan with R",
    ("head", "host"): _HEAD_ALONE,
    ("head", "fused"): _APART,
    ("head", "noise"): _HEAD_ALONE,
    ("head", "what_if"): "the passes of a divided head are not varied",
    ("host", "fused"): _APART,
    ("host", "period"): "copies to the host are played to the end of a step, so that offload is planned for the makespan",
    ("host", "noise"): _HOST_ALONE,
    ("host", "what_if"): "copies to the host are not varied",
    ("fused", "noise"): "an order is made robust with B and W apart",
}
"""Each pair of axes that is not planned together: why, and what helps besides leaving one of the two out."""


def refuse_pairs(asked: Mapping[str, str]) -> None:
    """Raise `InputError` with all pairs of the axes `asked`, each under the name that it was asked by, that are not planned together.

    >>> refuse_pairs({"shares": "shares", "recompute": "recompute"})
    >>> refuse_pairs({"host": "--offload", "period": "--objective period"})
    Traceback (most recent call last):
    ...
    zerobubble.errors.InputError: --offload is not planned together with --objective period (copies to the host are played to the end of a \
step, so that offload is planned for the makespan): leave one of the two out
    """
    pairs = [(one, other) for one, other in combinations([axis for axis in AXES if axis in asked], 2) if (one, other) in NOT_TOGETHER]
    if pairs:
        each = [f"{asked[one]} is not planned together with {asked[other]} ({NOT_TOGETHER[one, other]})" for one, other in pairs]
        raise InputError(f"{'; '.join(each)}: leave one of {'the two' if len(pairs) == 1 else 'each two'} out")
