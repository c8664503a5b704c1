"""Calls of `nn.Module` that would return, load or copy all weights, which no rank of a pipeline has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from zerobubble.errors import InputError


def refused(method: str, call: str) -> Callable[..., NoReturn]:
    """Returns a method that raises `InputError`, whose remedy is the function `call` of zerobubble."""

    def refuse(self: object, *args: Any, **kwargs: Any) -> NoReturn:
        raise InputError(
            "a Pipeline has no {method}(), because each rank has the weights of its own stages only",
            method=method,
            remedy=f"call zb.{call}(path, pipe, optimizer) on every rank, with model_only=True instead of the optimizer for the weights "
            "alone; zb.gathered(model) brings them into the unsplit model",
        )

    refuse.__name__ = method
    refuse.__doc__ = f"Raises `InputError`: call `zb.{call}`."
    return refuse


def refuse_copy(self: object, *_: Any) -> NoReturn:
    """Raises `InputError`, in place of `__deepcopy__` and `__reduce_ex__`."""
    kind = type(self).__name__
    what = "a {got}" if kind == "Pipeline" else "a {got} of a pipeline"
    raise InputError(
        f"{what} cannot be copied or pickled: it runs with the other stages and ranks only",
        got=kind,
        remedy="copy the model before zb.split, or inside zb.gathered(model), and give the copy to zb.split, too; average weights by "
        "torch._foreach_lerp_(averages, list(pipe.parameters()), weight); save with zb.save",
    )
