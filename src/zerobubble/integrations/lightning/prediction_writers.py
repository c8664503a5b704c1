"""Lets one rank of each pipeline write predictions, which all of its ranks have, with Lightning's `BasePredictionWriter`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BasePredictionWriter

from zerobubble.integrations.lightning.isolation import nothing
from zerobubble.integrations.whole_model import replaced

METHODS = ("write_on_batch_end", "write_on_epoch_end")


def written_once(callbacks: Iterable[Callback], alone: Callable[[], AbstractContextManager[None]] | None) -> ExitStack:
    """Returns a context in which writers write inside `alone()` on this rank; with None, they write nothing."""
    stack = ExitStack()
    for callback in callbacks:
        if isinstance(callback, BasePredictionWriter):
            writing = {name: nothing if alone is None else _inside(alone, getattr(callback, name)) for name in METHODS}
            stack.enter_context(replaced(callback, **writing))
    return stack


def _inside(alone: Callable[[], AbstractContextManager[None]], method: Callable[..., Any]) -> Callable[..., Any]:
    def write(*args: Any, **kwargs: Any) -> None:
        with alone():
            method(*args, **kwargs)

    return write
