"""Records which attributes of modules code reads before it sets them: what these were before the code ran may change what it does."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from zerobubble.models.observation.assembly import with_own
from zerobubble.models.observation.equivalent_units import Place
from zerobubble.runtime.values.python_objects import is_of_library


@contextmanager
def recording_first_reads(modules: Mapping[str, nn.Module]) -> Iterator[set[Place]]:
    """A context in which code reads attributes of those `modules`, given by name, that are observable.

    They have classes of the same names, derived from theirs, in this context.
    """
    names = {id(module): name for name, module in modules.items()}
    read: set[Place] = set()
    is_set: set[Place] = set()
    observed = [(module, type(module)) for module in modules.values() if is_observable(module)]

    def note(module: nn.Module, attribute: str, places: set[Place]) -> None:
        if id(module) in names and (place := Place(names[id(module)], attribute)) not in is_set:
            places.add(place)

    def noting(kind: type[nn.Module]) -> type[nn.Module]:
        def get(self: nn.Module, name: str) -> Any:
            reads_all = name == "__dict__" and not is_of_library(sys._getframe(1).f_globals.get("__name__"))  # vars(self)
            for attribute in dict.keys(object.__getattribute__(self, name)) if reads_all else (name,):
                note(self, attribute, read)
            return object.__getattribute__(self, name)

        def put(self: nn.Module, name: str, value: Any) -> None:
            note(self, name, is_set)
            kind.__setattr__(self, name, value)

        return with_own(kind, {"__getattribute__": get, "__setattr__": put})

    kinds = {kind: noting(kind) for kind in {kind for _, kind in observed}}
    for module, kind in observed:
        module.__class__ = kinds[kind]
    try:
        yield read
    finally:
        for module, kind in observed:
            module.__class__ = kind


def is_observable(module: nn.Module) -> bool:
    """Returns whether a module may have another class while it runs. Code may compare the classes of torch, such as Linear."""
    kind = type(module)
    return not is_of_library(kind.__module__) and kind.__getattribute__ is object.__getattribute__
