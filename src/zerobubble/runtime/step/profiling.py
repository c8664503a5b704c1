"""Training steps that change nothing: profiles of passes, messages and layers, and reports of how backward passes are split."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, astuple, replace
from itertools import chain, starmap
from statistics import median_low
from typing import NamedTuple

import torch
from torch import nn

from zerobubble.arguments import WHOLE
from zerobubble.costs import OFFLOADABLE, Costs
from zerobubble.errors import InputError, raise_faults, shown
from zerobubble.ir import Kind, Placement
from zerobubble.partition import Layer
from zerobubble.partition.layers import adam_bytes
from zerobubble.runtime.measure import trace
from zerobubble.runtime.measure.memory_meter import storages_of
from zerobubble.runtime.measure.profile import (
    MeasuredHead,
    Progress,
    costs_of,
    preserve_state,
    progress_reporter,
    with_fused_of,
    with_level_of,
    with_measured_head,
)
from zerobubble.runtime.split.report import SplitReport, SplitReports
from zerobubble.runtime.split.stage_with_loss import stage_alone
from zerobubble.runtime.stage.parts import Calls, HasModelParts, Part, PartCost, measure, recording_calls
from zerobubble.runtime.stage.saved_tensors import MovableBytes
from zerobubble.runtime.stage.stage import Stage
from zerobubble.runtime.step.batch import StepInputs
from zerobubble.runtime.step.opening import choose
from zerobubble.runtime.step.playing import train_without_hooks
from zerobubble.runtime.step.runner import StepRunner
from zerobubble.runtime.values.stateful import is_wrapper, state_of
from zerobubble.schedules.vocabulary import PASSES, algorithm_of
from zerobubble.timeline import Timeline


class _Round(NamedTuple):
    """A round of steps with microbatches one by one: all stages at a recomputation `level`, or as the pipeline has them.

    A divided head runs by `algorithm`. With `fuses_backward` each backward is a BW.
    """

    level: str | None
    algorithm: int | None
    fuses_backward: bool = False


class _Measured(NamedTuple):
    """The measurements of a round: one step with metered memory, others that were timed, and the bytes that each stage can offload."""

    metered: Timeline
    timed: list[Timeline]
    offloadable: list[int]

    def costs(self, placement: Placement) -> Costs:
        """Returns the costs of the stages."""
        return costs_of(placement, self.metered, self.timed).with_columns(**{OFFLOADABLE: self.offloadable})


def profile(runner: StepRunner, step_inputs: StepInputs, steps: int, progress: Progress | None) -> Costs:
    """Returns what the passes and messages of each stage take and hold; see `Pipeline.profile`."""
    with runner.agreed_errors():
        _agree_on_steps(runner, steps)
        if runner.schedule.slices > 1:
            remedy = "profile a pipeline without slices, and give its costs to Costs.sliced"
            raise InputError("a profile measures whole microbatches, not {got} slices", got=runner.schedule.slices, remedy=remedy)
    runner.settle()
    choose(runner, None)
    schedule = runner.schedule
    algorithm = algorithm_of(schedule) if schedule.has_divided_head else None
    rounds = [_Round(None, passes) for passes in ([None] if algorithm is None else PASSES)]
    rounds += [_Round(level, algorithm) for level in runner.stages.levels.measured]
    whole = _Round(None, algorithm, fuses_backward=True)
    mixes_backwards = {Kind.B, Kind.BW} <= {op.kind for row in schedule.rows for op in row}
    rounds += [whole] * mixes_backwards
    with runner.activity("while profiling"), _preserving(runner), progress_reporter(progress, runner.rank) as report:
        measured = {}
        for place, round_ in enumerate(rounds):
            done = place * (steps + 1)
            measured[round_] = _one_by_one(
                runner,
                step_inputs,
                steps,
                round_,
                lambda more, done=done: report(done + more, len(rounds) * (steps + 1)),  # type: ignore[misc]
            )
    costs = measured[_Round(None, algorithm)].costs(schedule.placement)
    if mixes_backwards:
        costs = with_fused_of(costs, measured[whole].costs(schedule.placement))
    for level in runner.stages.levels.measured:
        costs = with_level_of(costs, level, measured[_Round(level, algorithm)].costs(schedule.placement))
    if algorithm is None:
        return costs
    return with_measured_head(costs, algorithm, {passes: MeasuredHead(*measured[_Round(None, passes)][:2]) for passes in PASSES})


@contextmanager
def _preserving(runner: StepRunner) -> Iterator[None]:
    """A context for steps that leave nothing behind, down to the last bit, and do not call `on_loss`.

    Raises `InputError` on every rank, after the steps, if a rank cannot put back what they have changed.
    """
    state = preserve_state(runner.modules.values(), runner.losses.loss_fn, runner.device, runner.gradients)
    with state as faults, runner.losses.muted():
        yield
    with runner.agreed_errors():
        raise_faults(chain.from_iterable(runner.gather(faults, "restoring the state of stages")))


def _one_by_one(runner: StepRunner, step_inputs: StepInputs, steps: int, round_: _Round, report: Callable[[int], object]) -> _Measured:
    """Runs a metered step and then `steps` that are timed, with microbatches one by one."""
    timelines: list[Timeline] = []
    movable: dict[int, list[MovableBytes]] = {}
    with runner.programs.one_by_one(*round_) as compiled:
        assert compiled.train is not None
        for index, stage in compiled.stages.items():
            movable[index] = [MovableBytes(runner.device) for _ in range(compiled.schedule.num_microbatches)]
            stage.offloaded.update(enumerate(movable[index]))
        while len(timelines) <= steps:
            train_without_hooks(runner, compiled, step_inputs, measures_memory=not timelines)
            timelines.append(trace.gather(compiled.train.program.name, compiled.train.records.read(), runner.peers))
            report(len(timelines))
    return _Measured(timelines[0], timelines[1:], _offloadable(runner, movable))


def _offloadable(runner: StepRunner, movable: Mapping[int, list[MovableBytes]]) -> list[int]:
    """Returns for each stage the bytes of its saved tensors that can be offloaded, the same on all ranks."""
    offloadable = {index: [of_microbatch.bytes for of_microbatch in several if of_microbatch.bytes] for index, several in movable.items()}
    from_all: list[dict[int, list[int]]] = runner.gather(offloadable, "comparing what can be offloaded")
    sizes = [[size for ranks in from_all for size in ranks.get(stage, [])] for stage in range(runner.schedule.num_stages)]
    return [median_low(of_stage) if of_stage else 0 for of_stage in sizes]


def _agree_on_steps(runner: StepRunner, steps: int) -> None:
    """Raises `InputError` on every rank if any of them has no valid number of steps, or a different one, or cannot recompute."""
    fault = runner.stages.recompute_fault() if runner.stages.levels.measured else ""
    faults = runner.gather((steps if WHOLE.accepts(steps) else shown(steps), fault), "comparing how to profile")
    from_all = [count for count, _ in faults]
    wrong = [count for count in from_all if not (WHOLE.accepts(count) and count >= 1)]
    if wrong:
        raise InputError("a profile needs at least 1 step, got {got}", argument="steps", got=wrong[0])
    if len(set(from_all)) > 1:
        listed = ", ".join(f"rank {rank} has {count}" for rank, count in zip(runner.peers.members, from_all, strict=True))
        raise InputError("ranks disagree on the steps of a profile: {got}", argument="steps", got=listed)
    unable = [fault for _, fault in faults if fault]
    if unable:
        message = "a profile measures the levels of recompute in every stage: {fault}; {remedy}"
        raise InputError(message, fault=unable[0], remedy="or leave recompute out while profiling")


def describe(runner: StepRunner, step_inputs: StepInputs) -> SplitReports:
    """Returns how each stage splits its backward pass; see `Pipeline.describe`."""
    runner.settle()
    compiled = choose(runner, None)
    with runner.activity("while describing the split"):
        with _preserving(runner):
            for stage in compiled.stages.values():
                stage.splitter.count()
            train_without_hooks(runner, compiled, step_inputs)
        reports = [_with_sums(runner, stage) for stage in compiled.stages.values()]
        from_all = runner.gather(list(map(astuple, reports)), "describing the split")
    report_of = {report.stage: report for reports in reversed(from_all) for report in starmap(SplitReport, reports)}
    return SplitReports(report_of[stage] for stage in sorted(report_of))


def _with_sums(runner: StepRunner, stage: Stage) -> SplitReport:
    """Returns the report of a stage, with a note if a hook waits longer for its gradients than with other splits."""
    report = stage.report()
    waits = report.passes == "FBW" and any(hook.takes_gradients_early for hook in runner.hooks) and not stage.completes_by_parameter
    if not waits:
        return report
    return replace(report, notes=(*report.notes, "its gradients leave together for replicas and hooks, when its last pass is over"))


def profile_layers(runner: StepRunner, step_inputs: StepInputs, steps: int, progress: Progress | None) -> tuple[Layer, ...]:
    """Returns what each part of the model takes and holds; see `Pipeline.profile_layers`."""
    with runner.agreed_errors():
        _refuse_own_stages(runner)
    parts = {stage: module.model_parts() for stage, module in _alone(runner).items() if isinstance(module, HasModelParts)}
    costs = profile(runner, step_inputs, steps, progress)
    calls: dict[int, Calls] = {stage: {} for stage in parts}
    with runner.activity("while profiling layers"), _preserving(runner):
        with ExitStack() as stack:
            for stage, module in _alone(runner).items():
                stack.enter_context(recording_calls(module, parts[stage], calls[stage]))
            train_without_hooks(runner, choose(runner, None), step_inputs)
        measured = [(stage, _layers(runner, stage, parts[stage], calls[stage], steps, costs)) for stage in parts]
    from_all = runner.gather([(stage, [asdict(layer) for layer in layers]) for stage, layers in measured], "profiling layers")
    layers_of = {stage: layers for of_rank in reversed(from_all) for stage, layers in of_rank}
    return tuple(Layer(**layer) for stage in sorted(layers_of) for layer in layers_of[stage])


def _alone(runner: StepRunner) -> dict[int, nn.Module]:
    """Returns the modules of this rank's stages, without the loss."""
    return {stage: stage_alone(module) for stage, module in runner.modules.items()}


