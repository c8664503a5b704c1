"""Entries that units put into a mapping which the model's code passes from part to part, such as shared keys and values.

Transformers passes a `UserDict` to all layers of models that share keys and values between layers. An entry that a unit adds counts as part
of its output. So it crosses boundaries with the output, and the unit's stand-in adds the same entry.
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch.utils import _pytree as pytree

from zerobubble.errors import InputError

Put = list[dict[Any, Any]]
"""The entries that a call put into each mapping among its arguments."""


def mappings_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[UserDict[Any, Any]]:
    """Returns the mappings among the arguments of a call, in order."""
    return [value for value in (*args, *kwargs.values()) if isinstance(value, UserDict)]


def _opened(value: Any) -> Any:
    return dict(value) if isinstance(value, UserDict) else value


class Opened(NamedTuple):
    """The arguments of a call as a pytree, including the contents of mappings."""

    leaves: list[Any]
    structure: pytree.TreeSpec
    given: tuple[tuple[Any, ...], dict[str, Any]]

    @classmethod
    def from_call(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Opened:
        """Flattens the arguments of a call."""
        inside = (tuple(map(_opened, args)), {name: _opened(value) for name, value in kwargs.items()})
        return cls(*pytree.tree_flatten(inside), (args, kwargs))

    def closed(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns arguments of this structure with other leaves, in new mappings."""
        args, kwargs = pytree.tree_unflatten(list(leaves), self.structure)
        given_args, given_kwargs = self.given
        closed_args = tuple(_closed(value, like) for value, like in zip(args, given_args, strict=True))
        return closed_args, {name: _closed(kwargs[name], like) for name, like in given_kwargs.items()}


def _closed(value: Any, like: Any) -> Any:
    if not isinstance(like, UserDict):
        return value
    mapping = copy.copy(like)
    mapping.data = value
    return mapping


def taken_out(before: Sequence[Mapping[Any, Any]], mappings: Sequence[UserDict[Any, Any]]) -> Put:
    """Returns the entries added to `mappings` since `before`, and clears the mappings."""
    added = [
        {key: value for key, value in mapping.items() if key not in held or held[key] is not value}
        for held, mapping in zip(before, mappings, strict=True)
    ]
    for mapping in mappings:
        mapping.data = {}
    return added


def put_into(mappings: Sequence[UserDict[Any, Any]], put: Put) -> None:
    """Adds to `mappings` the entries that a unit added on another stage."""
    for mapping, entries in zip(mappings, put, strict=True):
        mapping.update(entries)


def entries_like(expected: Put, mappings: Sequence[UserDict[Any, Any]], call: object) -> Put:
    """Returns the entries of `call` in `mappings`, with the keys of `expected`."""
    missing = [key for entries, mapping in zip(expected, mappings, strict=True) for key in entries if key not in mapping]
    if missing:
        raise InputError(
            "{call} puts no {missing!r} into a mapping among its arguments, but did when the model was observed",
            call=str(call),
            missing=missing[0],
        )
    return [{key: mapping[key] for key in entries} for entries, mapping in zip(expected, mappings, strict=True)]
