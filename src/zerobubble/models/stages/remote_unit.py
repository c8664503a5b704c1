"""The stand-in for a unit of another stage, compatible with user code that treats the stage like the whole model.

Such code shards blocks, compiles them, registers hooks or initializes weights. It takes effect on the stage of the unit; here, these calls
do nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from zerobubble.errors import InputError
from zerobubble.models.observation.stand_in import StandIn


class RemoteUnit(StandIn):
    """A unit of another stage. `modules()` lists it only during a forward, or if it holds parameters of this stage."""

    @property
    def __class__(self) -> type:
        return type(self.shape_only.unit)

    @__class__.setter
    def __class__(self, kind: type) -> None:
        """Ignores a change of class, as by `fully_shard`. Raises `InputError` if that would shard parameters."""
        if self._parameters:
            raise InputError(
                "part {name!r} is in another stage, and this one shares its {parameters}",
                name=self.shape_only.name,
                parameters=", ".join(self._parameters),
                remedy="leave it out here and apply fully_shard to the whole stage",
            )

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """Yields itself if it is visible."""
        if self._parameters or hasattr(self._current, "forward"):
            yield from super().named_modules(*args, **kwargs)

    def apply(self, fn: Callable[[nn.Module], None]) -> RemoteUnit:
        """Does nothing: `fn` applies on the stage of the unit."""
        return self

    def compile(self, *_: Any, **__: Any) -> None:
        """Does nothing: the unit is compiled on its own stage."""

    def register_forward_pre_hook(self, *_: Any, **__: Any) -> RemovableHandle:
        """Registers nothing: hooks run on the stage of the unit."""
        return RemovableHandle(OrderedDict())

    register_full_backward_hook = register_full_backward_pre_hook = register_forward_pre_hook
