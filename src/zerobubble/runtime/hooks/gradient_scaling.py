"""Gradient scaling: every rank finds the same infinities, so that every rank's scaler takes or leaves the same steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zerobubble.errors import InputError
from zerobubble.runtime.step.hook import AttachedPipeline


def unscale(pipeline: AttachedPipeline, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """`scaler.unscale_(optimizer)` on this rank, of `main_grad` where gradients are there, and what it found on any rank told to all.

    Raises `InputError` when the ranks' scalers differ in their scale.
    """
    with pipeline.activity("while unscaling gradients"):
        if pipeline.gradients.dtype is None:
            scaler.unscale_(optimizer)
        else:
            _unscale_sums(scaler, optimizer, _sums(pipeline))
        _share_what_is_not_finite(pipeline, scaler, optimizer)


def _sums(pipeline: AttachedPipeline) -> list[Tensor]:
    """The gradients in `main_grad` of this rank."""
    return [total for parameter in pipeline.parameters() if (total := pipeline.gradients.of(parameter)) is not None]


def _share_what_is_not_finite(pipeline: AttachedPipeline, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """Let the scaler of every rank know whether any of them found a gradient that is not finite."""
    found: dict[Any, Tensor] = scaler._found_inf_per_device(optimizer)
    mine = float(sum(flag.item() for flag in found.values()) > 0)
    told: list[tuple[float, float]] = pipeline.gather((mine, scaler.get_scale()), "sharing which gradients are not finite")
    if len({scale for _, scale in told}) > 1:
        scales = ", ".join(f"rank {rank} has {scale:g}" for rank, (_, scale) in enumerate(told))
        remedy = "make them alike, and unscale with all of them in every step"
        raise InputError(f"the scalers of the ranks differ in their scale: {scales}; {remedy}")
    anywhere = max(flag for flag, _ in told)
    for flag in found.values():
        flag.fill_(anywhere)
    found.setdefault(pipeline.device, torch.full((), anywhere, device=pipeline.device))


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
