"""Runs `training_step` for one microbatch without effects on the rest of training: it logs to a list, and steps no optimizer.

It runs as on the first rank of the pipeline, since its logs are those of the batch, on every rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.loggers.logger import _DummyExperiment
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor

from zerobubble.errors import InputError
from zerobubble.integrations.lightning.logs import Entry
from zerobubble.integrations.lightning.metrics import Updates, updates_held
from zerobubble.integrations.whole_model import replaced

_LOG = inspect.signature(pl.LightningModule.log)


class BackwardCalledError(BaseException):
    """Raised in place of `manual_backward`, to capture the loss."""

    def __init__(self, loss: Tensor) -> None:
        super().__init__("manual_backward was called")
        self.loss = loss


@contextmanager
def isolated(
    module: pl.LightningModule,
    entries: list[Entry],
    updates: Updates | None = None,
    *,
    runs_again: bool = False,
    faults: list[InputError] | None = None,
    is_whole: bool = False,
) -> Iterator[None]:
    """A context in which `module` logs to `entries` only, and `manual_backward` raises `BackwardCalledError`.

    Updates of Metrics with numbers are held in `updates`; of a batch that `is_whole`, also updates with tensors of one element. Loggers
    write nothing. If the code does not run again for the whole batch, which says so on all ranks, what is refused raises `InputError`, or
    adds it to `faults`, where only this rank runs the code.
    """
    entries.clear()
    refused_in = "" if runs_again or not module.automatic_optimization else f"{type(module).__name__}.training_step"

    def refuse(fault: InputError) -> None:
        if refused_in and faults is None:
            raise fault
        if refused_in and faults is not None:
            faults.append(fault)

    loggers = [_MutedLogger(logger, refused_in, refuse) for logger in module.trainer.loggers]
    strategy: Any = module.trainer.strategy

    def log(name: str, value: Any, *args: Any, **options: Any) -> None:
        if args:
            options = dict(_LOG.bind(module, name, value, *args, **options).arguments)
            for given in ("self", "name", "value"):
                del options[given]
        value = value.detach() if isinstance(value, Tensor) else value
        entries.append(Entry(name, value, options, getattr(value, "_forward_cache", None)))

    def manual_backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        raise BackwardCalledError(loss)

    instead: dict[str, Any] = {"log": log}
    if not module.automatic_optimization:
        instead |= {"manual_backward": manual_backward, "toggle_optimizer": nothing, "untoggle_optimizer": nothing}
        instead |= {"optimizers": lambda *args, **kwargs: _muted(type(module).optimizers(module, *args, **kwargs))}
    with (
        replaced(module, **instead),
        replaced(module.trainer, _loggers=loggers),
        replaced(strategy, rank_in_step=strategy.first_rank),
        replaced(rank_zero_only, rank=strategy.first_rank),
        updates_held(module, {} if updates is None else updates, refuse, is_whole=is_whole),
    ):
        yield


class _MutedLogger:
    """A `logger` that writes nothing; in `refused_in`, the user's function, it is passed to `refuse`."""

    def __init__(self, logger: Any, refused_in: str, refuse: Callable[[InputError], None]) -> None:
        self._logger, self._refused_in, self._refuse = logger, refused_in, refuse

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._logger)

    def __getattr__(self, name: str) -> Any:
        writes = name == "experiment" or (name.startswith("log_") and callable(getattr(type(self._logger), name, None)))
        if not writes:
            return getattr(self._logger, name)
        if self._refused_in:
            fault = InputError(
                "{function} uses self.logger.{name}, and a pipeline runs it for each microbatch, on a rank whose logger writes nothing",
                function=self._refused_in,
                name=name,
                remedy="log numbers by self.log, and let on_train_batch_end write others, from what training_step returns next to 'loss'",
            )
            self._refuse(fault)
        return _DummyExperiment() if name == "experiment" else nothing


class _MutedOptimizer:
    """An optimizer that does nothing when it steps, except for calling a closure, or when it clears gradients."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        if name == "step":
            return _called
        if name == "zero_grad":
            return nothing
        if name == "toggle_model":
            return lambda *args, **kwargs: nullcontext()
        return getattr(self._optimizer, name)


def _called(closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
    return None if closure is None else closure()


def _muted(optimizers: Any) -> Any:
    return [_MutedOptimizer(each) for each in optimizers] if isinstance(optimizers, list) else _MutedOptimizer(optimizers)


def nothing(*args: Any, **kwargs: Any) -> None:
    """Replaces a method that has no effect in a run for one microbatch."""
