"""Unscales gradients so that all ranks agree on infinities, and every rank's scaler makes or skips the same steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from zerobubble.errors import InputError
from zerobubble.ir import Schedule
from zerobubble.runtime.step.hook import AttachedPipeline
from zerobubble.runtime.step.optimizers import parameters_of
from zerobubble.runtime.transport.terms import each_has
from zerobubble.runtime.values.memory import local_part


class Unscaling:
    """The scalers of all ranks of a pipeline: all of them are enabled, or none."""

    def __init__(self, pipeline: AttachedPipeline) -> None:
        self._pipeline = pipeline
        self._are_enabled: bool | None = None

    def unscale(self, scaler: GradScaler, optimizers: Sequence[Optimizer]) -> None:
        """Runs `scaler.unscale_` for this rank's optimizers, and shares infinities with all ranks, so that all skip a step together.

        Does nothing with disabled scalers. The ranks exchange whether theirs are enabled in the first call, and when that changes. Raises
        `InputError` if only some ranks' scalers are enabled, if their scales differ, and if the last step got no scaler on a rank with a
        last stage, which scales the loss.
        """
        pipeline = self._pipeline
        if scaler.is_enabled() is not self._are_enabled:
            self._are_enabled = _are_enabled(pipeline, scaler)
        if not self._are_enabled:
            return
        pipeline.before_optimizer(ranks_meet=True)
        with pipeline.activity("while unscaling gradients"):
            mine = unscale_own(pipeline, scaler, optimizers)
            is_infinite = _found_on_any(pipeline, scaler, is_found=mine)
            set_found_inf(scaler, optimizers, pipeline.device, is_found=is_infinite)


def _are_enabled(pipeline: AttachedPipeline, scaler: GradScaler) -> bool:
    """Returns whether the scalers of all ranks are enabled. Raises `InputError` if only some are."""
    enabled: list[bool] = pipeline.gather(scaler.is_enabled(), "comparing scalers")
    if len(set(enabled)) > 1:
        words = [f"one that is {'enabled' if is_enabled else 'disabled'}" for is_enabled in enabled]
        listed = each_has(pipeline.peers.members, words)
        raise InputError("the scalers of some ranks are disabled: {listed}; {remedy}", listed=listed, remedy="make them alike")
    return enabled[0]


def unscale_own(pipeline: AttachedPipeline, scaler: GradScaler, optimizers: Sequence[Optimizer]) -> bool:
    """Unscales the gradients of this rank's optimizers, or the gradients in `main_grad`; returns whether any of them is not finite."""
    if pipeline.gradients.dtype is None:
        held = list(parameters_of(optimizers))
        of_each = [[parameter.grad for parameter in parameters_of([optimizer]) if parameter.grad is not None] for optimizer in optimizers]
    else:
        held = list(pipeline.parameters())
        of_each = [_sums(pipeline), *([] for _ in optimizers[1:])]
    pipeline.scaling.unscale(held)
    for optimizer, gradients in zip(optimizers, of_each, strict=True):
        _unscale(scaler, optimizer, gradients)
    return any(flag.item() > 0 for optimizer in optimizers for flag in scaler._found_inf_per_device(optimizer).values())


def set_found_inf(scaler: GradScaler, optimizers: Sequence[Optimizer], device: torch.device, *, is_found: bool) -> None:
    """Makes `scaler` make or skip the steps of all `optimizers`, by what all ranks found."""
    for optimizer in optimizers:
        flags: dict[Any, Tensor] = scaler._found_inf_per_device(optimizer)
        flags.clear()
        flags[device] = torch.full((), float(is_found), dtype=torch.float32, device=device)


def _sums(pipeline: AttachedPipeline) -> list[Tensor]:
    """Returns the gradients in `main_grad` of this rank."""
    return [total for parameter in pipeline.parameters() if (total := pipeline.gradients.get(parameter)) is not None]


def _found_on_any(pipeline: AttachedPipeline, scaler: GradScaler, *, is_found: bool) -> bool:
    """Returns whether any rank found a gradient that is not finite."""
    doing = "sharing which gradients are not finite"
    states: list[tuple[bool, float, bool]] = pipeline.gather((is_found, scaler.get_scale(), pipeline.scaling.scaler is not None), doing)
    scales, was_given = [scale for _, scale, _ in states], [is_given for _, _, is_given in states]
    _refuse_differences(scales, was_given, pipeline.schedule, pipeline.peers.members)
    return pipeline.sharded.largest(float(any(is_here for is_here, _, _ in states)), doing) > 0


def _refuse_differences(scales: list[float], was_given: list[bool], schedule: Schedule, members: Sequence[int]) -> None:
    """Raises `InputError` for scalers that differ between the ranks, `members` of the pipeline."""
    if len(set(scales)) > 1:
        listed = each_has(members, [f"{scale:g}" for scale in scales])
        remedy = "make them alike, and unscale with all of them in every step"
        raise InputError("the scalers of the ranks differ in their scale: {listed}; {remedy}", listed=listed, remedy=remedy)
    lacking = sorted({route[-1] for route in schedule.placement.routes if not was_given[route[-1]]})
    if lacking:
        message = "the last step was not given the scaler on rank {rank}, whose last stage begins the backward pass"
        raise InputError(
            message, rank=members[lacking[0]], remedy="give it to pipe.step(..., scaler=scaler) on every rank, and leave it out of loss_fn"
        )


def _unscale(scaler: GradScaler, optimizer: Optimizer, gradients: Sequence[Tensor]) -> None:
    """Unscales `gradients` on behalf of `optimizer`; of sharded tensors, the local part.

    Torch unscales the gradients of one optimizer's parameters, which must all be plain or all be DTensors. So these become the gradients of
    plain stand-ins in an optimizer of their own, which uses the state of `optimizer`.
    """
    parts = [local_part(gradient) for gradient in gradients]
    standins = [part.detach().requires_grad_() for part in parts]
    for standin, part in zip(standins, parts, strict=True):
        standin.grad = part
    other = torch.optim.SGD(standins or [torch.empty(0, device="cpu")])
    states = scaler._per_optimizer_states
    states[id(other)] = states[id(optimizer)]
    try:
        scaler.unscale_(other)
    finally:
        del states[id(other)]
