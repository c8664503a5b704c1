"""The loss of a step: one value per microbatch on the last stage's rank, their mean on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zerobubble.errors import InputError
from zerobubble.runtime.stage import Tensors
from zerobubble.runtime.transport import Transport, wait

_TOPIC = 3
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_NONE = -1.0


class LossBook:
    """Takes the model's output of every microbatch on the last stage's rank and tells the mean loss to all others.

    Losses are divided by their number and summed in microbatch order, whatever order the schedule ran them in: the numbers of one
    device that accumulates. On a CPU the message leaves with the last forward, so nobody waits for it at the end of the step; on a GPU
    reading the loss would stop the host, so it leaves at the end.
    """

    def __init__(self, transport: Transport, num_microbatches: int, loss_fn: Callable[[Any, Any], Tensor], last_rank: int) -> None:
        self._transport = transport
        self._count = num_microbatches
        self._loss_fn = loss_fn
        self._last_rank = last_rank
        self.clear()

    def clear(self) -> None:
        """Let go of everything in flight."""
        self._targets: list[Tensors] | None = None
        self._outputs: list[Any] | None = None
        self._losses: list[Tensor | None] = []
        self._telling: list[Any] = []
        self._heard: tuple[Any, Tensor] | None = None

    def open(self, targets: list[Tensors] | None, outputs: list[Any] | None) -> None:
        """Start a step. `outputs`, in evaluation, is filled with what the model gives for each microbatch."""
        self._targets = targets
        self._outputs = outputs
        self._losses = [None] * self._count
        self._left = self._count
        self._telling = []
        here = self._transport.rank == self._last_rank
        self._heard = None if here else self._transport.listen(2, self._last_rank, _TOPIC)

    def finish(self, microbatch: int, output: Any) -> Tensor:
        """The loss of one microbatch divided by their number; the output itself when evaluating without targets."""
        if self._outputs is not None:
            self._outputs[microbatch] = output
        result = output if self._targets is None else self._loss(microbatch, output, self._targets[microbatch])
        self._left -= 1
        if self._left == 0 and self._transport.device.type == "cpu":
            self._tell()
        return result

    def _loss(self, microbatch: int, output: Any, target: Tensors) -> Tensor:
        loss = self._loss_fn(output, target[0] if len(target) == 1 else target)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise InputError(f"loss_fn must return a tensor with one element, the mean loss of a microbatch, got {shape}")
        if loss.dtype not in _DTYPES:
            raise InputError(f"loss_fn must return one of {', '.join(map(str, _DTYPES))}, got {loss.dtype}")
        loss = loss.reshape(()) / self._count
        self._losses[microbatch] = loss.detach()
        return loss

    def _tell(self) -> None:
        total = self._total()
        message = [0.0, _NONE] if total is None else [total.item(), float(_DTYPES.index(total.dtype))]
        others = [rank for rank in range(self._transport.size) if rank != self._last_rank]
        self._telling = [(self._transport.tell(message, rank, _TOPIC), rank) for rank in others]

    def _total(self) -> Tensor | None:
        if self._targets is None:
            return None
        losses = [loss for loss in self._losses if loss is not None]
        total = losses[0]
        for loss in losses[1:]:
            total = total + loss
        return total

    def close(self) -> Tensor | None:
        """End the step: the mean loss as a scalar tensor, None when there were no targets. Waits for the last rank's message."""
        if self._heard is None:
            if not self._telling:
                self._tell()
            for (work, _), rank in self._telling:
                wait(work, rank, "sending the loss")
            return self._total()
        work, message = self._heard
        wait(work, self._last_rank, "waiting for the loss")
        value, dtype = message.tolist()
        return None if dtype == _NONE else torch.tensor(value, dtype=_DTYPES[int(dtype)], device=self._transport.device)
