"""This rank's part of the model: its modules by stage, and the stages that run them under any schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from zerobubble.errors import InputError
from zerobubble.ir import Schedule
from zerobubble.rules import recomputed
from zerobubble.runtime.measure.memory_meter import Meter
from zerobubble.runtime.split.ways import TRACED, ways_of
from zerobubble.runtime.stage.head_part import HeadPart
from zerobubble.runtime.stage.levels import RecomputeLevels
from zerobubble.runtime.stage.stage import Stage, make_stage
from zerobubble.runtime.values.gradients import Gradients
from zerobubble.runtime.values.payload import tensors_in
from zerobubble.runtime.values.random_state import seed_for, seeded

Build = Callable[[int, int], nn.Module]
MOST_NAMES = 8
"""Names of modules that a rank tells as a hint."""


@runtime_checkable
class CutsForSchedules(Protocol):
    """A function that builds stages and cuts the model for the schedule that they are played in, such as `zb.split` gives."""

    def for_schedule(self, schedule: Schedule, first_parts: Sequence[str]) -> Build:
        """The function that builds the stages of `schedule`; `first_parts` are those with which a plan begins its stages, if it does."""
        ...


class Stages:
    """The modules of this rank, which are on one `device`, and how their backward passes come apart.

    `heads` are the parts of a divided head that go by them. With `cuda_graphs`, those that are traced replay their passes as CUDA graphs.
    `levels` tell what R computes again. Raises `InputError` for modules on several devices, for a way that there is not, and for CUDA
    graphs of what has none.
    """

    def __init__(
        self,
        modules: dict[int, nn.Module],
        split: str | Mapping[int, str],
        gradients: Gradients,
        levels: RecomputeLevels,
        *,
        cuda_graphs: bool = False,
        heads: Mapping[int, HeadPart] | None = None,
    ) -> None:
        self.modules = modules
        self.levels = levels
        self._heads = heads or {}
        device = _device(modules)
        self.device = device or torch.device("cpu")
        self.has_tensors = device is not None
        self._ways = ways_of(split, modules)
        if cuda_graphs and self.device.type != "cuda":
            raise InputError(f"cuda_graphs is for stages on a CUDA device, these are on {self.device}; leave it out")
        if cuda_graphs and not set(TRACED).intersection(self._ways.values()):
            ways = ", ".join(f"stage {index} is {way!r}" for index, way in self._ways.items())
            raise InputError(f"cuda_graphs is for stages that are traced, but {ways}: give split='graph' or 'compiled', or leave it out")
        self._cuda_graphs = cuda_graphs
        self._gradients = gradients
        self._traced: dict[int, Stage] = {}

    def go_to(self, kind: str) -> None:
        """Computes on this process's current device of a `kind`: for stages without tensors, on a pipeline whose others have some."""
        self.device = torch.device(kind) if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())

    def of(self, schedule: Schedule, level: str | None = None) -> dict[int, Stage]:
        """The stages for `schedule`; what was traced serves every schedule. R computes again what `level` says, or the level of each stage.

        Raises `InputError` for stages whose forwards the schedule computes again, and that cannot.
        """
        stages = {}
        again = {stage for row in schedule.rows for stage, _ in recomputed(row)}
        for index, module in self.modules.items():
            way = self._ways[index]
            splits = index in schedule.split_stages
            stage = self._traced.get(index) or make_stage(way, module, index, splits, self._gradients, cuda_graphs=self._cuda_graphs)
            stage.head = self._heads.get(index)
            if index in again:
                fault = _why_it_runs_once(index, way)
                if fault:
                    raise InputError(fault)
                stage.computed_again = self.levels.of(level or self.levels.name_of(index), index, module)
            if way in TRACED:
                self._traced[index] = stage
            stages[index] = stage
        return stages

    def fault_in_computing_again(self) -> str:
        """Why the forward of one of these stages cannot run twice for a microbatch; empty where all can."""
        return next(filter(None, (_why_it_runs_once(index, self._ways[index]) for index in self.modules)), "")

    def levels_that_choose(self) -> list[str]:
        """The levels of recomputation by which R has anything to do in one of these stages."""
        return [
            name for name in self.levels.given if any(self.levels.of(name, index, module).chooses for index, module in self.modules.items())
        ]

    def names_of_modules(self) -> list[str]:
        """By which names the modules in these stages are called where they are, the first of them, as a hint."""
        paths = (path for module in self.modules.values() for path, _ in module.named_modules())
        names = dict.fromkeys(path.rpartition(".")[2] for path in paths)
        return [name for name in names if name and not name.isdecimal()][:MOST_NAMES]

    @contextmanager
    def training(self, stages: dict[int, Stage], meter: Meter | None) -> Iterator[None]:
        """A step of `stages`: layers defer their weight gradients, and `meter` counts what is held."""
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            for stage in stages.values():
                stack.enter_context(stage.stepping(meter))
            yield

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Every module in evaluation mode, without gradients; afterwards each is in the mode it was in."""
        modes = [(part, part.training) for module in self.modules.values() for part in _parts(module)]
        try:
            for part, _ in modes:
                part.training = False
            with torch.no_grad():
                yield
        finally:
            for part, mode in modes:
                part.training = mode

    def meter(self, *batch: Any) -> Meter:
        """Counts what passes hold, without parameters, buffers and the tensors of `batch`."""
        own = [tensor for module in self.modules.values() for tensor in (*module.parameters(), *module.buffers())]
        return Meter([*own, *tensors_in(batch)])


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """`module` and all in it, those included that a stage of `zb.split` does not list, for parts that are elsewhere."""
    yield module
    for child in module.children():
        yield from _parts(child)


def _why_it_runs_once(stage: int, way: str) -> str:
    """Why the forward of a stage cannot run twice for a microbatch; empty if it can."""
    if way not in TRACED:
        return ""
    return (
        f"split={way!r} traces stage {stage}, whose forwards run once: give split='deferred', or leave stage {stage} out of the schedule's "
        "R passes"
    )


def modules_of(given: Build | nn.Module | Sequence[nn.Module], schedule: Schedule, rank: int, seed: int) -> dict[int, nn.Module]:
    """The modules of `rank` by stage, built or given in ascending order; raises `InputError` for another number of them or other things.

    Each is built by a seed made of this rank's `seed` and the stage. Where ranks have one seed, stages start with different numbers, which
    do not depend on the rank.
    """
    indices = sorted({stage for _, stage in schedule.placement.stages(rank)})
    if isinstance(given, nn.Module):
        given = [given]
    if isinstance(given, Sequence):
        if len(given) != len(indices):
            raise InputError(f"schedule {schedule.name!r} puts stages {indices} on this rank, got {len(given)} modules")
        built: list[Any] = list(given)
    else:
        built = [_built(given, index, schedule.num_stages, seed) for index in indices]
    for index, module in zip(indices, built, strict=True):
        if not isinstance(module, nn.Module):
            raise InputError(f"stage {index} must be an nn.Module, got {type(module).__name__}")
    return dict(zip(indices, built, strict=True))


def _built(build: Build, index: int, num_stages: int, seed: int) -> Any:
    with seeded(seed_for(seed, index)):
        return build(index, num_stages)


def _device(modules: dict[int, nn.Module]) -> torch.device | None:
    """The device of all parameters and buffers, None if there are none."""
    devices = {tensor.device for module in modules.values() for tensor in (*module.parameters(), *module.buffers())}
    if len(devices) > 1:
        raise InputError(f"the stages of a rank must be on one device, got {', '.join(sorted(map(str, devices)))}")
    return devices.pop() if devices else None
