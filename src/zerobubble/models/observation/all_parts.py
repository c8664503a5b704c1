"""Code of a model that goes through all parameters or parts of it, which no stage has: it is refused, where it would see too few.

Many a forward looks at the first parameter, for its device or type, and that is fine.
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
"""The methods of `nn.Module` by which all others iterate over parameters and modules."""


def refuse_going_through(model: nn.Module, current: Current) -> None:
    """Let iterating over the parameters or modules of `model` to the end be an `InputError` while a forward of it runs."""
    for module in model.modules():
        if any(type(part) is StandIn for part in module.modules()):
            for name in _ITERATE:
                module.__dict__[name] = partial(_to_the_end, getattr(module, name), current)


def _to_the_end(iterate: Callable[..., Iterator[Any]], current: Current, *args: Any, **kwargs: Any) -> Iterator[Any]:
    yield from iterate(*args, **kwargs)
    if hasattr(current, "forward") and not _is_bookkeeping():
        raise InputError(
            "code of the model between its parts goes through all parameters or modules, of which a stage has some alone: let each part "
            "return its share, call zb.nn.add_loss in the parts, or compute that from the model's output in loss_fn"
        )


def _is_bookkeeping() -> bool:
    """Whether Transformers iterates to set its hooks by which layers record outputs (`recording`), which reads nothing of them."""
    frame = sys._getframe(2)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module not in (nn.Module.__module__, __name__):
            return bool(module == "transformers.utils.output_capturing")
        frame = frame.f_back  # type: ignore[assignment]
    return False
