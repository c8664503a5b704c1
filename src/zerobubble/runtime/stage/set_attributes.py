"""What a stage of a cut model knows of attributes of the user's model that forwards set in other stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from torch import nn


class SetAttribute(NamedTuple):
    """The attribute `name` of a module of the user's model, `path`, that forwards set to a value of this `kind`."""

    module: nn.Module
    path: str
    name: str
    kind: type


@runtime_checkable
class SetsElsewhere(Protocol):
    """A stage module that was cut from a model by `zb.split`."""

    def set_elsewhere(self) -> Sequence[SetAttribute]:
        """Returns the attributes that forwards set and that the user's model lacks where this stage runs, or has as they were before."""
        ...

    def set_by_other_parts(self) -> Sequence[SetAttribute]:
        """Returns those among them that parts of other stages set."""
        ...

    def parts_elsewhere(self) -> Mapping[str, nn.Module]:
        """Returns the parts of other stages by name, as the user's model has them."""
        ...
