"""Tensors that a stage stashes for a later one: they travel with the ordinary messages, stage by stage, until they are popped."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from zerobubble.errors import InputError, near
from zerobubble.runtime.values.payload import Payload, Stashed, Tensors, structure_of, with_keywords

Finish = Callable[[Any], Tensor] | None


class _Hold:
    """What is on its way through one forward of `stage`, None outside a pipeline; `used` are the names popped in it."""

    __slots__ = ("held", "stage", "used")

    def __init__(self, stage: int | None, held: dict[str, Tensor]) -> None:
        self.stage = stage
        self.held = held
        self.used: set[str] = set()


class _Here(threading.local):
    """The hold of the forward that this thread runs; one of its own where it runs none."""

    def __init__(self) -> None:
        self.hold = self.outside = _Hold(None, {})
        self.refusal = ""


_here = _Here()


def stash(name: str, tensor: Tensor) -> None:
    """Leave `tensor` for a later stage, which gets it with `pop(name)`: call it in a stage's forward.

    Its gradient comes back the same way. Outside a `Pipeline` the tensor waits in a dictionary of this thread, so stages called one after
    another are the same model; there a new tensor takes the place of an old one. Raises `InputError` where a pipeline's stage stashes
    a name that is on its way already, for what is not a tensor, and in a checkpointed region, which runs twice.
    """
    if not isinstance(name, str) or not isinstance(tensor, Tensor):
        raise InputError(f"stash takes a name and a tensor, got {type(name).__name__} and {type(tensor).__name__}")
    hold = _hold("stash", name)
    if hold.stage is not None and name in hold.held:
        raise InputError(f"stage {hold.stage} stashes {name!r}, which is on its way already; pop it before, or take another name")
    hold.held[name] = tensor


def pop(name: str, *, keep: bool = False) -> Tensor:
    """The tensor that an earlier stage, or this one, stashed as `name`; with `keep` it goes on to later stages, too.

    The gradients of all who popped it add up. Raises `InputError` when nothing of that name is on its way, and in a checkpointed region.
    """
    hold = _hold("pop", name)
    if name not in hold.held:
        who = "pop finds" if hold.stage is None else f"stage {hold.stage} pops"
        known = f"on their way are {', '.join(map(repr, hold.held))}" if hold.held else "nothing is on its way"
        hint = f"{near(name, hold.held)}{known}"
        raise InputError(f"{who} {name!r}, which nobody stashed before, or which was popped without keep=True; {hint}")
    hold.used.add(name)
    return hold.held[name] if keep else hold.held.pop(name)


def _hold(what: str, name: str) -> _Hold:
    if torch._C._current_graph_task_id() != -1:  # only a checkpointed forward runs within a backward pass
        raise InputError(f"{what}({name!r}) is called in a checkpointed region, which runs again in backward; call it outside of it")
    if _here.refusal:
        raise InputError(f"it calls {what}({name!r}), and {_here.refusal}")
    return _here.hold


@contextmanager
def refusing(reason: str) -> Iterator[None]:
    """Inside, `stash` and `pop` raise `InputError` with this reason."""
    _here.refusal = reason
    try:
        yield
    finally:
        _here.refusal = ""


def carry(run: Callable[[Tensors, Finish], Tensors], inputs: Tensors, finish: Finish, stage: int) -> Tensors:
    """What `run` makes of a message, with everything stashed and not popped, by stages before or within `run`, behind it.

    Raises `InputError` when the last stage, the one with a `finish`, leaves anything that nobody popped there.
    """
    hold = _Hold(stage, {})
    if isinstance(inputs, Payload) and isinstance(inputs.structure, Stashed):
        inputs, hold.held = _unload(inputs, inputs.structure)
    _here.hold = hold
    try:
        outputs = run(inputs, finish)
    finally:
        _here.hold = _here.outside
    if not hold.held:
        return outputs
    if finish is None:
        return Payload.of((*outputs, *hold.held.values()), Stashed(structure_of(outputs), tuple(hold.held)))
    left = [repr(name) for name in hold.held if name not in hold.used]
    if left:
        raise InputError(
            f"stage {stage}, the last, ends with {', '.join(left)} still on the way; pop what is stashed in the stage that needs it last"
        )
    return outputs


def _unload(inputs: Payload, stashed: Stashed) -> tuple[Tensors, dict[str, Tensor]]:
    """The arguments of a message, and what is stashed behind them."""
    count = len(inputs) - len(stashed.names)
    own: Tensors = inputs[:count] if stashed.arguments is None else Payload.of(inputs[:count], stashed.arguments, inputs.keywords)
    if inputs.keywords and stashed.arguments is None:
        own = with_keywords(own, inputs.keywords)
    return own, dict(zip(stashed.names, inputs[count:], strict=True))
