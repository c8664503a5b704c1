"""The bytes that training holds permanently for a parameter: its value, its gradient and the state of its optimizer."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

ADAM_BYTES = 8
"""The bytes of Adam's two moments for an element of a parameter, in float32."""
MASTER_BYTES = 4
"""The bytes of the float32 copy that is trained instead of an element with 16 bits."""


def trained_bytes(parameters: Iterable[nn.Parameter]) -> int:
    """Returns the bytes of these parameters, including gradients and Adam's state for those that require a gradient."""
    return sum(parameter.numel() * (parameter.element_size() + _training_bytes(parameter)) for parameter in parameters)


def _training_bytes(parameter: nn.Parameter) -> int:
    if not parameter.requires_grad:
        return 0
    return parameter.element_size() + ADAM_BYTES + (MASTER_BYTES if parameter.element_size() < MASTER_BYTES else 0)
