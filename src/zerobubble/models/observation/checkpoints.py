"""Which calls of units lie in a call of `torch.utils.checkpoint.checkpoint` that the model's code makes around them, or in a function of
autograd of its own, such as the one of Reformer's reversible layers."""

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
    """The calls of `checkpoint` in one forward, with the units called in each."""

    def __init__(self) -> None:
        self._units: dict[FrameType, set[str]] = {}

    def note(self, unit: str) -> None:
        """`unit` is called now; raises `InputError` inside of what hides from its surroundings that it trains."""
        for frame in _callers():
            if frame.f_code is _REENTRANT:
                raise InputError(
                    f"the model's code calls part {unit!r} inside of torch.utils.checkpoint with use_reentrant=True, where what the part "
                    "gives has no gradient for other stages: use use_reentrant=False"
                )
            if _is_of_autograd(frame):
                raise InputError(
                    f"the model's code calls part {unit!r} inside of the forward of a torch.autograd.Function, "
                    "where what the part gives has no gradient for other stages: call the part outside of it"
                )
            if frame.f_code is _CHECKPOINT:
                self._units.setdefault(frame, set()).add(unit)

    def together(self) -> tuple[Together, ...]:
        """The units that one call of `checkpoint` runs."""
        reason = "the model's code calls both in one torch.utils.checkpoint, which runs them again; checkpoint each part by itself"
        return tuple(Together(frozenset(units), reason) for units in self._units.values() if len(units) > 1)


def _is_of_autograd(frame: FrameType) -> bool:
    """Whether this is the forward of a `torch.autograd.Function`, whose first argument is its context."""
    names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
    return bool(names) and isinstance(frame.f_locals.get(names[0]), FunctionCtx)


def _callers() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
