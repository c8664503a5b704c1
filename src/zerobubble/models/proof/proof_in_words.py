"""The proof of a cut as a sentence: on the model itself where that is small, and else on a tiny one of its class."""

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
    """Compare `model` cut by `cut` and uncut, on these arguments; what was compared, in words.

    `whole` makes the model with its numbers, and `stages_of` the stages of a model like it. Raises `InputError` where they differ.
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
