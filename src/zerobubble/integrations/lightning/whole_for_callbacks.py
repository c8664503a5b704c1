"""Makes the module whole before the hooks of Lightning's callbacks that read or change all weights, and at the end of `fit`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import callbacks

from zerobubble.integrations.whole_model import replaced

AT_EPOCHS = (callbacks.BaseFinetuning, callbacks.StochasticWeightAveraging)
"""Callbacks that use the weights at the start of an epoch."""
AVERAGES = getattr(callbacks, "WeightAveraging", ())
"""Callbacks that average the weights after steps or epochs, and exchange them for the averages during validation; from Lightning 2.6 on."""


def whole_for_callbacks(trainer: pl.Trainer) -> ExitStack:
    """Returns a context in which the module is whole in these hooks. The next training step releases weights of other ranks again."""
    stack = ExitStack()
    for callback in trainer.callbacks:
        hooks = {name: _whole_in(trainer, getattr(callback, name), is_due) for name, is_due in _hooks_of(trainer, callback).items()}
        stack.enter_context(replaced(callback, **hooks))
    end = _whole_in(trainer, trainer.fit_loop.on_run_end, lambda: True)
    stack.enter_context(replaced(trainer.fit_loop, on_run_end=end))
    return stack


def _hooks_of(trainer: pl.Trainer, callback: Any) -> dict[str, Callable[[], bool]]:
    """Returns the hooks of a callback that use the weights, and whether they do now."""
    if isinstance(callback, AT_EPOCHS):
        return {"on_train_epoch_start": lambda: True}
    if not isinstance(callback, AVERAGES):
        return {}
    return {
        "on_train_batch_end": lambda: callback.should_update(step_idx=trainer.global_step - 1),
        "on_train_epoch_end": lambda: callback.should_update(epoch_idx=trainer.current_epoch),
        "on_validation_epoch_start": lambda: True,
    }


def _whole_in(trainer: pl.Trainer, hook: Callable[..., Any], is_due: Callable[[], bool]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        runner = trainer.strategy.runner
        if is_due() and not runner.is_whole:
            runner.make_whole()
        return hook(*args, **kwargs)

    return call
