"""Parameters that lie in the same memory and are not one: autograd and optimizers know nothing of it, and stages cannot keep it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from zerobubble.errors import InputError
from zerobubble.models.cutting.cut import ModelCut
from zerobubble.models.cutting.parameter_names import ParameterNames
from zerobubble.models.observation.following import storage_of


class _Place(NamedTuple):
    """Where a parameter lies: its storage, the first byte in it and the one behind its last; and the stages that hold it."""

    storage: int
    begin: int
    end: int
    stages: tuple[int, ...]
    name: str

    def __str__(self) -> str:
        return f"{self.name!r} of stage {self.stages[0]}"


def refuse_shared_memory(names: ParameterNames, cut: ModelCut) -> None:
    """Raise `InputError` where two parameters of the model overlap in memory, and not the same stages of `cut` hold them.

    On one device a step of the optimizer changes both by what it does to each.
    """
    parameters = {id(parameter): (name, parameter) for name, parameter in reversed(list(names.named.items()))}
    stages: dict[int, list[int]] = {key: [] for key in parameters}
    for stage in range(cut.num_stages):
        for key in {id(names.named[name]) for name in names.of_stage(cut, stage)}:
            stages[key].append(stage)
    strided = [(key, each) for key, each in parameters.items() if each[1].layout is torch.strided and each[1].numel() and stages[key]]
    before: list[_Place] = []
    for place in sorted(_place(*each, stages[key]) for key, each in strided):
        before = [other for other in before if other.storage == place.storage and other.end > place.begin]
        for other in before:
            if other.stages != place.stages:
                raise InputError(
                    f"parameters {other} and {place} lie in the same memory and are two objects: on one device an optimizer changes both "
                    "where it changes one, and stages cannot; make them one parameter, which is tied by itself, give each memory of its "
                    "own, or cut where both are in one stage"
                )
        before.append(place)


def _place(name: str, parameter: nn.Parameter, stages: Sequence[int]) -> _Place:
    last = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
    begin, size = int(parameter.storage_offset()), parameter.element_size()
    return _Place(storage_of(parameter), begin * size, (begin + last + 1) * size, tuple(stages), name)
