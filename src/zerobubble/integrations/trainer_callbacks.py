"""Callbacks of Trainer on all ranks of a pipeline: a flag that one rank sets counts on all, and an error of one rank ends all.

Trainer stops, logs, evaluates and saves by the flags of `TrainerControl`. A callback that sets one on one rank only, such as the rank that
watches the clock, would leave the other ranks waiting. If a rank has callbacks of the user, ranks exchange the flags after events in which
all ranks take part.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerControl

FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")
SHARED = ("on_train_begin", "on_step_end", "on_substep_end", "on_epoch_end", "on_evaluate", "on_save")
"""The events that all ranks reach in the same order. `Trainer.log`, the cause of `on_log`, may run on one rank only: `share` is called for
the log of a step."""


class SharedCallbacks:
    """Calls the events of a `trainer`, a `PipelineMixin`, in place of `CallbackHandler.call_event`."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._call_event = trainer.callback_handler.call_event
        self._depth = 0
        self._exchanges = False
        trainer.callback_handler.call_event = self

    def __call__(self, event: str, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> TrainerControl:
        """Calls all callbacks. Returns the control with the flags of all ranks."""
        self._depth += 1
        try:
            with self._trainer._counting_replicas():
                control = self._call_event(event, self._trainer.args, state, control, **kwargs)
        except Exception as error:
            if self._depth == 1:
                self._report(error, event)
            raise
        finally:
            self._depth -= 1
        if self._depth or event not in SHARED or not self._trainer.is_in_train or self._trainer._pipe is None:
            return control
        if event == "on_train_begin":
            self._exchanges = any(self._of_all([self._has_own_callbacks()], event))
        self.share(control, event)
        return control

    def share(self, control: TrainerControl, event: str) -> None:
        """Sets the flags of `control` that a rank has set in `event`. All ranks call it."""
        if self._exchanges:
            for flag, value in zip(FLAGS, self._of_all([getattr(control, flag) for flag in FLAGS], event), strict=True):
                setattr(control, flag, value)

    def _has_own_callbacks(self) -> bool:
        """Returns whether this rank has a callback of which Transformers does not know that it does the same on all ranks."""
        return any(not type(callback).__module__.startswith("transformers.") for callback in self._trainer.callback_handler.callbacks)

    def _of_all(self, flags: list[bool], event: str) -> list[bool]:
        """Returns, for each flag, whether a rank has set it."""
        trainer = self._trainer
        of_ranks = trainer.pipeline._steps.gather(flags, f"comparing the flags of TrainerControl after {event}")
        flags = [any(of_one) for of_one in zip(*of_ranks, strict=True)]
        if trainer._num_replicas > 1:
            numbers = torch.tensor(flags, dtype=torch.int32, device=trainer.args.device)
            dist.all_reduce(numbers, dist.ReduceOp.MAX, group=trainer._same_stages)
            flags = numbers.bool().tolist()
        return flags

    def _report(self, error: Exception, event: str) -> None:
        """Ends the pipeline on all ranks with this error, which this rank goes on to raise."""
        pipe = self._trainer._pipe
        if pipe is None or pipe._steps.guard.closed is not None:
            return
        try:
            with pipe._steps.guard.during(f"in {event} of a callback"):
                raise error
        except Exception:  # noqa: BLE001 - the caller raises the error of the callback
            return
