"""The context of a forward: tensors stashed for later stages, and losses added for the last stage.

Both travel from stage to stage, appended to the ordinary messages, and their gradients return the same way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from zerobubble.errors import InputError
from zerobubble.runtime.values.payload import Payload, Stashed, Tensors, structure_of, with_keywords

Finish = Callable[[Any], Tensor] | None


class Hold:
    """The context of one forward of `stage`, None outside a pipeline; `trains` says whether a backward pass follows.

    `stashed` are tensors by name, and `popped` the names popped in this forward. `losses` are the sums of added losses by name; None if
    nothing was added, and outside a pipeline, where nothing collects them. `origins` returns the origins of the tensors that arrived.
    `is_traced` says whether a graph runs instead of the stage's code.
    """

    __slots__ = ("is_traced", "losses", "origins", "popped", "stage", "stashed", "trains")

    def __init__(self, stage: int | None, stashed: dict[str, Tensor], *, trains: bool) -> None:
        self.stage = stage
        self.stashed = stashed
        self.trains = trains
        self.losses: dict[str, Tensor] | None = None
        self.popped: set[str] = set()
        self.is_traced = False
        self.origins: Callable[[], Sequence[Any]] | None = None


class _Here(threading.local):
    """The context of this thread's current forward; outside of one, a context of the thread's own."""

    def __init__(self) -> None:
        self.hold = Hold(None, {}, trains=False)


here = _Here()


def carry(run: Callable[[Tensors, Finish], Tensors], inputs: Tensors, finish: Finish, stage: int, *, trains: bool) -> Tensors:
    """Runs a stage on a message, and returns its outputs with the stashed tensors and added losses appended.

    Raises `InputError` if tensors are left after the last stage, the one with a `finish`, that it did not pop.
    """
    hold = Hold(stage, {}, trains=trains)
    if isinstance(inputs, Payload) and isinstance(inputs.structure, Stashed):
        inputs = _unload(inputs, inputs.structure, hold)
    outside, here.hold = here.hold, hold
    try:
        outputs = run(inputs, finish)
    finally:
        here.hold = outside
    if finish is not None:
        _refuse_left(hold)
    elif hold.stashed or hold.losses:
        return _load(outputs, hold)
    return outputs


def _refuse_left(hold: Hold) -> None:
    left = [repr(name) for name in hold.stashed if name not in hold.popped]
    if left:
        names = ", ".join(left)
        message = "stage {stage}, the last, ends with {names} still on the way; {remedy}"
        raise InputError(message, stage=hold.stage, names=names, remedy="pop what is stashed in the stage that needs it last")


def _load(outputs: Tensors, hold: Hold) -> Payload:
    """Returns the message of a stage's outputs with stashed tensors and added losses appended."""
    losses = hold.losses or {}
    structure = Stashed(structure_of(outputs), tuple(hold.stashed), tuple(losses))
    return Payload.from_tensors((*outputs, *hold.stashed.values(), *losses.values()), structure)


def _unload(inputs: Payload, behind: Stashed, hold: Hold) -> Tensors:
    """Returns the arguments of a message, and moves the appended tensors into `hold`."""
    count = len(inputs) - len(behind.names) - len(behind.losses)
    rest = iter(inputs[count:])
    hold.stashed = {name: next(rest) for name in behind.names}
    hold.losses = {name: next(rest) for name in behind.losses} or None
    arguments: Tensors = inputs[:count]
    if behind.arguments is not None:
        arguments = Payload.from_tensors(arguments, behind.arguments, inputs.keywords)
    elif inputs.keywords:
        arguments = with_keywords(arguments, inputs.keywords)
    return arguments
