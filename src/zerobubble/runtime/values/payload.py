"""What a stage takes and gives: pytrees, made of tensors in tuples, lists and dicts, with constants between them."""

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
_SEQUENCES = (tuple, list, torch.Size)
_MAPPINGS = (dict, OrderedDict)


class Constant(NamedTuple):
    """A leaf that is no tensor. A float is kept as its hexadecimal digits, so that -0.0 differs from 0.0 and NaN equals NaN."""

    kind: type
    value: Any

    def __str__(self) -> str:
        return repr(_value_of(self))


class Container(NamedTuple):
    """A tuple, a list, a named tuple or a dict with these `keys`; `parts` are the structures of what is in it."""

    kind: type
    keys: tuple[Any, ...]
    parts: tuple[Structure, ...]

    def __str__(self) -> str:
        return self.kind.__name__ + (f" of {', '.join(map(repr, self.keys))}" if self.keys else f" of {len(self.parts)}")


class Stashed(NamedTuple):
    """The structure of `arguments`, None where they are a plain tuple of tensors, and what travels behind them.

    That is tensors stashed under `names`, and then the sums of what was added to the loss under the names `losses`.
    """

    arguments: Structure
    names: tuple[str, ...]
    losses: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [
            f"{', '.join(map(repr, names))} {how}" for names, how in ((self.names, "stashed"), (self.losses, "added to the loss")) if names
        ]
        return f"{'tensors' if self.arguments is None else self.arguments} with {' and '.join(parts)}"


Structure: TypeAlias = Container | Constant | Stashed | None
"""What a pytree is but for its tensors, each of which is None in it. Equal structures with equal tensors are equal pytrees."""


class Opaque:
    """An object that stays on its rank; any two of one type count as equal."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque) and type(other.value) is type(self.value)

    def __hash__(self) -> int:
        return hash(type(self.value))


class Payload(tuple[Tensor, ...]):
    """The arguments of a stage where they are more than positional tensors: the tensors in them, in order, and their `structure`.

    `keywords` are further arguments by name, which the stage's own rank was given. Positional tensors alone are a plain tuple.
    """

    structure: Structure
    keywords: dict[str, Any]

    @classmethod
    def of(cls, tensors: Sequence[Tensor], structure: Structure, keywords: dict[str, Any] | None = None) -> Payload:
        """The payload of this structure with these tensors."""
        payload = cls(tensors)
        payload.structure = structure
        payload.keywords = keywords or {}
        return payload

    def with_tensors(self, tensors: Sequence[Tensor]) -> Payload:
        """The same pytree with other tensors."""
        return Payload.of(tensors, self.structure, self.keywords)

    def arguments(self) -> tuple[Sequence[Any], dict[str, Any]]:
        """What to call a module with: a dict is keyword arguments, anything else positional ones."""
        pytree = unflatten_pytree(self.structure, iter(self))
        return ((), {**pytree, **self.keywords}) if isinstance(pytree, dict) else (pytree, self.keywords)


def opaque_types_in(structure: Structure) -> Iterator[type]:
    """The types of the objects in a pytree that are neither tensors nor constants."""
    if isinstance(structure, Container):
        for part in structure.parts:
            yield from opaque_types_in(part)
    elif isinstance(structure, Constant) and isinstance(structure.value, Opaque):
        yield structure.kind


def structure_of(tensors: tuple[Tensor, ...]) -> Structure:
    """How the tensors of a message lie, None for a plain tuple of them."""
    return tensors.structure if isinstance(tensors, Payload) else None


def with_keywords(tensors: tuple[Tensor, ...], keywords: dict[str, Any]) -> Payload:
    """These arguments with more keyword arguments."""
    structure = tensors.structure if isinstance(tensors, Payload) else Container(tuple, (), (None,) * len(tensors))
    return Payload.of(tensors, structure, keywords)


def flatten_pytree(value: Any, tensors: list[Tensor], where: str = "", *, opaque: bool = False) -> Structure:
    """The structure of a pytree, whose tensors are appended to `tensors`.

    Raises `TypeError`, naming the place behind `where`, for an object that is neither tensor, constant nor pytree; with `opaque` such
    objects are taken as they are.
    """
    kind = type(value)
    if isinstance(value, Tensor):
        tensors.append(value)
        return None
    if kind in _MAPPINGS:
        return Container(kind, tuple(value), tuple(flatten_pytree(v, tensors, f"{where}[{k!r}]", opaque=opaque) for k, v in value.items()))
    if kind in _SEQUENCES or _is_named_tuple(kind):
        return Container(kind, (), tuple(flatten_pytree(v, tensors, f"{where}[{i}]", opaque=opaque) for i, v in enumerate(value)))
    constant = constant_of(value)
    if constant is not None:
        return constant
    if opaque:
        return Constant(kind, Opaque(value))
    raise TypeError(f"{where} is a {kind.__name__}, which is neither a tensor nor a number, string, bool or None")


def constant_of(value: Any) -> Constant | None:
    """The leaf that a number, string, bool, None or torch constant is; None for anything else."""
    kind = type(value)
    return Constant(kind, value.hex() if kind is float else value) if kind in _CONSTANTS else None


def unflatten_pytree(structure: Structure, tensors: Iterator[Any]) -> Any:
    """The pytree of this structure with the next of `tensors`."""
    if structure is None:
        return next(tensors)
    if isinstance(structure, Constant):
        return _value_of(structure)
    assert isinstance(structure, Container)
    parts = [unflatten_pytree(part, tensors) for part in structure.parts]
    if structure.kind in _MAPPINGS:
        return structure.kind(zip(structure.keys, parts, strict=True))
    make: Any = structure.kind
    return make(*parts) if _is_named_tuple(make) else make(parts)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in a pytree, whatever else is in it."""
    tensors: list[Tensor] = []
    flatten_pytree(value, tensors, opaque=True)
    return tensors


def changes(before: Structure, now: Structure, where: str = "") -> Iterator[str]:
    """What differs between two structures, place by place: `['scale'] is 2, but was 1`."""
    if isinstance(before, Container) and isinstance(now, Container) and before[:2] == now[:2] and len(before.parts) == len(now.parts):
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
