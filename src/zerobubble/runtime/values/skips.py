"""Lets a stage stash tensors for a later one: they travel with the ordinary messages, stage by stage, until they are popped."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from zerobubble.arguments import takes
from zerobubble.errors import InputError, near
from zerobubble.runtime.values.hold import Hold, here


class _Refusal(threading.local):
    """Why this thread may not stash or pop; empty if it may."""

    reason = ""


_refusal = _Refusal()


@takes()
def stash(name: str, tensor: Tensor) -> None:
    """Stash `tensor` for a later stage, which gets it with `pop(name)`. Call it in a stage's forward.

    Its gradient returns the same way. Outside a `Pipeline`, tensors are kept in a thread-local dictionary, so stages that are called one
    after another compute the same model, and a tensor replaces an earlier one of the same name. Raises `InputError` if a pipeline's stage
    stashes a name that has not been popped yet, if `tensor` is no tensor, and in a checkpointed region, which runs twice.
    """
    if not isinstance(name, str) or not isinstance(tensor, Tensor):
        message = "stash takes a name and a tensor, got {name_type} and {tensor_type}"
        raise InputError(message, name_type=type(name).__name__, tensor_type=type(tensor).__name__)
    hold = _hold("stash", name)
    if hold.stage is not None and name in hold.stashed:
        message = "stage {stage} stashes {name!r}, which is on its way already; {remedy}"
        raise InputError(message, stage=hold.stage, name=name, remedy="pop it before, or take another name")
    hold.stashed[name] = tensor


@takes()
def pop(name: str, *, keep: bool = False) -> Tensor:
    """Return the tensor that this stage or an earlier one stashed as `name`; with `keep`, later stages can pop it too.

    The gradients of all pops are summed. Raises `InputError` if no tensor of that name is stashed, and in a checkpointed region.
    """
    hold = _hold("pop", name)
    if name not in hold.stashed:
        who = "pop finds" if hold.stage is None else f"stage {hold.stage} pops"
        stashed = f"on their way are {', '.join(map(repr, hold.stashed))}" if hold.stashed else "nothing is on its way"
        hint = f"{near(name, hold.stashed)}{stashed}"
        raise InputError(
            "{who} {name!r}, which nobody stashed before, or which was popped without keep=True; {hint}", who=who, name=name, hint=hint
        )
    hold.popped.add(name)
    return hold.stashed[name] if keep else hold.stashed.pop(name)


def _hold(what: str, name: str) -> Hold:
    if torch._C._current_graph_task_id() != -1:  # only a checkpointed forward runs within a backward pass
        message = "{what}({name!r}) is called in a checkpointed region, which runs again in backward; {remedy}"
        raise InputError(message, what=what, name=name, remedy="call it outside of it")
    if _refusal.reason:
        raise InputError("it calls {what}({name!r}), and {reason}", what=what, name=name, reason=str(_refusal.reason))
    return here.hold


@contextmanager
def refusing(reason: str) -> Iterator[None]:
    """A context in which `stash` and `pop` raise `InputError` with this reason."""
    _refusal.reason = reason
    try:
        yield
    finally:
        _refusal.reason = ""
