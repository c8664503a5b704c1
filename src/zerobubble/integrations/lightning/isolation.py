"""Runs `training_step` for one microbatch without effects on the rest of training: it logs to a list, and steps no optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from zerobubble.integrations.lightning.logs import Entry
from zerobubble.integrations.whole_model import replaced

_LOG = inspect.signature(pl.LightningModule.log)


class BackwardCalledError(BaseException):
    """Raised in place of `manual_backward`, to capture the loss."""

    def __init__(self, loss: Tensor) -> None:
        super().__init__("manual_backward was called")
        self.loss = loss


@contextmanager
def isolated(module: pl.LightningModule, entries: list[Entry]) -> Iterator[None]:
    """A context in which `module` logs to `entries` only, and `manual_backward` raises `BackwardCalledError`."""
    entries.clear()

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
    with replaced(module, **instead):
        yield


class _MutedOptimizer:
    """An optimizer that does nothing when it steps or clears gradients."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        if name in ("step", "zero_grad"):
            return nothing
        if name == "toggle_model":
            return lambda *args, **kwargs: nullcontext()
        return getattr(self._optimizer, name)


def _muted(optimizers: Any) -> Any:
    return [_MutedOptimizer(each) for each in optimizers] if isinstance(optimizers, list) else _MutedOptimizer(optimizers)


def nothing(*args: Any, **kwargs: Any) -> None:
    """Replaces a method that has no effect in a run for one microbatch."""
