"""This rank's modules by stage, and the stages that run them under a schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from zerobubble.arguments import wrong
from zerobubble.errors import InputError
from zerobubble.ir import Schedule
from zerobubble.rules import recomputed
from zerobubble.runtime.device import of_kind
from zerobubble.runtime.measure.memory_meter import Meter
from zerobubble.runtime.split.splitter import arguments_of
from zerobubble.runtime.split.stage_with_loss import stage_alone
from zerobubble.runtime.split.ways import TRACED, ways_of
from zerobubble.runtime.stage.cut_model import models_of
from zerobubble.runtime.stage.head_part import HeadPart
from zerobubble.runtime.stage.hook_reads import HookReads
from zerobubble.runtime.stage.levels import RecomputeLevels
from zerobubble.runtime.stage.parts import HasModelParts
from zerobubble.runtime.stage.replaced_parameters import ReplacedParameters
from zerobubble.runtime.stage.set_attributes import SetsElsewhere
from zerobubble.runtime.stage.stage import Stage, make_stage
from zerobubble.runtime.values.buffers import in_mode
from zerobubble.runtime.values.gradients import Gradients
from zerobubble.runtime.values.payload import Tensors, tensors_in, with_keywords
from zerobubble.runtime.values.random_state import seed_for, seeded
from zerobubble.runtime.values.stateful import forms_kept, refuse_lazy
from zerobubble.units import counted

Build = Callable[[int, int], nn.Module]
MOST_NAMES = 8
"""Maximum number of module names that a rank sends as a hint for messages."""


@runtime_checkable
class CutsForSchedules(Protocol):
    """A function that builds stages and cuts the model for a given schedule, as returned by `zb.split`."""

    def for_schedule(self, schedule: Schedule, first_parts: Sequence[str], device: torch.device | str | None) -> Build:
        """Returns the function that builds the stages of `schedule`, which will be moved to `device` unless it is None.

        `first_parts` are the first parts of each stage in a plan, if any.
        """
        ...


@runtime_checkable
class FollowsModel(Protocol):
    """A stage module that was cut from a model by `zb.split`."""

    def follow_model(self) -> bool:
        """Makes the changes of the model since the last call in this stage, and returns whether messages may change.

        Raises `InputError` for changes that it cannot make.
        """
        ...

    def refuse_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises `InputError` if stages cannot run a forward of the model with these arguments; call it on the first stage."""
        ...

    def has_state(self) -> bool:
        """Returns whether this is the last stage, and has set attributes or buffers since that other stages may not have set."""
        ...

    def give_back(self, share: Callable[[Any], Any] | None) -> None:
        """Gives the model the attributes and buffers that the stage has set since.

        Unless the last stage `has_state`, `share` is None. Otherwise all ranks call it, and it returns the first value that is not None.
        """
        ...


