"""Lets the ranks of a pipeline read the same batches: those of their replica, as if each replica were one process."""

from __future__ import annotations

from copy import copy
from functools import cache
from typing import Any

import zerobubble as zb
from zerobubble.integrations.batches import digest_of, refuse_different_digests


def with_properties(owner: Any, **properties: Any) -> Any:
    """Returns an object with other properties, such as one process for each replica, and all other attributes of `owner`.

    By the number of the process, Transformers seeds the workers of data loaders, and samples batches of similar lengths.
    """
    kind: Any = type(owner)
    return _sharing(owner, _class_with(kind, tuple(properties.items())))


@cache
def _class_with(kind: type, properties: tuple[tuple[str, Any], ...]) -> type:
    """Returns a class with other properties, whose objects are saved and copied as objects of `kind`."""

    def constant(value: Any) -> property:
        return property(lambda _: value)

    reduced = {"__reduce_ex__": lambda self, protocol: (copy, (_sharing(self, kind),))}
    return type(kind.__name__, (kind,), {name: constant(value) for name, value in properties} | reduced)


def _sharing(owner: Any, kind: type) -> Any:
    """Returns an object of a class with the attributes of `owner`."""
    shared: Any = object.__new__(kind)
    shared.__dict__ = vars(owner)
    return shared


def refuse_different_batches(pipe: zb.Pipeline, batch: Any) -> None:
    """Raises `InputError` on all ranks of a pipeline if they have read different batches."""
    refuse_different_digests(
        pipe._steps.gather(digest_of(batch), "comparing the batches of the ranks"),
        "read the same batches",
        "draw and count alike on all ranks: from torch's, Python's or NumPy's default generator, or from one of your own with the same "
        "seed, and not by the number of the rank",
    )
