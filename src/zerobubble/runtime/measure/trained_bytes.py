"""What training keeps of a parameter throughout: itself, its gradient and the state of its optimizer."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

ADAM_BYTES = 8
"""Bytes of the two moments that Adam keeps for a parameter, in float32."""
MASTER_BYTES = 4
"""Bytes of the float32 copy that is trained in the place of a parameter of 16 bits."""


def trained_bytes(parameters: Iterable[nn.Parameter]) -> int:
    """The bytes of these parameters, and of gradients and Adam's state for those that train."""
    return sum(parameter.numel() * (parameter.element_size() + _training_bytes(parameter)) for parameter in parameters)


def _training_bytes(parameter: nn.Parameter) -> int:
    if not parameter.requires_grad:
        return 0
    return parameter.element_size() + ADAM_BYTES + (MASTER_BYTES if parameter.element_size() < MASTER_BYTES else 0)
