"""A profile of the parts of a model that was cut: what `zerobubble plan --layers` and a better cut are made of."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict

from torch import nn

from zerobubble.costs import Costs
from zerobubble.errors import InputError
from zerobubble.partition import Layer
from zerobubble.runtime.measure.profile import Progress
from zerobubble.runtime.measure.trained_bytes import trained_bytes
from zerobubble.runtime.split.stage_with_loss import stage_alone
from zerobubble.runtime.stage.parts import Calls, KnowsItsParts, Part, PartCost, measure, recording_calls
from zerobubble.runtime.step.inputs import StepInputs
from zerobubble.runtime.step.runner import StepRunner
from zerobubble.runtime.step.trials import profile


def profile_layers(runner: StepRunner, given: StepInputs, steps: int, progress: Progress | None) -> tuple[Layer, ...]:
    """What each part of the model takes and holds, as `Pipeline.profile_layers` describes it."""
    with runner.alike():
        _refuse_own_stages(runner)
    parts = {stage: module.parts_of_the_model() for stage, module in _alone(runner).items() if isinstance(module, KnowsItsParts)}
    costs = profile(runner, given, steps, progress)
    calls: dict[int, Calls] = {stage: {} for stage in parts}
    with runner.activity("while profiling layers"), runner.untouched():
        with ExitStack() as stack:
            for stage, module in _alone(runner).items():
                stack.enter_context(recording_calls(module, parts[stage], calls[stage]))
            runner.train_unheard(runner.choose(None), given)
        measured = [(stage, _layers(runner, stage, parts[stage], calls[stage], steps, costs)) for stage in parts]
    told = runner.gather([(stage, [asdict(layer) for layer in layers]) for stage, layers in measured], "profiling layers")
    found = {stage: layers for of_rank in reversed(told) for stage, layers in of_rank}
    return tuple(Layer(**layer) for stage in sorted(found) for layer in found[stage])


def _alone(runner: StepRunner) -> dict[int, nn.Module]:
    """The modules of this rank's stages, without that of the loss."""
    return {stage: stage_alone(module) for stage, module in runner.modules.items()}


def _refuse_own_stages(runner: StepRunner) -> None:
    """Raise `InputError` on every rank where one of them has a stage whose parts are not known."""
    own = [stage for stage, module in _alone(runner).items() if not isinstance(module, KnowsItsParts)]
    told = sorted(stage for of_rank in runner.gather(own, "comparing what is known of layers") for stage in of_rank)
    if told:
        raise InputError(
            f"stage {told[0]} was not cut from a model by zb.split, so its layers are not known: give Pipeline zb.split(model), or profile "
            "stages, with pipe.profile"
        )


def _layers(runner: StepRunner, stage: int, parts: list[Part], calls: Calls, steps: int, costs: Costs) -> list[Layer]:
    """The parts of a stage in the order of their calls; those that are not called cost nothing but memory, and go first."""
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
    """The last part with the loss: with what the last stage takes and holds beyond its parts."""
    whole = PartCost(costs.forward[-1], costs.backward[-1], costs.weight[-1], costs.held_after_f[-1], costs.held_after_b[-1])
    beyond = [max(0, all_ - sum(column)) for all_, column in zip(whole, zip(*measured, strict=True), strict=True)]
    return PartCost(*(own + more for own, more in zip(measured[-1], beyond, strict=True)))


def _layer(part: Part, cost: PartCost, message: int) -> Layer:
    kept = trained_bytes(part.module.parameters())
    return Layer(*cost, kept, message, part.name.removeprefix(f"{part.block}."), part.block)
