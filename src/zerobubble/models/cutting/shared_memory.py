"""Refuses distinct parameters that share memory: autograd and optimizers do not know of it, and stages cannot preserve it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from zerobubble.errors import InputError
from zerobubble.models.cutting.cut import ModelCut
from zerobubble.models.cutting.parameter_names import ParameterNames
from zerobubble.models.observation.source_tracker import storage_of


class _Place(NamedTuple):
    """The location of a parameter (storage, first byte, end), and the stages that hold it."""

    storage: int
    begin: int
    end: int
    stages: tuple[int, ...]
    name: str

    def __str__(self) -> str:
        return f"{self.name!r} of stage {self.stages[0]}"


def refuse_shared_memory(names: ParameterNames, cut: ModelCut) -> None:
    """Raises `InputError` if two parameters overlap in memory and are not in the same stages of `cut`.

    On one device, an optimizer step on either parameter changes both.
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
                    "parameters {other} and {place} are different objects in the same memory: on one device, an optimizer that "
                    "changes one changes both, and stages cannot",
                    other=other,
                    place=place,
                    remedy="use a single parameter, which is tied automatically, give each its own memory, or cut the model so that "
                    "both are in one stage",
                )
        before.append(place)


def _place(name: str, parameter: nn.Parameter, stages: Sequence[int]) -> _Place:
    last = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
    begin, size = int(parameter.storage_offset()), parameter.element_size()
    return _Place(storage_of(parameter), begin * size, (begin + last + 1) * size, tuple(stages), name)
