"""Which way each stage of a rank is split."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import nn

from zerobubble.errors import InputError, near
from zerobubble.runtime.stage.stage import Stage
from zerobubble.runtime.values.gradients import Gradients

TRACED = ("graph", "compiled")
WAYS = ("deferred", *TRACED, "whole")


def ways_of(split: str | Mapping[int, str], stages: Collection[int]) -> dict[int, str]:
    """The way of every one of this rank's `stages`; raises `InputError` for an unknown way and a stage that is not this rank's."""
    given = dict.fromkeys(stages, split) if isinstance(split, str) else split
    if not isinstance(given, Mapping):
        raise InputError(f"split is one of {', '.join(WAYS)}, or one of them by stage, got {type(split).__name__}")
    for stage, way in given.items():
        if stage not in stages:
            raise InputError(f"split names stage {stage}, this rank holds {', '.join(map(str, sorted(stages)))}; give each rank its own")
        if way not in WAYS:
            raise InputError(f"split of stage {stage} is one of {', '.join(WAYS)}, {near(str(way), WAYS)}got {way!r}")
    return {**dict.fromkeys(stages, "deferred"), **given}


def make_stage(
    way: str, module: nn.Module, index: int, has_weight_passes: bool, gradients: Gradients, *, cuda_graphs: bool = False
) -> Stage:
    """A stage that is split in the way named, in passes B and W or, without `has_weight_passes`, in BW.

    With `cuda_graphs`, one that is traced replays its passes as CUDA graphs.
    """
    if way == "deferred":
        return Stage(module, index, split=has_weight_passes, gradients=gradients)
    if way == "whole":
        from zerobubble.runtime.split.whole import WholeStage

        return WholeStage(module, index, gradients=gradients)
    from zerobubble.runtime.split.graph import GraphStage  # tracing loads much, and few need it

    return GraphStage(module, index, compiled=way == "compiled", cuda_graphs=cuda_graphs, gradients=gradients)
