"""Lists the attributes of a user's model that forwards set elsewhere: in the parts of other stages, and in a stage's copies around them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from zerobubble.models.cutting.cut import ModelCut
from zerobubble.models.observation.following import Follower
from zerobubble.models.observation.shape_only import ShapeOnlyUnit
from zerobubble.models.observation.units import join
from zerobubble.runtime.stage.loss_reads import SetAttribute


class SetElsewhere:
    """The attributes of the user's model that forwards set elsewhere than in the units of stage `stage`.

    What units of other stages set is known from their shape-only versions. What the code around the units sets in the current call is set
    in copies of the stage, which `follower` compares.
    """

    def __init__(self, shape_only: Mapping[str, ShapeOnlyUnit], cut: ModelCut, stage: int, follower: Follower) -> None:
        self._others = {name: shape_only[name] for name, home in cut.stage_of.items() if home != stage}
        self._follower = follower

    def attributes(self) -> list[SetAttribute]:
        """Returns the attributes that forwards have set so far."""
        around = (SetAttribute(module, path, name) for module, path, names in self._follower.set_so_far() for name in names)
        return [*self._of_other_units(), *around]

    def _of_other_units(self) -> Iterator[SetAttribute]:
        for unit, shape_only in self._others.items():
            for path, name in shape_only.attributes_set:
                yield SetAttribute(shape_only.original.get_submodule(path), join(unit, path) if path else unit, name)
