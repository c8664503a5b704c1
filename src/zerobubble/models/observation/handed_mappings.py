"""What units put into a mapping that the model's code hands from part to part: keys and values that later layers use, too.

Transformers hands a `UserDict` to all layers of models that share keys and values between layers. The law: what a unit puts there is part
of what its call gives. So it crosses boundaries with it, and the stand-in of the unit puts the same there.
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch.utils import _pytree as pytree

from zerobubble.errors import InputError

Put = list[dict[Any, Any]]
"""For each mapping among the arguments of a call, what the call put there."""


def mappings_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[UserDict[Any, Any]]:
    """The mappings among the arguments of a call, in their order."""
    return [value for value in (*args, *kwargs.values()) if isinstance(value, UserDict)]


def _opened(value: Any) -> Any:
    return dict(value) if isinstance(value, UserDict) else value


class Opened(NamedTuple):
    """The arguments of a call as a pytree, with what is in their mappings."""

    leaves: list[Any]
    structure: pytree.TreeSpec
    given: tuple[tuple[Any, ...], dict[str, Any]]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Opened:
        """The arguments of a call, opened."""
        inside = (tuple(map(_opened, args)), {name: _opened(value) for name, value in kwargs.items()})
        return cls(*pytree.tree_flatten(inside), (args, kwargs))

    def closed(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments like these with other leaves, and with mappings of their own."""
        args, kwargs = pytree.tree_unflatten(list(leaves), self.structure)
        given_args, given_kwargs = self.given
        made = tuple(_closed(value, like) for value, like in zip(args, given_args, strict=True))
        return made, {name: _closed(kwargs[name], like) for name, like in given_kwargs.items()}


def _closed(value: Any, like: Any) -> Any:
    if not isinstance(like, UserDict):
        return value
    made = copy.copy(like)
    made.data = value
    return made


def taken_out(before: Sequence[Mapping[Any, Any]], mappings: Sequence[UserDict[Any, Any]]) -> Put:
    """What was put into `mappings` since they held what is in `before`; they are empty afterwards."""
    found = [
        {key: value for key, value in mapping.items() if key not in held or held[key] is not value}
        for held, mapping in zip(before, mappings, strict=True)
    ]
    for mapping in mappings:
        mapping.data = {}
    return found


def put_into(mappings: Sequence[UserDict[Any, Any]], put: Put) -> None:
    """Put into `mappings` what a unit put there elsewhere."""
    for mapping, entries in zip(mappings, put, strict=True):
        mapping.update(entries)


def entries_like(expected: Put, mappings: Sequence[UserDict[Any, Any]], call: object) -> Put:
    """What `call` put into `mappings`, whose keys are those of `expected`."""
    missing = [key for entries, mapping in zip(expected, mappings, strict=True) for key in entries if key not in mapping]
    if missing:
        raise InputError(f"{call} puts no {missing[0]!r} into a mapping that it is given, and did when the model was looked at")
    return [{key: mapping[key] for key in entries} for entries, mapping in zip(expected, mappings, strict=True)]
