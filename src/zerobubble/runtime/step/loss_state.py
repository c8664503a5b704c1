"""Shares what `loss_fn`, a module or another object, keeps, such as parts of the loss for a log: only ranks with a last stage run it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import MethodType
from typing import Any, NamedTuple

from torch import nn

from zerobubble.errors import InputError
from zerobubble.runtime.split.stage_with_loss import loss_module
from zerobubble.runtime.values.refusing import Refusing
from zerobubble.runtime.values.released import guard
from zerobubble.runtime.values.shared_changes import Kept, apply_change
from zerobubble.runtime.values.shared_values import is_object
from zerobubble.runtime.values.stored import attributes_of

_OF_TORCH = frozenset(vars(nn.Module()))
State = dict[tuple[int, str], Any]
"""Changes by the index of a table of the loss and the name in it."""


class _Table(NamedTuple):
    """The attributes or buffers of a module in the loss, which is at `path`, or the attributes of another object."""

    path: str
    values: dict[str, Any]
    are_buffers: bool

    def names(self) -> list[str]:
        return [name for name in self.values if name not in _OF_TORCH]


class LossState:
    """The attributes and buffers of `loss_fn`, none if that is a function. A call takes a few us for a loss that keeps nothing."""

    def __init__(self, loss_fn: object) -> None:
        self._tables = list(_tables_of(loss_fn))
        self._before: dict[tuple[int, str], Kept] = {}

    def begin(self) -> None:
        """Begins a call of the pipeline."""
        self._before = {(index, name): Kept.of(table.values[name]) for index, table, name in self._places()}

    def has_changed(self) -> bool:
        """Returns whether the loss has set any attribute or buffer in this call."""
        return any(not self._holds(index, name, table.values[name]) for index, table, name in self._places())

    def changed(self) -> State:
        """Returns what the loss has changed in this call."""
        places = [(index, name, table.values[name]) for index, table, name in self._places()]
        absent = Kept(None)
        return {
            (index, name): self._before.get((index, name), absent).change(value)
            for index, name, value in places
            if not self._holds(index, name, value)
        }

    def put(self, of_ranks: Sequence[State], mine: State) -> None:
        """Makes the changes of the rank whose loss has changed any, unless they are `mine`. Raises `InputError` if there are two."""
        changed = [state for state in of_ranks if state]
        if len(changed) > 1:
            names = sorted({self._name_of(index, name) for state in changed for index, name in state if index < len(self._tables)})
            raise InputError(
                "loss_fn changes {names}, but {count} ranks run it, each for other microbatches",
                names=", ".join(map(repr, names)),
                count=len(changed),
                remedy="choose a schedule with one route, or compute this in the loop from pipe.losses",
            )
        for (index, name), change in (changed[0] if changed and not mine else {}).items():
            if index < len(self._tables):
                self._put(index, name, change)

    def _put(self, index: int, name: str, change: Any) -> None:
        table = self._tables[index]
        full, held = self._name_of(index, name), table.values.get(name)
        refuse = _refusal(full)
        if table.are_buffers and held is not None and change[1] is None:
            guard(held, _raising(refuse), is_old=True)
        else:
            table.values[name] = apply_change(change, held, lambda: Refusing.made(refuse))

    def _name_of(self, index: int, name: str) -> str:
        path = self._tables[index].path
        return f"{path}.{name}" if path else name

    def _holds(self, index: int, name: str, value: Any) -> bool:
        return (index, name) in self._before and self._before[index, name].holds(value)

    def _places(self) -> Iterator[tuple[int, _Table, str]]:
        return ((index, table, name) for index, table in enumerate(self._tables) for name in table.names())


def _tables_of(loss_fn: object) -> Iterator[_Table]:
    module = loss_module(loss_fn)
    if module is not None:
        for path, part in module.named_modules():
            yield _Table(path, vars(part), are_buffers=False)
            yield _Table(path, part._buffers, are_buffers=True)
        return
    owner = loss_fn.__self__ if isinstance(loss_fn, MethodType) else loss_fn
    if is_object(owner) and (attributes := attributes_of(owner)) is not None:
        yield _Table("", attributes, are_buffers=False)


def _refusal(name: str) -> Callable[[], InputError]:
    return lambda: InputError(
        "this rank does not have {name!r} of loss_fn, which only the rank of the last stage sets: ranks share numbers, texts, tensors of "
        "up to 4096 elements, and containers and objects of these",
        name=name,
        remedy="read it on the rank of the last stage, a buffer inside `with zb.gathered(loss_fn):`, or keep less in it",
    )


def _raising(refuse: Callable[[], InputError]) -> Callable[[], object]:
    def look() -> None:
        raise refuse()

    return look
