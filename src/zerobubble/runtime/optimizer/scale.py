"""Gradient scaling: every rank finds the same infinities, so that every rank's scaler takes or leaves the same steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zerobubble.errors import InputError
from zerobubble.runtime.messages.meeting import meeting
from zerobubble.runtime.messages.transport import Transport


def unscale(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, transport: Transport) -> None:
    """`scaler.unscale_(optimizer)` on this rank, and what it found on any rank told to all.

    Raises `InputError` when the ranks' scalers differ in their scale.
    """
    scaler.unscale_(optimizer)
    found: dict[Any, Tensor] = scaler._found_inf_per_device(optimizer)
    mine = float(sum(flag.item() for flag in found.values()) > 0)
    with meeting("sharing which gradients are not finite"):
        told: list[tuple[float, float]] = transport.gather_objects((mine, scaler.get_scale()))
    if len({scale for _, scale in told}) > 1:
        scales = ", ".join(f"rank {rank} has {scale:g}" for rank, (_, scale) in enumerate(told))
        remedy = "make them alike, and unscale with all of them in every step"
        raise InputError(f"the scalers of the ranks differ in their scale: {scales}; {remedy}")
    anywhere = max(flag for flag, _ in told)
    for flag in found.values():
        flag.fill_(anywhere)
    found.setdefault(transport.device, torch.full((), anywhere, device=transport.device))
