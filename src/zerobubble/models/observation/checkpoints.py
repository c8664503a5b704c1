"""Detects calls of units inside of `torch.utils.checkpoint.checkpoint` or of a custom autograd Function in the model's code, such as
Reformer's reversible layers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType

from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from zerobubble.errors import InputError
from zerobubble.models.observation.dataflow import Together

_REENTRANT = CheckpointFunction.forward.__code__
_CHECKPOINT = getattr(checkpoint, "__wrapped__", checkpoint).__code__


class Checkpoints:
    """The calls of `checkpoint` in one forward, with the units called inside each."""

    def __init__(self) -> None:
        self._units: dict[FrameType, set[str]] = {}

    def note(self, unit: str) -> None:
        """Records a call of `unit`; raises `InputError` inside of code that detaches it from the surrounding graph."""
        for frame in _callers():
            if frame.f_code is _REENTRANT:
                raise InputError(
                    "the model's code calls part {unit!r} inside of torch.utils.checkpoint with use_reentrant=True, where the output "
                    "of the part has no gradient for other stages",
                    unit=unit,
                    remedy="use use_reentrant=False",
                )
            if _is_of_autograd(frame):
                raise InputError(
                    "the model's code calls part {unit!r} inside of the forward of a torch.autograd.Function, where the output of "
                    "the part has no gradient for other stages",
                    unit=unit,
                    remedy="call the part outside of it",
                )
            if frame.f_code is _CHECKPOINT:
                self._units.setdefault(frame, set()).add(unit)

    def together(self) -> tuple[Together, ...]:
        """Returns the units that one call of `checkpoint` runs."""
        reason = (
            "the model's code calls both in one torch.utils.checkpoint, which recomputes them together; checkpoint each part separately"
        )
        return tuple(Together(frozenset(units), reason) for units in self._units.values() if len(units) > 1)


def _is_of_autograd(frame: FrameType) -> bool:
    """Returns whether this frame is the forward of a `torch.autograd.Function`, whose first argument is its context."""
    names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
    return bool(names) and isinstance(frame.f_locals.get(names[0]), FunctionCtx)


def _callers() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