def _refuse_own_stages(runner: StepRunner) -> None:
    """Raises `InputError` on every rank if any of them has a stage whose parts are unknown."""
    uncut = [stage for stage, module in _alone(runner).items() if not isinstance(module, HasModelParts)]
    traced = [index for index, stage in choose(runner, None).stages.items() if stage.splitter.is_traced]
    from_all, all_traced = map(sorted, map(chain.from_iterable, zip(*runner.gather((uncut, traced), "comparing layers"), strict=True)))
    if all_traced:
        message = "stage {stage} runs as a graph, in which the layers have no times of their own"
        raise InputError(message, stage=all_traced[0], remedy="profile the layers in a pipeline with split='deferred'")
    if from_all:
        message = "stage {stage} was not cut from a model by zb.split, so its layers are unknown"
        raise InputError(message, stage=from_all[0], remedy="give Pipeline zb.split(model), or profile stages, with pipe.profile")


def _layers(runner: StepRunner, stage: int, parts: list[Part], calls: Calls, steps: int, costs: Costs) -> list[Layer]:
    """Returns the parts of a stage in the order of their calls. Those that are not called cost only memory, and come first."""
    named = {part.name: part for part in parts}
    in_order = [*(part for part in parts if part.name not in calls), *(named[name] for name in calls)]
    measured = [
        measure(part, calls[part.name], runner.device, steps) if part.name in calls else PartCost(0, 0, 0, 0, 0) for part in in_order
    ]
    if stage == costs.num_stages - 1 and measured:
        measured[-1] = _with_loss(measured, costs)
    message = costs.comm[stage] if stage < len(costs.comm) and costs.comm[stage] else max(costs.comm, default=0)
    return [_layer(part, cost, message) for part, cost in zip(in_order, measured, strict=True)]


