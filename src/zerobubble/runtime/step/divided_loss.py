"""The loss of a step whose head is divided: what parts are given of a microbatch, and what they gave, on the rank of the last stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerobubble.errors import InputError
from zerobubble.ir import Schedule
from zerobubble.runtime.stage.divided_head import DividedHead
from zerobubble.runtime.stage.head_part import Correction, GivenToHead, HeadPart, gradient_of_output
from zerobubble.runtime.stage.stage import as_tensors
from zerobubble.runtime.step.loss import StepLosses
from zerobubble.runtime.transport.peers import Peers
from zerobubble.runtime.values.payload import Cotangents, Payload, Tensors


class _Given(NamedTuple):
    """What is known of a microbatch whose output was given to the head: which of its tokens count, and the `weight` of `GivenToHead`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    goes_back: bool
    counts: Tensor
    weight: Tensor


class DividedLoss:
    """The losses of one step after another by `head`, whose mean `losses` take. `parts` has the parts that this rank computes, by stage.

    Targets and weights travel with the output, so that no rank but that of the last stage needs them.
    """

    def __init__(self, head: DividedHead, parts: Mapping[int, HeadPart], losses: StepLosses) -> None:
        self._head = head
        self._parts = parts
        self._losses = losses
        self._given: dict[int, _Given] = {}
        self._seed: Callable[[], Tensor]

    def begin(self, seed: Callable[[], Tensor]) -> None:
        """A step begins, whose mean loss is gone back from with the gradient `seed()`."""
        self._given.clear()
        self._seed = seed

    def head_inputs(self, microbatch: int, outputs: Tensors) -> Tensors:
        """What the parts of the head are given of a microbatch, for which the last stage gave `outputs`.

        Raises `InputError` for what is not one tensor with a target for each token, and for targets that no part has.
        """
        if isinstance(outputs, Payload) or len(outputs) != 1 or outputs[0].dim() < 2:
            got = str(outputs.structure) if isinstance(outputs, Payload) else ", ".join(str(tuple(y.shape)) for y in outputs)
            raise InputError(
                "a divided head takes one tensor (..., width) from the last stage, and nothing that any stage added to the loss; "
                f"got {got}: give that alone, or a schedule and loss_fn with the head whole in the last stage"
            )
        (output,) = outputs
        target = self._losses.target_of(microbatch)
        if not isinstance(target, Tensor) or target.shape != output.shape[:-1]:
            got = str(tuple(target.shape)) if isinstance(target, Tensor) else type(target).__name__
            raise InputError(
                f"a divided head needs a target for each token, {tuple(output.shape[:-1])}, of microbatch {microbatch}, got {got}"
            )
        target = target.flatten()
        counts = target != self._head.ignore_index
        self._refuse_beyond(target, counts, microbatch)
        share = self._losses.factor_of(microbatch) * self._seed().double()
        weight = (counts * (share / counts.sum().clamp(min=1))).to(torch.promote_types(output.dtype, torch.float32))
        self._given[microbatch] = _Given(tuple(output.shape), output.dtype, output.requires_grad, counts, weight)
        return GivenToHead(output.detach().flatten(0, -2), target, weight)

    def _refuse_beyond(self, target: Tensor, counts: Tensor, microbatch: int) -> None:
        """Raise where a target that counts is that of no row; a GPU stops at it, as in `cross_entropy`, and no host waits for it."""
        is_beyond = counts & ((target < 0) | (target >= self._head.vocabulary))
        told = f"is neither a row of the head, which has {self._head.vocabulary}, nor ignore_index={self._head.ignore_index}"
        if target.device.type != "cpu":
            torch._assert_async(~is_beyond.any(), f"a target of microbatch {microbatch} {told}")
        elif is_beyond.any():
            raise InputError(f"target {target[is_beyond][0].item()} of microbatch {microbatch} {told}")

    def output_gradient(self, microbatch: int, parts: Sequence[Tensors]) -> Cotangents:
        """The gradient for the last stage's output from what all parts gave; tells the loss of the microbatch."""
        given = self._given[microbatch]
        gradient, losses = gradient_of_output(parts, given.weight)
        self._note(microbatch, losses)
        return (gradient.to(given.dtype).view(given.shape),) if given.goes_back else ()

    def _note(self, microbatch: int, losses: Tensor) -> None:
        """Tell the mean of the losses of the tokens that count."""
        given = self._given.pop(microbatch)
        goes_back = given.goes_back or not self._parts or any(part.trains for part in self._parts.values())
        self._losses.note(microbatch, losses.where(given.counts, 0).sum() / given.counts.sum(), goes_back=goes_back)

    def evaluate(self, peers: Peers, schedule: Schedule, outputs: Sequence[Any]) -> None:
        """Tell the losses of microbatches for which the last stage gave `outputs` and nothing goes back; all ranks call it together.

        What parts of the head are given and give travels microbatch by microbatch, beside any schedule.
        """
        last, doing = schedule.placement.routes[0][-1], "evaluating the loss of a divided head"
        given: list[Tensors] = []
        if peers.rank == last and self._losses.has_targets:
            given = [self.head_inputs(j, as_tensors(output, schedule.num_stages - 1)) for j, output in enumerate(outputs)]
        with peers.collective(doing):
            forms = peers.gather_objects([[(tuple(tensor.shape), tensor.dtype) for tensor in each] for each in given])[last]
        for microbatch, of_given in enumerate(forms):
            tensors = given[microbatch] if given else [torch.empty(size, dtype=dtype, device=peers.device) for size, dtype in of_given]
            for tensor in tensors:
                peers.replicate(tensor, last, doing)
            all_given, sums = GivenToHead(*tensors), []
            for stage in schedule.head_parts:
                part = self._parts.get(stage)
                mine = torch.empty((3, len(all_given.target)), dtype=all_given.weight.dtype, device=peers.device)
                sums.append(mine if part is None else part.softmax(all_given, None).sums)
                peers.replicate(sums[-1], schedule.rank_of(stage, 0), doing)
            if peers.rank == last:
                self._note(microbatch, Correction.of(sums).losses)
