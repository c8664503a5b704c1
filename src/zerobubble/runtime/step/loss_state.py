"""Shares what `loss_fn`, a module, keeps in plain attributes, such as parts of the loss for a log: only ranks with a last stage run it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from zerobubble.runtime.split.stage_with_loss import loss_module
from zerobubble.runtime.values.shared_values import received, sent

_OF_TORCH = frozenset(vars(nn.Module()))
_NUMBERS = (int, float, complex, str)
State = dict[tuple[int, str], Any]
"""Values as `sent` returns them, by the index of a module in the loss and the name of an attribute."""


class LossState:
    """The attributes of the modules in `loss_fn`, none if that is a function. A call takes a few us for a loss without modules inside."""

    def __init__(self, loss_fn: object) -> None:
        module = loss_module(loss_fn)
        self._parts = [] if module is None else list(module.modules())
        self._before: dict[tuple[int, str], list[Any]] = {}

    def begin(self) -> None:
        """Begins a call of the pipeline."""
        self._before = self._leaves()

    def has_changed(self) -> bool:
        """Returns whether the loss has set any attribute in this call."""
        return bool(self._changed())

    def changed(self) -> State:
        """Returns the attributes that the loss has set in this call, except those that are not shared."""
        values = {(index, name): sent(vars(self._parts[index])[name]) for index, name in self._changed()}
        return {place: value for place, value in values.items() if value is not None and value[0] != "object"}

    def put(self, of_ranks: Sequence[State]) -> None:
        """Sets the attributes of the first rank whose loss has changed any."""
        for (index, name), value in next(filter(None, of_ranks), {}).items():
            if index < len(self._parts):
                held = vars(self._parts[index])
                held[name] = received(value, held.get(name))

    def _changed(self) -> list[tuple[int, str]]:
        now = self._leaves()
        return [place for place, leaves in now.items() if not _are_same(leaves, self._before.get(place))]

    def _leaves(self) -> dict[tuple[int, str], list[Any]]:
        return {
            (index, name): list(_leaves_of(value))
            for index, part in enumerate(self._parts)
            for name, value in vars(part).items()
            if name not in _OF_TORCH
        }


def _leaves_of(value: Any) -> Iterator[Any]:
    """Yields the type and the leaves of nested containers, and the versions of tensors."""
    if isinstance(value, (list, tuple, dict, set)):
        yield type(value)
        for entry in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from _leaves_of(entry)
    else:
        yield value
        if isinstance(value, Tensor) and not value.is_inference():
            yield value._version


def _are_same(leaves: list[Any], before: list[Any] | None) -> bool:
    """Returns whether all leaves are the same objects as `before`, or equal numbers and texts."""
    if before is None or len(leaves) != len(before):
        return False
    pairs = zip(leaves, before, strict=True)
    return all(now is then or (type(now) is type(then) and type(now) in _NUMBERS and now == then) for now, then in pairs)
