"""What a stage of a cut model knows of attributes of the user's model that forwards set in other stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from torch import nn

from zerobubble.runtime.values.python_places import Place


class SetAttribute(NamedTuple):
    """The attribute `name` of a module of the user's model, `path`, that forwards set to a value of this `kind`."""

    module: nn.Module
    path: str
    name: str
    kind: type


class ReadState(NamedTuple):
    """The `places` of attributes, buffers and variables that forwards read, and the `names` in the user's code that they run."""

    places: Sequence[Place]
    names: frozenset[str]


@runtime_checkable
class SetsElsewhere(Protocol):
    """A stage module that was cut from a model by `zb.split`."""

    def set_elsewhere(self) -> Sequence[SetAttribute]:
        """Returns the attributes that forwards set and that the user's model lacks where this stage runs, or has as they were before."""
        ...

    def set_by_other_parts(self) -> Sequence[SetAttribute]:
        """Returns those among them that parts of other stages set."""
        ...

    def read_elsewhere(self, *, includes_own: bool) -> ReadState:
        """Returns the state of the user's model that forwards read before they set it.

        Unless it `includes_own`, what only parts of this stage read is left out. The result is the same object until there is more.
        """
        ...

    def parts_elsewhere(self) -> Mapping[str, nn.Module]:
        """Returns the parts of other stages by name, as the user's model has them."""
        ...
