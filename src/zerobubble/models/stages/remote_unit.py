"""What stands in a stage for a unit that another stage holds, so that code of the user's may go through the stage as through a model.

Such code shards blocks, compiles them, sets hooks or initializes weights. It does so where the unit is; here there is nothing to do.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from zerobubble.errors import InputError
from zerobubble.models.observation.stand_in import StandIn


class Elsewhere(StandIn):
    """A unit that another stage holds. `modules()` does not list it unless a forward runs or it holds parameters of this stage."""

    @property
    def __class__(self) -> type:
        return type(self.skeleton.unit)

    @__class__.setter
    def __class__(self, kind: type) -> None:
        """Stay what it is: `fully_shard` gives what it divides another class. Raises `InputError` where it divides parameters."""
        if self._parameters:
            raise InputError(
                f"part {self.skeleton.name!r} is in another stage, and this one shares its {', '.join(self._parameters)}: leave it out "
                "here and apply fully_shard to the whole stage"
            )

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """Itself, where it is of any use."""
        if self._parameters or hasattr(self._current, "forward"):
            yield from super().named_modules(*args, **kwargs)

    def apply(self, fn: Callable[[nn.Module], None]) -> Elsewhere:
        """Nothing: `fn` is applied where the unit is."""
        return self

    def compile(self, *_: Any, **__: Any) -> None:
        """Nothing: the unit is compiled where it is."""

    def register_forward_pre_hook(self, *_: Any, **__: Any) -> RemovableHandle:
        """No hook: it sees the calls of the unit where that is."""
        return RemovableHandle(OrderedDict())

    register_full_backward_hook = register_full_backward_pre_hook = register_forward_pre_hook
