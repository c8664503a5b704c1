"""The inputs and outputs of a stage: pytrees of tensors and constants in tuples, lists, dicts and dataclasses."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import NoneType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from zerobubble.runtime.values.plain_values import DataclassReference

Tensors: TypeAlias = tuple[Tensor, ...]
"""The tensors at a stage boundary; a `Payload` if they are more than the positional arguments of the next stage."""
Cotangents: TypeAlias = tuple[Tensor | None, ...]
"""The gradients of the differentiable tensors; None for a tensor that the next stage ignored."""
_CONSTANTS = (NoneType, bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_SEQUENCES = (tuple, list, torch.Size)
_MAPPINGS = (dict, OrderedDict)


class Constant(NamedTuple):
    """A leaf that is not a tensor. A float is kept in hexadecimal, so that -0.0 differs from 0.0 and NaN equals NaN."""

    kind: type
    value: Any

    def __str__(self) -> str:
        return repr(_value_of(self))


class Container(NamedTuple):
    """A tuple, list, named tuple, dict with these `keys`, or dataclass with these fields; `parts` are the structures of its elements."""

    kind: type | DataclassReference
    keys: tuple[Any, ...]
    parts: tuple[Structure, ...]

    def __str__(self) -> str:
        return self.kind.__name__ + (f" of {', '.join(map(repr, self.keys))}" if self.keys else f" of {len(self.parts)}")


class Stashed(NamedTuple):
    """The structure of `arguments`, None for a plain tuple of tensors, and of the tensors appended to them.

    These are the tensors stashed under `names`, and then the sums of the losses added under the names `losses`.
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
"""A pytree with None in place of each tensor. Equal structures with equal tensors are equal pytrees."""


class Opaque:
    """An object that stays on its rank; any two of one type count as equal."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque) and type(other.value) is type(self.value)

    def __hash__(self) -> int:
        return hash(type(self.value))


class Payload(tuple[Tensor, ...]):
    """The arguments of a stage that are more than positional tensors: their tensors in order, and their `structure`.

    `keywords` are further named arguments, which the stage's own rank was given. Positional tensors alone are a plain tuple.
    """

    structure: Structure
    keywords: dict[str, Any]

    @classmethod
    def from_tensors(cls, tensors: Sequence[Tensor], structure: Structure, keywords: dict[str, Any] | None = None) -> Payload:
        """Returns the payload of this structure with these tensors."""
        payload = cls(tensors)
        payload.structure = structure
        payload.keywords = keywords or {}
        return payload

    def with_tensors(self, tensors: Sequence[Tensor]) -> Payload:
        """Returns the same pytree with other tensors."""
        return Payload.from_tensors(tensors, self.structure, self.keywords)

    def arguments(self) -> tuple[Sequence[Any], dict[str, Any]]:
        """Returns the positional and keyword arguments of the module: a dict becomes keyword arguments, anything else is positional."""
        pytree = unflatten_pytree(self.structure, iter(self))
        return ((), {**pytree, **self.keywords}) if isinstance(pytree, dict) else (pytree, self.keywords)


def opaque_in(structure: Structure) -> Iterator[Any]:
    """Yields the objects in a pytree that are neither tensors nor constants."""
    if isinstance(structure, Container):
        for part in structure.parts:
            yield from opaque_in(part)
    elif isinstance(structure, Constant) and isinstance(structure.value, Opaque):
        yield structure.value.value


def opaque_types_in(structure: Structure) -> Iterator[type]:
    """Yields the types of the objects in a pytree that are neither tensors nor constants."""
    yield from map(type, opaque_in(structure))


def structure_of(tensors: tuple[Tensor, ...]) -> Structure:
    """Returns the structure of a message's tensors, None for a plain tuple."""
    return tensors.structure if isinstance(tensors, Payload) else None


def with_keywords(tensors: tuple[Tensor, ...], keywords: dict[str, Any]) -> Payload:
    """Returns these arguments with more keyword arguments."""
    structure = tensors.structure if isinstance(tensors, Payload) else Container(tuple, (), (None,) * len(tensors))
    return Payload.from_tensors(tensors, structure, keywords)


def flatten_pytree(value: Any, where: str = "", *, opaque: bool = False) -> tuple[list[Tensor], Structure]:
    """Returns the tensors of a pytree, and its structure.

    Raises `TypeError`, naming the place after `where`, for an object that is neither tensor, constant nor pytree; with `opaque`, keeps such
    objects as they are.
    """
    tensors: list[Tensor] = []
    return tensors, _flatten(value, tensors, where, opaque)


def _flatten(value: Any, tensors: list[Tensor], where: str, opaque: bool) -> Structure:
    """Returns the structure of a pytree, and appends its tensors to `tensors`."""
    kind = type(value)
    if isinstance(value, Tensor):
        tensors.append(value)
        return None
    if kind in _MAPPINGS:
        return Container(kind, tuple(value), tuple(_flatten(v, tensors, f"{where}[{k!r}]", opaque) for k, v in value.items()))
    if kind in _SEQUENCES or _is_named_tuple(kind):
        return Container(kind, (), tuple(_flatten(v, tensors, f"{where}[{i}]", opaque) for i, v in enumerate(value)))
    constant = constant_of(value)
    if constant is not None:
        return constant
    if is_plain_dataclass(value) and (not opaque or any(tensors_in(getattr(value, field.name)) for field in fields(value))):
        names = tuple(field.name for field in fields(value))
        parts = (_flatten(getattr(value, name), tensors, f"{where}.{name}", opaque) for name in names)
        return Container(DataclassReference(kind), names, tuple(parts))
    if opaque:
        return Constant(kind, Opaque(value))
    raise TypeError(f"{where} is a {kind.__name__}, which is neither a tensor nor a number, string, bool or None")


def is_plain_dataclass(value: Any) -> bool:
    """Returns whether a value is an instance of a dataclass that is not a mapping too, as outputs of Transformers are."""
    return is_dataclass(value) and not isinstance(value, (type, Mapping))


def constant_of(value: Any) -> Constant | None:
    """Returns the leaf of a number, string, bool, None or torch constant; None for anything else."""
    kind = type(value)
    return Constant(kind, value.hex() if kind is float else value) if kind in _CONSTANTS else None


def unflatten_pytree(structure: Structure, tensors: Iterator[Any]) -> Any:
    """Returns the pytree of this structure with the next of `tensors`."""
    if structure is None:
        return next(tensors)
    if isinstance(structure, Constant):
        return _value_of(structure)
    assert isinstance(structure, Container)
    parts = [unflatten_pytree(part, tensors) for part in structure.parts]
    make: Any = structure.kind
    if isinstance(make, DataclassReference):
        instance: Any = object.__new__(make.kind)
        for name, part in zip(structure.keys, parts, strict=True):
            object.__setattr__(instance, name, part)  # frozen ones, too; __post_init__ has run where it was made
        return instance
    if make in _MAPPINGS:
        return make(zip(structure.keys, parts, strict=True))
    return make(*parts) if _is_named_tuple(make) else make(parts)


def tensors_in(value: Any) -> list[Tensor]:
    """Returns the tensors in a pytree, which may hold any objects."""
    return flatten_pytree(value, opaque=True)[0]


def changes(before: Structure, now: Structure, where: str = "") -> Iterator[str]:
    """Yields the differences between two structures, place by place: `['scale'] is 2, but was 1`."""
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
