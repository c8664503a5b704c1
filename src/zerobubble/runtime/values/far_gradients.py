"""Refuses gradients, as of a gradient penalty, with respect to tensors that another stage computes with."""

from __future__ import annotations

from zerobubble.errors import InputError

_UNUSED = "appears to not have been used in the graph"
"""How `torch.autograd.grad` ends for a tensor that its outputs do not depend on, as far as this stage's graph goes."""


def refuse_far_gradient(error: Exception, whose: str) -> None:
    """Raises `InputError` if `error` is of a call of `torch.autograd.grad` that the graph of a stage cannot answer.

    `whose` names the code of the user that has raised it.
    """
    if isinstance(error, RuntimeError) and _UNUSED in str(error):
        raise InputError(
            "{whose} calls torch.autograd.grad with respect to a tensor on which this stage's graph does not depend, such as the input of "
            "the model: autograd goes back only to the inputs of the stage",
            whose=whose,
            remedy="compute such a gradient penalty in one stage with all layers between both tensors, or on the output alone",
        ) from error