class Stages:
    """The modules of this rank, which are on one `device`, and how their backward passes are split.

    `heads` are their parts of a divided head, and `loss_fn` is the loss. With `cuda_graphs`, traced stages replay their passes as CUDA
    graphs. `levels` define what R recomputes. Raises `InputError` for modules on several devices, for an unknown way, for CUDA graphs of
    stages that are not traced, and for complex parameters with `main_grad`.
    """

    def __init__(
        self,
        modules: dict[int, nn.Module],
        split: str | Mapping[int, str],
        gradients: Gradients,
        levels: RecomputeLevels,
        loss_fn: object = None,
        *,
        cuda_graphs: bool = False,
        heads: Mapping[int, HeadPart] | None = None,
    ) -> None:
        self.modules = modules
        self.levels = levels
        self.loss_fn = loss_fn
        self._heads = heads or {}
        device = _device(modules)
        self.device = device or torch.device("cpu")
        self.has_tensors = device is not None
        self._ways = ways_of(split, modules)
        if cuda_graphs and not set(TRACED).intersection(self._ways.values()):
            ways = ", ".join(f"stage {index} is {way!r}" for index, way in self._ways.items())
            raise InputError(
                "cuda_graphs needs traced stages, but {ways}", ways=ways, remedy="give split='graph' or 'compiled', or leave it out"
            )
        for index, module in modules.items():
            gradients.refuse_complex(index, module)
        self._cuda_graphs = cuda_graphs
        self._gradients = gradients
        self._traced: dict[int, Stage] = {}
        self._set_by_copies: dict[int, set[tuple[str, str]]] = {}
        self.num_changes = 0
        """The number of changes of the model that may change messages."""
        self._num_checked = 0
        self.refusals: list[Callable[[], None]] = []
        """Functions that raise `InputError` if parameters were replaced which other stages or ranks hold, too."""
        self.replaced: ReplacedParameters | None = None

    def follow_models(self) -> None:
        """Makes changes of models that `zb.split` has cut in their stages. Raises `InputError` for those that stages cannot follow."""
        if self.replaced is not None:
            self.replaced.refuse()
        self.num_changes += sum(module.follow_model() for module in self._of_models())

    def refuse_calls(self, inputs: Sequence[Tensors], named: Mapping[int, list[dict[str, Any]]]) -> None:
        """Raises `InputError` if a model that was changed cannot run on these microbatches, such as in another order of parts.

        It is for the rank of the first stage, and does nothing until a change.
        """
        first = stage_alone(self.modules[0]) if self._num_checked != self.num_changes else None
        if isinstance(first, FollowsModel):
            for number, tensors in enumerate(inputs):
                first.refuse_call(*arguments_of(with_keywords(tensors, named[0][number]) if 0 in named else tensors))
        self._num_checked = self.num_changes

    def has_state(self) -> bool:
        """Returns whether the last stage of this rank has set state in a call; see `FollowsModel.has_state`."""
        return any(last.has_state() for last in list(self._of_models())[-1:])

    def give_back(self, share: Callable[[Any], Any] | None) -> None:
        """Gives the model what the last stage of this rank has set in a call; see `FollowsModel.give_back`."""
        for last in list(self._of_models())[-1:]:
            last.give_back(share)

    def hook_reads(self, last_stage: int) -> HookReads:
        """Returns the hooks on parts of all stages before the last."""
        modules = {index: stage_alone(module) for index, module in self.modules.items()}
        last = modules.pop(last_stage, None)
        of_models = [module for module in modules.values() if isinstance(module, HasModelParts)]
        parts = {part.name: part.module for module in of_models for part in module.model_parts()}
        return HookReads(self.loss_fn, parts, last.parts_elsewhere() if isinstance(last, SetsElsewhere) else {})

    def _of_models(self) -> Iterator[FollowsModel]:
        stages = (stage_alone(module) for _, module in sorted(self.modules.items()))
        return (stage for stage in stages if isinstance(stage, FollowsModel))

    def refuse_replaced(self) -> None:
        """Raises `InputError` if parameters were replaced which other stages or ranks hold, too."""
        for refuse in self.refusals:
            refuse()

    def refuse_hooks(self) -> None:
        """Raises `InputError` for hooks that a graph does not run."""
        for stage in self._traced.values():
            stage.splitter.refuse_hooks()

    def go_to(self, kind: str) -> None:
        """Selects this process's current device of a `kind`, for stages without tensors in a pipeline whose other stages have some."""
        self.device = of_kind(kind)

    def for_schedule(self, schedule: Schedule, level: str | None = None) -> dict[int, Stage]:
        """Returns the stages for `schedule`; traces are shared by all schedules. R recomputes `level`, or the level of each stage.

        Raises `InputError` if the schedule recomputes a stage that does not support it.
        """
        stages = {}
        with_recompute = {stage for row in schedule.rows for stage, _ in recomputed(row)}
        for index, module in self.modules.items():
            way = self._ways[index]
            splits = index in schedule.split_stages
            stage = self._traced.get(index) or make_stage(way, module, index, splits, self._gradients, cuda_graphs=self._cuda_graphs)
            stage.head = self._heads.get(index)
            is_copied = len({route[index] for route in schedule.placement.routes}) > 1
            stage.set_by_copy = self._set_by_copies.setdefault(index, set()) if is_copied else None
            stage.loss_fn = self.loss_fn if index == schedule.num_stages - 1 else None
            if index in with_recompute:
                fault = _recompute_fault(index, way)
                if fault:
                    raise InputError(fault)
                stage.recomputed = self.levels.parts_of(level or self.levels.name_of(index), index, module)
            if way in TRACED:
                self._traced[index] = stage
            stages[index] = stage
        return stages

    def recompute_fault(self) -> str:
        """Returns why one of these stages does not support recomputation, empty if all do."""
        return next(filter(None, (_recompute_fault(index, self._ways[index]) for index in self.modules)), "")

    def levels_that_choose(self) -> list[str]:
        """Returns the recompute levels at which R has work in one of these stages."""
        return [
            name
            for name in self.levels.given
            if any(self.levels.parts_of(name, index, module).recomputes for index, module in self.modules.items())
        ]

    def names_of_modules(self) -> list[str]:
        """Returns the first attribute names of modules in these stages, as a hint for messages."""
        paths = (path for module in self.modules.values() for path, _ in module.named_modules())
        names = dict.fromkeys(path.rpartition(".")[2] for path in paths)
        return [name for name in names if name and not name.isdecimal()][:MOST_NAMES]

    @contextmanager
    def training(self, stages: dict[int, Stage], meter: Meter | None) -> Iterator[None]:
        """Context of a step of `stages`: layers defer their weight gradients, and `meter` counts the bytes held."""
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            for stage in stages.values():
                stack.enter_context(stage.stepping(meter))
            yield

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Puts every module into evaluation mode, without gradients, and restores the modes and the forms of weights afterwards.

        Those of a model that `zb.split` has cut are included, for a `loss_fn` that reads their modes.
        """
        stages = self.modules.values()
        of_models = (part for stage in stages for model in models_of(stage) for part in model.modules())
        parts = dict.fromkeys(chain((part for stage in stages for part in all_parts(stage)), of_models))
        of_stages = (part for stage in stages for part in stage.modules())
        with in_mode(parts, training=False), forms_kept(of_stages), torch.no_grad():
            yield

    def meter(self, *batch: Any) -> Meter:
        """Returns a meter of the bytes that passes hold, excluding parameters, buffers and the tensors of `batch`."""
        state = [tensor for module in self.modules.values() for tensor in (*module.parameters(), *module.buffers())]
        return Meter([*state, *tensors_in(batch)])


def all_parts(module: nn.Module) -> Iterator[nn.Module]:
    """Yields `module` and its descendants, including those that a stage of `zb.split` hides because they are parts of other stages."""
    yield module
    for child in module.children():
        yield from all_parts(child)


def _recompute_fault(stage: int, way: str) -> str:
    """Returns why a stage does not support recomputation, empty if it does."""
    if way not in TRACED:
        return ""
    return (
        f"split={way!r} traces stage {stage}, and traced stages cannot be recomputed: give split='deferred', or leave stage {stage} out "
        "of the schedule's R passes"
    )


def modules_of(build: Build | nn.Module | Sequence[nn.Module], schedule: Schedule, rank: int, seed: int) -> dict[int, nn.Module]:
    """Returns the modules of `rank` by stage, built or given in ascending order. Raises `InputError` for a wrong number or type.

    Each is built with a seed derived from this rank's `seed` and the stage. If all ranks have the same seed, the initial values of a stage
    do not depend on its rank, and stages differ from each other.
    """
    indices = sorted({stage for _, stage in schedule.placement.stages(rank)})
    if isinstance(build, nn.Module):
        build = [build]
    if isinstance(build, Sequence):
        if len(build) != len(indices):
            raise InputError(
                "schedule {schedule!r} puts stages {indices} on this rank, got {modules}",
                schedule=schedule.name,
                indices=indices,
                got=len(build),
                modules=counted(len(build), "module"),
                remedy="give one module for each, or, to cut a whole model, pass zb.split(model)",
            )
        built: list[Any] = list(build)
    else:
        built = [_built(build, index, schedule.num_stages, seed) for index in indices]
    for index, module in zip(indices, built, strict=True):
        if not isinstance(module, nn.Module):
            raise wrong(f"stage {index}", module, "an nn.Module")
        refuse_lazy(module)
    return dict(zip(indices, built, strict=True))


def _built(build: Build, index: int, num_stages: int, seed: int) -> Any:
    try:
        with seeded(seed_for(seed, index)):
            return build(index, num_stages)
    except Exception as error:
        error.add_note(f"build({index}, {num_stages}) raised it: the schedule has {counted(num_stages, 'stage')}")
        raise


def _device(modules: dict[int, nn.Module]) -> torch.device | None:
    """Returns the device of all parameters and buffers, None if there are none."""
    first: dict[torch.device, str] = {}
    for stage, module in modules.items():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            first.setdefault(tensor.device, f"{name} of stage {stage}")
    if len(first) > 1:
        devices = ", ".join(sorted(f"{name} on {device}" for device, name in first.items()))
        raise InputError("the stages of a rank must be on one device, got {devices}", devices=devices, remedy="move them with `to(device)`")
    return next(iter(first), None)
