"""The schedule object that torchtitan's trainer and validator call.

When the object is made, the model parts are on the meta device. Later, torchtitan initializes them, may move `lm_head` into the loss, and
loads a checkpoint. So the `zb.Pipeline` is made at the first call.

torchtitan divides each loss by the number of tokens of the whole batch, so the pipeline only sums losses: `scale="none"`.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import ChunkedLossWrapper

import zerobubble as zb
from zerobubble.errors import InputError
from zerobubble.ir import Schedule
from zerobubble.planning import Plan


class TitanSchedule:
    """Runs the steps of torchtitan in a `zb.Pipeline`, `pipeline`, which is made when first used.

    Args:
        parts: This rank's model parts in ascending order of stages.
        schedule: What the pipeline plays.
        num_microbatches: The number of microbatches of a step.
        loss_fn: torchtitan's loss, `loss_fn(output, labels, **loss_kwargs) -> (loss, metrics)`.
        options: Further options of `zb.Pipeline`.
    """

    def __init__(
        self, parts: Sequence[nn.Module], schedule: Schedule | Plan, num_microbatches: int, loss_fn: Any, options: Mapping[str, Any]
    ) -> None:
        self._parts = list(parts)
        self._schedule = schedule
        self._num_microbatches = num_microbatches
        self._losses = _Losses(loss_fn)
        self._options = dict(options)
        self._pipe: zb.Pipeline | None = None

    @property
    def pipeline(self) -> zb.Pipeline:
        """The pipeline, with its timeline, plan and losses. It is made when first used: read it only after the model is initialized."""
        if self._pipe is None:
            losses = self._losses
            if isinstance(losses.loss_fn, ChunkedLossWrapper) and losses.loss_fn.lm_head is not None:
                losses.loss_fn.lm_head = _Head(losses.loss_fn.lm_head)
            # The pipeline has no reference to this object, so `finalize` closes it when the trainer drops this object.
            self._pipe = zb.Pipeline(
                self._parts, self._schedule, self._num_microbatches, losses, scale="none", on_loss=losses.keep, **self._options
            )
            weakref.finalize(self, _close, self._pipe)
        return self._pipe

    def step(
        self,
        *,
        arg_mbs: list[tuple[Any, ...]] | None = None,
        kwarg_mbs: list[dict[str, Any]] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Tensor] | None = None,
        loss_kwargs: dict[str, Any] | None = None,
        return_outputs: bool = False,
    ) -> None:
        """Runs forward and backward of these microbatches, and appends the loss of each to `losses` on the rank of the last stage."""
        if return_outputs:
            raise InputError("a training step does not keep outputs", remedy="call it with return_outputs=False")
        self._losses.begin(loss_kwargs)
        self.pipeline.step(arg_mbs, target_mbs, kwargs=kwarg_mbs)
        self._losses.append_to(losses)

    def eval(
        self,
        *,
        arg_mbs: list[tuple[Any, ...]] | None = None,
        kwarg_mbs: list[dict[str, Any]] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Tensor] | None = None,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs forward of these microbatches, and appends the loss of each to `losses` on the rank of the last stage."""
        self._losses.begin(loss_kwargs)
        _, output = self.pipeline.eval_step(arg_mbs, target_mbs, kwargs=kwarg_mbs)
        self._losses.append_to(losses)
        return output


class _Losses:
    """torchtitan's loss as a `loss_fn`, and the losses of a step by microbatch."""

    def __init__(self, loss_fn: Any) -> None:
        self.loss_fn = loss_fn
        self._kwargs: dict[str, Any] = {}
        self._found: dict[int, Tensor] = {}

    def begin(self, kwargs: dict[str, Any] | None) -> None:
        """Begins a step whose losses get these arguments."""
        self._kwargs = kwargs or {}
        self._found.clear()

    def __call__(self, output: Any, target: Any) -> Tensor:
        loss, _ = self.loss_fn(output, target, **self._kwargs)
        return loss.full_tensor() if isinstance(loss, DTensor) else loss

    def keep(self, microbatch: int, loss: Tensor) -> None:
        """Keeps the loss of a microbatch."""
        self._found[microbatch] = loss

    def append_to(self, losses: list[Tensor] | None) -> None:
        """Appends the losses to `losses`, if that is a list, in the order of microbatches."""
        if losses is not None:
            losses.extend(loss for _, loss in sorted(self._found.items()))


class _Head:
    """`lm_head` for `ChunkedLossWrapper`, without methods with which the wrapper gathers and reduces weights: the pipeline does that."""

    def __init__(self, head: nn.Module) -> None:
        self._head = head

    def __call__(self, hidden: Tensor) -> Any:
        return self._head(hidden)


def _close(pipe: zb.Pipeline) -> None:
    with suppress(zb.errors.ZeroBubbleError):
        pipe.close()
