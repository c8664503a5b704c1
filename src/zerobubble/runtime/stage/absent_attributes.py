"""Refuses reads of attributes that forwards set in parts of other ranks, such as router statistics: in this rank's model they are old.

They are replaced while the parameters of these parts are released, so no forward of the parts can run that would need them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from zerobubble.errors import InputError
from zerobubble.runtime.split.stage_with_loss import stage_alone
from zerobubble.runtime.stage.set_attributes import SetAttribute, SetsElsewhere
from zerobubble.runtime.values.refusing import Refusing
from zerobubble.runtime.values.stateful import stateful_tensors
from zerobubble.runtime.values.stored import ABSENT

DERIVED_FROM = ("_orig", "_v")
"""Endings of the parameters from which `torch.nn.utils.prune`, `spectral_norm` and `weight_norm` compute an attribute."""


class _Replaced(NamedTuple):
    """The `value` that a module had under this name before it was replaced by `refusing`."""

    table: dict[str, Any]
    name: str
    value: Any
    refusing: Refusing


def _belongs_to_a_parameter(place: SetAttribute) -> bool:
    """Returns whether the tensors in an attribute are released and gathered with a parameter.

    They are computed from it, or are the state of a quantized weight, in an object of its library (`state` in 8 bits of bitsandbytes).
    """
    if any(f"{place.name}{ending}" in place.module._parameters for ending in DERIVED_FROM):
        return True
    is_object = hasattr(vars(place.module).get(place.name), "__dict__")
    return is_object and place.kind is not Tensor and bool(stateful_tensors(place.module))


class AbsentAttributes:
    """The attributes that the stages `modules` do not set. `error` makes the error for the name of a module and of its attribute."""

    def __init__(self, modules: Mapping[int, nn.Module], error: Callable[[str, str], InputError]) -> None:
        self._modules = modules
        self._error = error
        self._replaced: dict[tuple[int, str], _Replaced] = {}

    def refuse(self) -> None:
        """Replaces the attributes, also those that were set or found since. Takes about 1 us for each."""
        for place in self._places():
            table, name = vars(place.module), place.name
            replaced = self._replaced.get((id(place.module), name))
            if replaced is None or table.get(name, ABSENT) is not replaced.refusing:
                refusing = self._refusing(place) if replaced is None else replaced.refusing
                self._replaced[id(place.module), name] = _Replaced(table, name, table.get(name, ABSENT), refusing)
                table[name] = refusing

    def restore(self) -> None:
        """Puts back what was replaced."""
        for table, name, value, refusing in self._replaced.values():
            if table.get(name) is not refusing:
                continue
            if value is ABSENT:
                del table[name]
            else:
                table[name] = value
        self._replaced.clear()

    def _places(self) -> list[SetAttribute]:
        """Returns the attributes that no stage of this rank sets, of modules that none of them contains."""
        stages = [stage for module in self._modules.values() if isinstance(stage := stage_alone(module), SetsElsewhere)]
        by_stage = [{(id(place.module), place.name): place for place in stage.set_by_other_parts()} for stage in stages]
        common = [place for key, place in next(iter(by_stage), {}).items() if all(key in places for places in by_stage)]
        here = {id(module) for stage in self._modules.values() for module in stage.modules()} if common else ()  # parts may share a module
        others = [place for place in common if id(place.module) not in here]
        return [place for place in others if not _belongs_to_a_parameter(place)]

    def _refusing(self, place: SetAttribute) -> Refusing:
        return Refusing.made(lambda: self._error(place.path, place.name), may_reset=True)
