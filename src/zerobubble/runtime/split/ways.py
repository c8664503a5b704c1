"""The ways to split a stage, by name, and the selection for each stage of a rank."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import nn

from zerobubble.arguments import wrong
from zerobubble.errors import InputError, near
from zerobubble.runtime.split.deferred import DeferredSplitter
from zerobubble.runtime.split.splitter import Splitter
from zerobubble.runtime.split.stage_with_loss import stage_alone
from zerobubble.runtime.values.gradients import Gradients

TRACED = ("graph", "compiled")
WAYS = ("deferred", *TRACED, "whole")


def ways_of(split: str | Mapping[int, str], stages: Collection[int]) -> dict[int, str]:
    """Returns the way of each of this rank's `stages`. Raises `InputError` for an unknown way or a stage of another rank."""
    way_of = dict.fromkeys(stages, split) if isinstance(split, str) else split
    if not isinstance(way_of, Mapping):
        raise wrong("split", split, f"one of {', '.join(WAYS)}, or a dict of them by stage")
    for stage, way in way_of.items():
        if stage not in stages:
            raise InputError(
                "split names stage {stage}, this rank has {expected}; {remedy}",
                argument="split",
                stage=stage,
                expected=", ".join(map(str, sorted(stages))),
                remedy="give each rank only its own stages",
            )
        if way not in WAYS:
            raise InputError(
                "split of stage {stage} must be one of {expected}, {hint}got {got!v}",
                argument="split",
                stage=stage,
                expected=", ".join(WAYS),
                hint=near(str(way), WAYS),
                got=way,
            )
    return {**dict.fromkeys(stages, "deferred"), **way_of}


def make_splitter(
    way: str, module: nn.Module, index: int, has_weight_passes: bool, gradients: Gradients, *, cuda_graphs: bool = False
) -> Splitter:
    """Creates the splitter of stage `index` for a named way. If the stage has no W in the schedule, "deferred" leaves it whole.

    With `cuda_graphs`, a traced stage replays its passes as CUDA graphs.
    """
    if way in TRACED:
        from zerobubble.runtime.split.graph import GraphSplitter  # lazy: imports large parts of torch that few users need

        return GraphSplitter(stage_alone(module), index, gradients, compiled=way == "compiled", cuda_graphs=cuda_graphs)
    if way == "whole":
        return Splitter(module, index, "split leaves this stage whole")
    if not has_weight_passes:
        return Splitter(module, index, "the schedule gives this stage BW")
    return DeferredSplitter(module, index, gradients)
