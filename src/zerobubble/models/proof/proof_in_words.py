"""Runs the proof of a cut and reports it as a sentence: on the model itself if it is small, else on a tiny one of its class."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from zerobubble.models.cutting.cut import ModelCut
from zerobubble.models.observation.example import Arguments
from zerobubble.models.proof.prove import prove
from zerobubble.models.proof.tiny import MOST_PROVED, NoTinyModelError, tiny_models


def proved(
    model: nn.Module,
    whole: Callable[[], nn.Module],
    stages_of: Callable[[nn.Module], list[nn.Module]],
    cut: ModelCut,
    arguments: Arguments,
) -> str:
    """Compares `model` cut by `cut` with the uncut model on these arguments; returns a description of the comparison.

    `whole` creates the model with its weights, and `stages_of` the stages of such a model. Raises `InputError` if they differ.
    """
    size = sum(parameter.numel() for parameter in model.parameters())
    reason, why = f"its {size:,} parameters are too many to be copied", "no tiny model of its class runs"
    small = whole() if size <= MOST_PROVED else None
    if small is not None:
        reason = prove(small, stages_of, cut, arguments)
        if not reason:
            return "Proved: cut and uncut, the model has the same outputs and gradients in float64."
    try:
        for tiny, fitting in tiny_models(model, arguments):
            if not prove(tiny, stages_of, cut, fitting):
                kind = f"a tiny {type(tiny).__name__} of {sum(parameter.numel() for parameter in tiny.parameters()):,} parameters"
                return f"Proved: cut and uncut, {kind} has the same outputs and gradients in float64."
    except NoTinyModelError as error:
        why = str(error)
    if small is not None and not prove(small, stages_of, cut, arguments, in_float64=False):
        return "Proved: cut and uncut, the model has the same outputs and gradients in its own types, as it does not run in float64."
    return f"Not proved: {reason}, and {why}."
