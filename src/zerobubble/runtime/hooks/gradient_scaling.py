"""Gradient scaling: every rank finds the same infinities, so that every rank's scaler takes or leaves the same steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zerobubble.errors import InputError
from zerobubble.ir import Schedule
from zerobubble.runtime.step.hook import AttachedPipeline


class Unscaling:
    """The scalers of all ranks of a pipeline, which are alike: all of them are enabled, or none."""

    def __init__(self, pipeline: AttachedPipeline) -> None:
        self._pipeline = pipeline
        self._are_enabled: bool | None = None

    def unscale(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        """`scaler.unscale_(optimizer)` on this rank, of `main_grad` where gradients are there, and what it found on any rank told to all.

        With scalers that are disabled there is nothing to do. The ranks tell each other whether theirs are in the first call, and when that
        changes. Raises `InputError` when the scalers of some ranks are enabled and those of others not, when they differ in their scale,
        and when the last step was given one on some ranks, but not where it scales: on those with a last stage.
        """
        pipeline = self._pipeline
        if scaler.is_enabled() is not self._are_enabled:
            self._are_enabled = _are_enabled(pipeline, scaler)
        if not self._are_enabled:
            return
        pipeline.before_optimizer()
        with pipeline.activity("while unscaling gradients"):
            if pipeline.gradients.dtype is None:
                scaler.unscale_(optimizer)
            else:
                _unscale_sums(scaler, optimizer, _sums(pipeline))
            _share_what_is_not_finite(pipeline, scaler, optimizer)


def _are_enabled(pipeline: AttachedPipeline, scaler: torch.amp.GradScaler) -> bool:
    """Whether the scalers of all ranks are enabled; raises `InputError` where some are and some are not."""
    told: list[bool] = pipeline.gather(scaler.is_enabled(), "comparing scalers")
    if len(set(told)) > 1:
        told_by = zip(pipeline.peers.members, told, strict=True)
        listed = ", ".join(f"rank {rank} has one that is {'enabled' if is_enabled else 'disabled'}" for rank, is_enabled in told_by)
        raise InputError(f"the scalers of some ranks are disabled: {listed}; make them alike")
    return told[0]


def _sums(pipeline: AttachedPipeline) -> list[Tensor]:
    """The gradients in `main_grad` of this rank."""
    return [total for parameter in pipeline.parameters() if (total := pipeline.gradients.of(parameter)) is not None]


def _share_what_is_not_finite(pipeline: AttachedPipeline, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """Let the scaler of every rank know whether any of them found a gradient that is not finite."""
    found: dict[Any, Tensor] = scaler._found_inf_per_device(optimizer)
    mine = float(sum(flag.item() for flag in found.values()) > 0)
    told: list[tuple[float, float, bool]] = pipeline.gather(
        (mine, scaler.get_scale(), pipeline.was_given_scaler), "sharing which gradients are not finite"
    )
    _refuse_differences([scale for _, scale, _ in told], [was_given for _, _, was_given in told], pipeline.schedule, pipeline.peers.members)
    anywhere = pipeline.divided.largest(max(flag for flag, _, _ in told), "sharing which gradients are not finite")
    for flag in found.values():
        flag.fill_(anywhere)
    found.setdefault(pipeline.device, torch.full((), anywhere, device=pipeline.device))


def _refuse_differences(scales: list[float], was_given: list[bool], schedule: Schedule, members: Sequence[int]) -> None:
    """Raise `InputError` for scalers that differ, by what each rank of the pipeline, one of `members`, has told of its own."""
    if len(set(scales)) > 1:
        listed = ", ".join(f"rank {rank} has {scale:g}" for rank, scale in zip(members, scales, strict=True))
        remedy = "make them alike, and unscale with all of them in every step"
        raise InputError(f"the scalers of the ranks differ in their scale: {listed}; {remedy}")
    lacking = sorted({route[-1] for route in schedule.placement.routes if not was_given[route[-1]]})
    if lacking and any(was_given):
        where = f"rank {members[was_given.index(True)]}, but not on rank {members[lacking[0]]}, whose last stage begins the backward pass"
        raise InputError(f"the last step was given a scaler on {where}: give it to step on every rank")


def _unscale_sums(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, sums: list[Tensor]) -> None:
    """Unscale `sums` in the name of `optimizer`: as gradients of stand-ins of their type, in an optimizer of their own."""
    standins = [torch.empty_like(total).requires_grad_() for total in sums]
    for standin, total in zip(standins, sums, strict=True):
        standin.grad = total
    other = torch.optim.SGD(standins or [torch.empty(0)])
    states = scaler._per_optimizer_states
    states[id(other)] = states[id(optimizer)]
    try:
        scaler.unscale_(other)
    finally:
        del states[id(other)]
