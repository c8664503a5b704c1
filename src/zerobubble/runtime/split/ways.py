"""The ways to split a stage, by name, and which of them each stage of a rank takes."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import nn

from zerobubble.errors import InputError, near
from zerobubble.runtime.split.deferred import DeferredSplitter
from zerobubble.runtime.split.splitter import Splitter
from zerobubble.runtime.split.stage_with_loss import stage_alone
from zerobubble.runtime.split.whole import WholeSplitter
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


def make_splitter(
    way: str, module: nn.Module, index: int, has_weight_passes: bool, gradients: Gradients, *, cuda_graphs: bool = False
) -> Splitter:
    """What splits stage `index` in the way named; where the schedule gives it no passes W, "deferred" leaves it whole.

    With `cuda_graphs`, one that is traced replays its passes as CUDA graphs.
    """
    if way in TRACED:
        from zerobubble.runtime.split.graph import GraphSplitter  # tracing loads much, and few need it

        return GraphSplitter(stage_alone(module), index, gradients, compiled=way == "compiled", cuda_graphs=cuda_graphs)
    if way == "whole":
        return WholeSplitter(module, index, "the stage is run whole, as split says")
    if not has_weight_passes:
        return WholeSplitter(module, index, "the schedule gives this stage BW")
    return DeferredSplitter(module, index, gradients)
