"""The Python state that `training_step` of a LightningModule may change: a pipeline runs it several times for each batch, on one rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from torch import nn
from torchmetrics import Metric, MetricCollection

from zerobubble.integrations.lone_calls import CONTAINERS, name_of_change
from zerobubble.runtime.frameworks import GENERATORS, Place, PythonState, Snapshot, changed, is_constant_code, put_back

_OF_LIGHTNING = frozenset(f"self.{name}" for name in vars(pl.LightningModule()))
"""Attributes of every LightningModule, which Lightning itself changes."""


class WatchedState:
    """The state of a module, of its Trainer's callbacks of user classes, and of the global variables that their code names.

    Metrics are left out, since their states are merged, and so are the attributes of Lightning itself.
    """

    def __init__(self, module: pl.LightningModule) -> None:
        self._module = module
        own = (module, *(child for child in module.modules() if isinstance(child, (Metric, MetricCollection))))
        trainer = module.trainer
        callbacks = {
            f"self.trainer.callbacks[{place}]": callback
            for place, callback in enumerate(trainer.callbacks)
            if not is_constant_code(type(callback).__module__)
        }
        roots = [{f"self.{name}".rstrip("."): child._buffers} for name, child in module.named_modules() if child not in own[1:]]
        self._state = PythonState({"self": module}, callbacks, *roots, left_out=(trainer, vars(module)["_trainer"], *own[1:]))

    @contextmanager
    def changes(self) -> Iterator[list[str]]:
        """A context at whose end the list has the names of what has changed."""
        found: list[str] = []
        before = self._state.snapshot()
        yield found
        libraries = {id(vars(child)) for child in self._module.modules() if _is_of_library(child)}
        for name, place in changed(before).items():
            is_own = name in _OF_LIGHTNING or place.path in GENERATORS
            if not is_own and not (id(place.owner) in libraries and name.rpartition(".")[2].startswith("_")):
                found.append(name_of_change(name, place))

    @contextmanager
    def kept_in_objects(self) -> Iterator[None]:
        """A context that undoes changes, except those that `unchanged` also undoes, and of the global generators.

        Raises `InputError` for what cannot be undone, such as an iterator.
        """
        before = self._state.snapshot()
        yield
        own = {id(self._module), *_containers(vars(self._module))}
        rows = [(place, content) for place, content in zip(*before, strict=False) if _is_apart(place, own)]
        for fault in put_back(Snapshot([place for place, _ in rows], [content for _, content in rows])):
            raise fault


def _is_apart(place: Place, own: set[int]) -> bool:
    return id(place.owner) not in own and place.path not in GENERATORS


def _containers(value: Any) -> Iterator[int]:
    """Yields the ids of nested dicts, lists and sets."""
    if isinstance(value, CONTAINERS):
        yield id(value)
        for item in value.values() if isinstance(value, dict) else value:
            yield from _containers(item)


def _is_of_library(module: nn.Module) -> bool:
    return is_constant_code(type(module).__module__)
