"""The loss of a step: one value per microbatch on the last stage's rank, their mean on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zerobubble.errors import InputError
from zerobubble.runtime.messages.transport import Transport, wait
from zerobubble.runtime.stage import Tensors

_TOPIC = 3
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_NONE = -1.0


class LossBook:
    """Takes the model's output of every microbatch on the ranks with a last stage and tells the mean loss to all others.

    Losses are divided by their number and summed in microbatch order, whatever order the schedule ran them in: the numbers of one
    device that accumulates. One rank, the teller, adds them up; with several routes the other last stages' ranks send it theirs. On a
    CPU with one route the message leaves with the last forward, so nobody waits for it at the end of the step; otherwise it leaves at
    the end, because reading a loss would stop a GPU's host.
    """

    def __init__(self, transport: Transport, loss_fn: Callable[[Any, Any], Tensor]) -> None:
        self._transport = transport
        self._loss_fn = loss_fn
        self.clear()

    def clear(self) -> None:
        """Let go of everything in flight."""
        self._exits: list[int] = []
        self._targets: list[Tensors] | None = None
        self._outputs: list[Any] | None = None
        self._losses: list[Tensor | None] = []
        self._telling: list[Any] = []
        self._listening: dict[int, tuple[Any, Tensor]] = {}

    def open(self, exits: list[int], targets: list[Tensors] | None, outputs: list[Any] | None) -> None:
        """Start a step where microbatch j ends on rank `exits[j]`. `outputs`, in evaluation, is filled with what the model gives."""
        rank = self._transport.rank
        self._exits = exits
        self._teller = exits[0]
        self._targets = targets
        self._outputs = outputs
        self._losses = [None] * len(exits)
        self._left = exits.count(rank)
        self._telling = []
        sources = [exit for exit in dict.fromkeys(exits) if exit != rank] if rank == self._teller else [self._teller]
        self._listening = {source: self._transport.listen(len(exits) + 1, source, _TOPIC) for source in sources}

    def finish(self, microbatch: int, output: Any) -> Tensor:
        """The loss of one microbatch divided by their number; the output itself when evaluating without targets."""
        if self._outputs is not None:
            self._outputs[microbatch] = output
        result = output if self._targets is None else self._loss(microbatch, output, self._targets[microbatch])
        self._left -= 1
        if self._left == 0 and self._transport.device.type == "cpu" and len(set(self._exits)) == 1:
            self._tell(self._others())
        return result

    def _loss(self, microbatch: int, output: Any, target: Tensors) -> Tensor:
        loss = self._loss_fn(output, target[0] if len(target) == 1 else target)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise InputError(f"loss_fn must return a tensor with one element, the mean loss of a microbatch, got {shape}")
        if loss.dtype not in _DTYPES:
            raise InputError(f"loss_fn must return one of {', '.join(map(str, _DTYPES))}, got {loss.dtype}")
        loss = loss.reshape(()) / len(self._exits)
        self._losses[microbatch] = loss.detach()
        return loss

    def _others(self) -> list[int]:
        return [rank for rank in range(self._transport.size) if rank != self._transport.rank]

    def _tell(self, ranks: list[int]) -> None:
        """Send what is known of the losses, every microbatch's in its place, and their dtype."""
        known = [loss for loss in self._losses if loss is not None]
        dtype = float(_DTYPES.index(known[0].dtype)) if known else _NONE
        values = iter(torch.stack(known).tolist() if known else ())
        message = [dtype, *(0.0 if loss is None else next(values) for loss in self._losses)]
        self._telling = [(self._transport.tell(message, rank, _TOPIC), rank) for rank in ranks]

    def close(self) -> Tensor | None:
        """End the step: the mean loss as a scalar tensor, None when there were no targets. Waits for the messages of other ranks."""
        rank = self._transport.rank
        if rank in self._exits and rank != self._teller:
            self._tell([self._teller])
        for source, (work, message) in self._listening.items():
            wait(work, source, "waiting for the loss")
            self._read(source, message.tolist())
        if rank == self._teller and not self._telling:
            self._tell(self._others())
        for (work, _), other in self._telling:
            wait(work, other, "sending the loss")
        known = [loss for loss in self._losses if loss is not None]
        return sum(known[1:], known[0]) if known else None

    def _read(self, source: int, message: list[float]) -> None:
        """Take over the losses that `source` knows: its own, or all when it is the teller."""
        if message[0] == _NONE:
            return
        dtype, device = _DTYPES[int(message[0])], self._transport.device
        for microbatch, value in enumerate(message[1:]):
            if source in (self._teller, self._exits[microbatch]):
                self._losses[microbatch] = torch.tensor(value, dtype=dtype, device=device)
