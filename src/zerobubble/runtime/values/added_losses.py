"""Lets any stage add to the loss of its microbatch: added losses travel to the last stage, which sums them.

An added loss counts as if `loss_fn` had added it. So everything that scales the loss scales it, too: the weight of its microbatch, the
number of microbatches, a scaler. Its gradient returns to its stage with the gradients of activations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from zerobubble.arguments import takes
from zerobubble.errors import InputError
from zerobubble.runtime.values.hold import Hold, here

_HALVES = (torch.float16, torch.bfloat16)
_NONE: Mapping[str, Tensor] = {}


@takes()
def add_loss(name: str, loss: Tensor) -> None:
    """Add `loss`, a tensor with one element, to the loss of the microbatch whose forward runs: call it in a stage's forward.

    Losses added under one `name` are summed over layers and stages, in float32 at least. The loss of a microbatch is
    `loss_fn(output, target)` plus the sum of all losses added in its forward, and all of it is multiplied by the weight of the microbatch.
    A checkpointed region adds its losses once, though it runs again in backward.

    On one device, the same modules work inside `collecting_losses`. Outside of it and of a pipeline, nothing is added while gradients are
    disabled, as in evaluation. Raises `InputError` there while they are enabled; for anything but a floating-point tensor with one element;
    and if gradients are disabled at the call but not for the whole forward, as under `torch.no_grad` or in a reentrant checkpoint.
    """
    if torch._C._current_graph_task_id() != -1:  # a forward within a backward pass is a recomputation: its loss counts already
        return
    _refuse_other_types(name, loss)
    hold = here.hold
    _refuse_lost_gradients(name, hold)
    if hold.losses is None:
        if hold.stage is None:
            return
        hold.losses = {}
    if loss.dim():
        loss = loss.reshape(())
    if loss.dtype in _HALVES:
        loss = loss.float()
    before = hold.losses.get(name)
    hold.losses[name] = loss if before is None else before + loss


@takes()
@contextmanager
def collecting_losses() -> Iterator[dict[str, Tensor]]:
    """A context that collects the losses that modules add, by name, in the dictionary that it yields.

    With it, modules with added losses train on one device with the same losses as in a pipeline:

        with zb.nn.collecting_losses() as added:
            output = model(inputs)
        loss = loss_fn(output, targets) + sum(added.values())
    """
    outside, losses = here.hold, dict[str, Tensor]()
    here.hold = Hold(outside.stage, outside.stashed, trains=torch.is_grad_enabled())
    here.hold.losses = losses
    here.hold.popped = outside.popped
    try:
        yield losses
    finally:
        here.hold = outside


def losses_so_far() -> Mapping[str, Tensor]:
    """Returns the losses added so far, by name, in this thread's current forward and in the forwards of earlier stages."""
    return here.hold.losses or _NONE


def _refuse_other_types(name: str, loss: Tensor) -> None:
    if not isinstance(name, str) or not isinstance(loss, Tensor):
        message = "add_loss takes a name and a tensor, got {name_type} and {loss_type}"
        raise InputError(message, name_type=type(name).__name__, loss_type=type(loss).__name__)
    if loss.numel() != 1 or not loss.is_floating_point():
        message = "add_loss takes a floating-point tensor with one element, the mean over its microbatch, got {shape} {dtype} for {name!r}"
        raise InputError(message, shape=tuple(loss.shape), dtype=str(loss.dtype), name=name)


def _refuse_lost_gradients(name: str, hold: Hold) -> None:
    """Raises `InputError` if the loss of a training forward, or its gradient, would be lost."""
    if not torch.is_grad_enabled():
        if hold.trains:
            raise InputError(
                ("add_loss({name!r}) is called where no gradient is recorded, under torch.no_grad or in a reentrant checkpoint; {remedy}"),
                name=name,
                remedy="call it outside of it, or give the checkpoint use_reentrant=False",
            )
    elif hold.stage is None and hold.losses is None:
        raise InputError(
            "add_loss({name!r}) is called outside of a Pipeline, where nobody takes the loss",
            name=name,
            remedy=(
                "run the module in `with zb.nn.collecting_losses() as added:` and add sum(added.values()) to the loss, "
                "or under torch.no_grad"
            ),
        )
