"""Makes the module whole on every rank before the hooks of Lightning's callbacks that read or change all weights."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import callbacks

AT_EPOCHS = (callbacks.BaseFinetuning, callbacks.StochasticWeightAveraging)
"""Callbacks that use the weights at the start of an epoch."""
AVERAGES = getattr(callbacks, "WeightAveraging", ())
"""Callbacks that average the weights after steps or epochs, and exchange them for the averages during validation; from Lightning 2.6 on."""


class WholeForCallbacks(pl.Callback):
    """The first callback. The next training step releases the weights of other ranks' stages again."""

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if any(isinstance(callback, AT_EPOCHS) for callback in _callbacks(trainer)):
            _make_whole(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        if any(average.should_update(step_idx=trainer.global_step - 1) for average in _averages(trainer)):
            _make_whole(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if any(average.should_update(epoch_idx=trainer.current_epoch) for average in _averages(trainer)):
            _make_whole(trainer)

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if _averages(trainer):
            _make_whole(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.strategy.runner.make_whole()


def _callbacks(trainer: pl.Trainer) -> list[Any]:
    return trainer.callbacks


def _averages(trainer: pl.Trainer) -> list[Any]:
    return [callback for callback in _callbacks(trainer) if isinstance(callback, AVERAGES)]


def _make_whole(trainer: pl.Trainer) -> None:
    if trainer.strategy.runner.is_released:
        trainer.strategy.runner.make_whole()