def _with_loss(measured: list[PartCost], costs: Costs) -> PartCost:
    """Returns the last part including the loss: with what the last stage takes and holds beyond its parts."""
    whole = PartCost(costs.forward[-1], costs.backward[-1], costs.weight[-1], costs.held_after_f[-1], costs.held_after_b[-1])
    beyond = [max(0, all_ - sum(column)) for all_, column in zip(whole, zip(*measured, strict=True), strict=True)]
    return PartCost(*(size + more for size, more in zip(measured[-1], beyond, strict=True)))


def _layer(part: Part, cost: PartCost, message: int) -> Layer:
    kept = trained_bytes(part.module.parameters()) + untrained_bytes(part.module)
    return Layer(*cost, kept, message, part.name.removeprefix(f"{part.block}."), part.block)


def trained_bytes(parameters: Iterable[nn.Parameter]) -> int:
    """Returns the bytes of these parameters, including gradients and Adam's state for those that require a gradient."""
    return sum(_own_bytes(parameter) + parameter.numel() * _training_bytes(parameter) for parameter in parameters)


def _own_bytes(parameter: nn.Parameter) -> int:
    """Returns the bytes of the elements of a parameter; for a wrapper, of the tensors inside."""
    return sum(storage.nbytes() for storage in storages_of(parameter)) if is_wrapper(parameter) else parameter.nbytes


def untrained_bytes(module: nn.Module) -> int:
    """Returns the bytes of `module` except its parameters: its buffers, and what belongs to quantized weights, such as scales."""
    others = chain(module.buffers(), (tensor for part in module.modules() for _, tensor in state_of(part)))
    with torch._C.DisableTorchFunctionSubclass():  # a released tensor has no values, but a storage
        trained = {storage._cdata for tensor in module.parameters() for storage in storages_of(tensor)}
        size_of = {storage._cdata: storage.nbytes() for tensor in others for storage in storages_of(tensor)}
    return sum(size for storage, size in size_of.items() if storage not in trained)


def _training_bytes(parameter: nn.Parameter) -> int:
    if not parameter.requires_grad:
        return 0
    return parameter.element_size() + adam_bytes(parameter.element_size())
