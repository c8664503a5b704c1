"""The ways to split a stage, by name, and the selection for each stage of a rank."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn

from zerobubble.arguments import wrong
from zerobubble.errors import InputError, near
from zerobubble.runtime.measure.memory_meter import Meter
from zerobubble.runtime.split.deferred import DeferredSplitter
from zerobubble.runtime.split.report import InB, SplitReport
from zerobubble.runtime.split.splitter import Splitter, arguments_of, run_backward
from zerobubble.runtime.split.stage_with_loss import stage_alone
from zerobubble.runtime.values.gradients import Gradients
from zerobubble.runtime.values.payload import Cotangents, Tensors


class WholeSplitter:
    """Computes all gradients in B. `reason` is shown in the report."""

    splits = False
    completes_by_parameter = False

    def __init__(self, module: nn.Module, index: int, reason: str) -> None:
        self._module = module
        self._index = index
        self._reason = reason

    def begin(self, parameters: tuple[nn.Parameter, ...], meter: Meter | None) -> None:
        """Does nothing."""

    def stepping(self) -> AbstractContextManager[object]:
        return nullcontext()

    def forward(self, microbatch: int, inputs: Tensors) -> Callable[[], Any]:
        positional, named = arguments_of(inputs)
        return partial(self._module, *positional, **named)

    def backward(self, microbatch: int, edges: list[Any], gradients: Cotangents) -> None:
        run_backward(edges, gradients)

    def weight(self, microbatch: int) -> None:
        """Does nothing: B has computed the weight gradients."""

    def begin_tail(self, microbatches: Sequence[int], complete: Callable[[Collection[nn.Parameter]], object]) -> None:
        """Does nothing: B has completed all gradients."""

    def held(self, microbatch: int | None = None) -> Iterable[Tensor]:
        return ()

    def clear(self) -> None:
        """Does nothing: no tensors are kept."""

    def count(self) -> None:
        """Does nothing: W has no work."""

    def report(self) -> SplitReport:
        return SplitReport(self._index, "whole", 0.0, (InB("every parameter", self._reason),))


TRACED = ("graph", "compiled")
WAYS = ("deferred", *TRACED, "whole")


def ways_of(split: str | Mapping[int, str], stages: Collection[int]) -> dict[int, str]:
    """Returns the way of each of this rank's `stages`. Raises `InputError` for an unknown way or a stage of another rank."""
    given = dict.fromkeys(stages, split) if isinstance(split, str) else split
    if not isinstance(given, Mapping):
        raise wrong("split", split, f"one of {', '.join(WAYS)}, or a dict of them by stage")
    for stage, way in given.items():
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
    return {**dict.fromkeys(stages, "deferred"), **given}


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
        return WholeSplitter(module, index, "split leaves this stage whole")
    if not has_weight_passes:
        return WholeSplitter(module, index, "the schedule gives this stage BW")
    return DeferredSplitter(module, index, gradients)
