"""Refuses model code that iterates over all parameters or modules during a forward, since a stage has only some.

Reading only the first parameter, for its device or dtype, is allowed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import nn

from zerobubble.errors import InputError
from zerobubble.models.observation.stand_in import Current, StandIn

_ITERATE = ("named_parameters", "named_modules")
"""The methods of `nn.Module` on which all other iterators over parameters and modules are based."""


def refuse_going_through(model: nn.Module, current: Current) -> None:
    """Makes exhaustive iteration over the parameters or modules of `model` raise `InputError` during its forward."""
    for module in model.modules():
        if any(type(part) is StandIn for part in module.modules()):
            for name in _ITERATE:
                module.__dict__[name] = partial(_to_the_end, getattr(module, name), current)


def _to_the_end(iterate: Callable[..., Iterator[Any]], current: Current, *args: Any, **kwargs: Any) -> Iterator[Any]:
    yield from iterate(*args, **kwargs)
    if hasattr(current, "forward") and not _is_bookkeeping():
        raise InputError(
            "code of the model between its parts iterates over all parameters or modules, but a stage has only some",
            remedy="let each part return its share, call zb.nn.add_loss in the parts, or compute it from the model's output in loss_fn",
        )


def _is_bookkeeping() -> bool:
    """Returns whether Transformers iterates to install its recording hooks, which reads no values."""
    frame = sys._getframe(2)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module not in (nn.Module.__module__, __name__):
            return bool(module == "transformers.utils.output_capturing")
        frame = frame.f_back  # type: ignore[assignment]
    return False
