"""What a stage takes and gives: tensors, and the nest of tuples, lists, dicts and constants in which they lie."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from types import NoneType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

Tensors: TypeAlias = tuple[Tensor, ...]
"""What crosses a stage boundary; a `Payload` where it is more than the positional arguments of the next stage."""
Cotangents: TypeAlias = tuple[Tensor | None, ...]
"""The gradients of those tensors that can have one; None for one that the stage after it ignored."""
_CONSTANTS = (NoneType, bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_ROWS = (tuple, list, torch.Size)
_MAPS = (dict, OrderedDict)


class Constant(NamedTuple):
    """A leaf that is no tensor. A float is kept as its hexadecimal digits, so that -0.0 differs from 0.0 and NaN equals NaN."""

    kind: type
    value: Any

    def __str__(self) -> str:
        return repr(_value_of(self))


class Branch(NamedTuple):
    """A tuple, a list, a named tuple or a dict with these `keys`; `parts` are the layouts of what is in it."""

    kind: type
    keys: tuple[Any, ...]
    parts: tuple[Layout, ...]

    def __str__(self) -> str:
        return self.kind.__name__ + (f" of {', '.join(map(repr, self.keys))}" if self.keys else f" of {len(self.parts)}")


class Stashed(NamedTuple):
    """Arguments of this `layout`, None where they are a plain tuple of tensors, and behind them the tensors stashed under `names`."""

    layout: Layout
    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"{'tensors' if self.layout is None else self.layout} with {', '.join(map(repr, self.names))} stashed"


Layout: TypeAlias = Branch | Constant | Stashed | None
"""How a value is put together from tensors; None stands for a tensor. Equal layouts put equal tensors together to equal values."""


class Opaque:
    """An object that stays on its rank; any two of one type count as equal."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque) and type(other.value) is type(self.value)

    def __hash__(self) -> int:
        return hash(type(self.value))


class Payload(tuple[Tensor, ...]):
    """The tensors of a nest of arguments, in order, with its `layout`; `extra` are more keyword arguments.

    A plain tuple of tensors is positional arguments, and needs none of this.
    """

    layout: Layout
    extra: dict[str, Any]

    @classmethod
    def of(cls, tensors: Sequence[Tensor], layout: Layout, extra: dict[str, Any] | None = None) -> Payload:
        """A parcel of these parts."""
        parcel = cls(tensors)
        parcel.layout = layout
        parcel.extra = extra or {}
        return parcel

    def holding(self, tensors: Sequence[Tensor]) -> Payload:
        """The same nest with other tensors."""
        return Payload.of(tensors, self.layout, self.extra)

    def arguments(self) -> tuple[Sequence[Any], dict[str, Any]]:
        """What to call a module with: a dict is keyword arguments, anything else positional ones."""
        nest = put_together(self.layout, iter(self))
        return ((), {**nest, **self.extra}) if isinstance(nest, dict) else (nest, self.extra)


def opaque_in(layout: Layout) -> Iterator[type]:
    """The types of the objects in a nest that are neither tensors nor constants."""
    if isinstance(layout, Branch):
        for part in layout.parts:
            yield from opaque_in(part)
    elif isinstance(layout, Constant) and isinstance(layout.value, Opaque):
        yield layout.kind


def layout_of(tensors: tuple[Tensor, ...]) -> Layout:
    """How the tensors of a message lie, None for a plain tuple of them."""
    return tensors.layout if isinstance(tensors, Payload) else None


def with_extra(tensors: tuple[Tensor, ...], extra: dict[str, Any]) -> Payload:
    """These arguments with more keyword arguments."""
    layout = tensors.layout if isinstance(tensors, Payload) else Branch(tuple, (), (None,) * len(tensors))
    return Payload.of(tensors, layout, extra)


def take_apart(value: Any, tensors: list[Tensor], where: str = "", *, opaque: bool = False) -> Layout:
    """The layout of `value`, its tensors added to `tensors`.

    Raises `TypeError`, naming the place behind `where`, for an object that is neither tensor, constant nor nest; with `opaque` such
    objects are taken as they are.
    """
    kind = type(value)
    if isinstance(value, Tensor):
        tensors.append(value)
        return None
    if kind in _MAPS:
        return Branch(kind, tuple(value), tuple(take_apart(v, tensors, f"{where}[{k!r}]", opaque=opaque) for k, v in value.items()))
    if kind in _ROWS or _is_named_tuple(kind):
        return Branch(kind, (), tuple(take_apart(v, tensors, f"{where}[{i}]", opaque=opaque) for i, v in enumerate(value)))
    if kind in _CONSTANTS:
        return Constant(kind, value.hex() if kind is float else value)
    if opaque:
        return Constant(kind, Opaque(value))
    raise TypeError(f"{where} is a {kind.__name__}, which is neither a tensor nor a number, string, bool or None")


def put_together(layout: Layout, tensors: Iterator[Any]) -> Any:
    """The value of this layout with the next of `tensors`."""
    if layout is None:
        return next(tensors)
    if isinstance(layout, Constant):
        return _value_of(layout)
    assert isinstance(layout, Branch)
    parts = [put_together(part, tensors) for part in layout.parts]
    if layout.kind in _MAPS:
        return layout.kind(zip(layout.keys, parts, strict=True))
    make: Any = layout.kind
    return make(*parts) if _is_named_tuple(make) else make(parts)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in a nest, whatever else is in it."""
    tensors: list[Tensor] = []
    take_apart(value, tensors, opaque=True)
    return tensors


def changes(before: Layout, now: Layout, where: str = "") -> Iterator[str]:
    """What differs between two layouts, place by place: `['scale'] is 2, but was 1`."""
    if isinstance(before, Branch) and isinstance(now, Branch) and before[:2] == now[:2] and len(before.parts) == len(now.parts):
        for key, was, part in zip(before.keys or range(len(now.parts)), before.parts, now.parts, strict=True):
            yield from changes(was, part, f"{where}[{key!r}]")
    elif before != now:
        yield f"{where or 'the output'} is {'a tensor' if now is None else now}, but was {'a tensor' if before is None else before}"


def _is_named_tuple(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_make")


def _value_of(constant: Constant) -> Any:
    if isinstance(constant.value, Opaque):
        return constant.value.value
    return float.fromhex(constant.value) if constant.kind is float else constant.value
