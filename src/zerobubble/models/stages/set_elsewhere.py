"""Lists the attributes of a user's model that forwards set elsewhere: in the parts of other stages, and in a stage's copies around them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from zerobubble.models.cutting.cut import ModelCut
from zerobubble.models.observation.following import Follower, is_compound
from zerobubble.models.observation.observed_model import ObservedModel
from zerobubble.models.observation.units import join
from zerobubble.runtime.stage.set_attributes import SetAttribute
from zerobubble.runtime.values.stateful import tensors_inside


class SetElsewhere:
    """The attributes of the user's `model` that forwards set elsewhere than in the units of stage `stage`.

    What units of other stages set is known from their shape-only versions. What the code around the units sets in the current call is set
    in copies of the stage, which `follower` compares. An object that this code changes in place may be common to the model and the stage:
    its tensors are placeholders if they come from units of other stages.
    """

    def __init__(self, model: nn.Module, observed: ObservedModel, cut: ModelCut, stage: int, follower: Follower) -> None:
        self._model = model
        self._observed = observed
        self._others = {name: observed.shape_only_by_name[name] for name, home in cut.stage_of.items() if home != stage}
        self._follower = follower

    def attributes(self) -> list[SetAttribute]:
        """Returns the attributes that forwards have set so far."""
        return [*self.of_other_units(), *self._in_copies(), *self._with_tensors()]

    def parts(self) -> dict[str, nn.Module]:
        """Returns the units of other stages by name."""
        return {name: shape_only.original for name, shape_only in self._others.items()}

    def of_other_units(self) -> list[SetAttribute]:
        """Returns the attributes that units of other stages have set."""
        return list(self._of_other_units())

    def _of_other_units(self) -> Iterator[SetAttribute]:
        for unit, shape_only in self._others.items():
            for path, name in shape_only.attributes_set:
                module, value = shape_only.original.get_submodule(path), vars(shape_only.unit.get_submodule(path)).get(name)
                yield SetAttribute(module, join(unit, path) if path else unit, name, type(value))

    def _in_copies(self) -> Iterator[SetAttribute]:
        for module, path, values in self._follower.set_so_far():
            yield from (SetAttribute(module, path, name, type(value)) for name, value in values.items())

    def _with_tensors(self) -> Iterator[SetAttribute]:
        """Yields the objects with tensors that forwards change around the units."""
        for path, names in self._observed.changed.items():
            module = self._model.get_submodule(path)
            for name in names:
                value = vars(module).get(name)
                if is_compound(value) and any(True for _ in tensors_inside(value)):
                    yield SetAttribute(module, path, name, type(value))
