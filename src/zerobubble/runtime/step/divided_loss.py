"""The loss of a step if ranks divide the head, on the rank of the last stage: the inputs of the parts, and the loss from their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerobubble.errors import InputError
from zerobubble.ir import Schedule
from zerobubble.runtime.device import is_host
from zerobubble.runtime.stage.divided_head import DividedHead
from zerobubble.runtime.stage.head_part import Correction, GivenToHead, HeadPart, gradient_of_output
from zerobubble.runtime.stage.stage import as_tensors
from zerobubble.runtime.step.loss import StepLosses
from zerobubble.runtime.transport.peers import Peers
from zerobubble.runtime.values.payload import Cotangents, Payload, Tensors


class _Given(NamedTuple):
    """Values that the loss of a microbatch needs later: its shape, which of its tokens count, and the `weight` of `GivenToHead`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    counts: Tensor
    weight: Tensor


class DividedLoss:
    """Computes the losses of steps with `head` and records them in `losses`. `parts` are the parts of the head on this rank, by stage.

    Targets and weights are sent with the output of the last stage, so only its rank needs them.
    """

    def __init__(self, head: DividedHead, parts: Mapping[int, HeadPart], losses: StepLosses) -> None:
        self._head = head
        self._parts = parts
        self._losses = losses
        self._given: dict[int, _Given] = {}
        self._seed: Callable[[], Tensor]

    def begin(self, seed: Callable[[], Tensor]) -> None:
        """Begins a step whose mean loss has the gradient `seed()`."""
        self._given.clear()
        self._seed = seed

    def head_inputs(self, microbatch: int, outputs: Tensors) -> Tensors:
        """Returns the inputs of the parts of the head for a microbatch, given the `outputs` of the last stage.

        Raises `InputError` unless they are one tensor with a target for each token, and for targets outside the vocabulary.
        """
        if isinstance(outputs, Payload) or len(outputs) != 1 or outputs[0].dim() < 2:
            got = str(outputs.structure) if isinstance(outputs, Payload) else ", ".join(str(tuple(y.shape)) for y in outputs)
            message = "a divided head takes one tensor (..., width) from the last stage, without losses added by stages; got {got}"
            raise InputError(message, got=got, remedy="give that alone, or a schedule and loss_fn with the whole head in the last stage")
        (output,) = outputs
        target = self._losses.target_of(microbatch)
        if not isinstance(target, Tensor) or target.shape != output.shape[:-1]:
            got = str(tuple(target.shape)) if isinstance(target, Tensor) else type(target).__name__
            message = "a divided head needs a target for each token, {expected}, of microbatch {microbatch}, got {got}"
            raise InputError(message, expected=tuple(output.shape[:-1]), microbatch=microbatch, got=got)
        target = target.flatten()
        counts = target != self._head.ignore_index
        self._refuse_outside_vocabulary(target, counts, microbatch)
        share = self._losses.backward_factor(microbatch) * self._seed().double()
        weight = (counts * (share / counts.sum().clamp(min=1))).to(torch.promote_types(output.dtype, torch.float32))
        self._given[microbatch] = _Given(tuple(output.shape), output.dtype, output.requires_grad, counts, weight)
        return GivenToHead(output.detach().flatten(0, -2), target, weight)

    def _refuse_outside_vocabulary(self, target: Tensor, counts: Tensor, microbatch: int) -> None:
        """Raises for a target that counts but has no row. A GPU asserts it asynchronously, like `cross_entropy`, so no host waits."""
        is_outside = counts & ((target < 0) | (target >= self._head.vocabulary))
        expected = f"a row of the head, which has {self._head.vocabulary}, or ignore_index={self._head.ignore_index}"
        if not is_host(target.device):
            torch._assert_async(~is_outside.any(), f"a target of microbatch {microbatch} is not {expected}")
        elif is_outside.any():
            got = target[is_outside][0].item()
            raise InputError("target {got} of microbatch {microbatch} is not {expected}", got=got, microbatch=microbatch, expected=expected)

    def output_gradient(self, microbatch: int, parts: Sequence[Tensors]) -> Cotangents:
        """Returns the gradient of the last stage's output, and records the loss of the microbatch."""
        values = self._given[microbatch]
        gradient, losses = gradient_of_output(parts, values.weight)
        self._record_loss(microbatch, losses)
        return (gradient.to(values.dtype).view(values.shape),) if values.requires_grad else ()

    def _record_loss(self, microbatch: int, losses: Tensor) -> None:
        """Records the mean loss of the tokens that count."""
        values = self._given.pop(microbatch)
        requires_grad = values.requires_grad or not self._parts or any(part.trains for part in self._parts.values())
        mean = losses.where(values.counts, 0).sum() / values.counts.sum()
        self._losses.record_loss(microbatch, mean, requires_grad=requires_grad)

    def evaluate(self, peers: Peers, schedule: Schedule, outputs: Sequence[Any]) -> None:
        """Computes the losses of evaluated microbatches from the `outputs` of the last stage; all ranks call it.

        The inputs and results of the parts are sent microbatch by microbatch, outside of any schedule.
        """
        last, doing = schedule.placement.routes[0][-1], "evaluating the loss of a divided head"
        head_inputs: list[Tensors] = []
        if peers.rank == last and self._losses.has_targets:
            head_inputs = [self.head_inputs(j, as_tensors(output, schedule.num_stages - 1)) for j, output in enumerate(outputs)]
        with peers.collective(doing):
            shapes = peers.gather_objects([[(tuple(tensor.shape), tensor.dtype) for tensor in tensors] for tensors in head_inputs])[last]
        for microbatch, of_inputs in enumerate(shapes):
            received = [torch.empty(size, dtype=dtype, device=peers.device) for size, dtype in of_inputs] if not head_inputs else []
            tensors = head_inputs[microbatch] if head_inputs else received
            for tensor in tensors:
                peers.replicate(tensor, last, doing)
            all_given, sums = GivenToHead(*tensors), []
            for stage in schedule.head_parts:
                part = self._parts.get(stage)
                mine = torch.empty((3, len(all_given.target)), dtype=all_given.weight.dtype, device=peers.device)
                sums.append(mine if part is None else part.softmax(all_given, None).sums)
                peers.replicate(sums[-1], schedule.rank_of(stage, 0), doing)
            if peers.rank == last:
                self._record_loss(microbatch, Correction.from_sums(sums).losses)
