"""The schedule object that torchtitan's trainer and validator call.

The model parts are on the meta device when the object is made, and torchtitan initializes them later, may wrap `lm_head` into a loss, and
loads a checkpoint. So the `zb.Pipeline` is made at the first call.

torchtitan divides each loss by the number of tokens of the whole batch and sums, so nothing is scaled here: `scale="none"`.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor, nn
from torchtitan.components.loss import ChunkedLossWrapper

import zerobubble as zb
from zerobubble.errors import InputError
from zerobubble.ir import Schedule
from zerobubble.planning import Plan


class TitanSchedule:
    """Runs the steps of torchtitan in a `zb.Pipeline`, `pipeline`, which is made at the first step or evaluation.

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
        self._loss_fn = loss_fn
        self._loss_kwargs: dict[str, Any] = {}
        self._options = dict(options)
        self._losses: dict[int, Tensor] = {}
        self._pipe: zb.Pipeline | None = None

    @property
    def pipeline(self) -> zb.Pipeline:
        """The pipeline: its timeline, plan and losses."""
        if self._pipe is None:
            if isinstance(self._loss_fn, ChunkedLossWrapper) and self._loss_fn.lm_head is not None:
                self._loss_fn.lm_head = _Head(self._loss_fn.lm_head)
            self._pipe = zb.Pipeline(
                self._parts, self._schedule, self._num_microbatches, self._loss, scale="none", on_loss=self._keep, **self._options
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
            raise InputError("a training step does not keep outputs: call it with return_outputs=False")
        self._begin(loss_kwargs)
        self.pipeline.step(arg_mbs, target_mbs, kwargs=kwarg_mbs)
        self._end(losses)

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
        self._begin(loss_kwargs)
        _, output = self.pipeline.eval_step(arg_mbs, target_mbs, kwargs=kwarg_mbs)
        self._end(losses)
        return output

    def _begin(self, loss_kwargs: dict[str, Any] | None) -> None:
        self._loss_kwargs = loss_kwargs or {}
        self._losses.clear()

    def _end(self, losses: list[Tensor] | None) -> None:
        if losses is not None:
            losses.extend(loss for _, loss in sorted(self._losses.items()))

    def _loss(self, output: Any, target: Any) -> Tensor:
        loss, _ = self._loss_fn(output, target, **self._loss_kwargs)
        return loss

    def _keep(self, microbatch: int, loss: Tensor) -> None:
        self._losses[microbatch] = loss


class _Head:
    """`lm_head` as `ChunkedLossWrapper` calls it, without the methods by which that gathers and reduces weights: the pipeline does."""

    def __init__(self, head: nn.Module) -> None:
        self._head = head

    def __call__(self, hidden: Tensor) -> Any:
        return self._head(hidden)


def _close(pipe: zb.Pipeline) -> None:
    with suppress(zb.errors.ZeroBubbleError):
        pipe.close()
