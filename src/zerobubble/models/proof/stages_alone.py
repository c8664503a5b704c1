"""Runs the stages of a cut as ranks do: each with a Python state and an autograd graph of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zerobubble.errors import InputError
from zerobubble.runtime.values.python_state import PythonState, Snapshot, put_back

REMEDY = (
    "the model has a dataflow that bypasses its parts: return what other code needs, such as self.aux_loss, from the forward of the part, "
    "or write its stages by hand, as build(stage, num_stages)"
)


class StagesAlone:
    """The `stages` of a model, whose Python state `python` finds in the uncut model: each has a state of its own between forwards."""

    def __init__(self, stages: Sequence[nn.Module], python: PythonState) -> None:
        self.stages = stages
        self._python = python
        self._states: dict[int, Snapshot] = dict.fromkeys(range(len(stages)), python.snapshot())
        self._messages: list[tuple[list[Tensor], list[Tensor]]] = []

    @property
    def sent(self) -> list[list[Tensor]]:
        """The tensors with a gradient that stages have sent in the last forward."""
        return [sent for sent, _ in self._messages]

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the output of the last stage. Each stage gets detached tensors, so that its graph ends at its inputs."""
        self._messages = []
        output: Any = None
        for number, stage in enumerate(self.stages):
            if number:
                args, kwargs = (), self._received(output)
            put_back(self._states[number])
            try:
                output = stage(*args, **kwargs)
            except InputError:
                raise
            except Exception as error:
                raise InputError(
                    "stage {number} of the cut fails on the example, and the uncut model does not: {reason}; {remedy}",
                    number=number,
                    reason=str(error),
                    remedy=REMEDY,
                ) from error
            self._states[number] = self._python.snapshot()
        return output

    def _received(self, sent: dict[str, Any]) -> dict[str, Any]:
        """Returns the message `sent` as the next stage gets it."""
        leaves, structure = pytree.tree_flatten(sent)
        received = [leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        trained = [number for number, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        self._messages.append(([leaves[number] for number in trained], [received[number] for number in trained]))
        message: dict[str, Any] = pytree.tree_unflatten(received, structure)
        return message

    def backward(self, losses: Sequence[Tensor]) -> None:
        """Runs the backward pass of each stage, from the sum of `losses` of the last one."""
        backward(losses)
        for sent, received in reversed(self._messages):
            reached = [(tensor, leaf.grad) for tensor, leaf in zip(sent, received, strict=True) if leaf.grad is not None]
            if reached:
                tensors, gradients = zip(*reached, strict=True)
                torch.autograd.backward(tensors, gradients, retain_graph=True)


def backward(losses: Sequence[Tensor]) -> None:
    """Runs the backward pass of the sum of `losses`, if any."""
    if losses:
        torch.stack(list(losses)).sum().backward(retain_graph=True)  # type: ignore[no-untyped-call]
