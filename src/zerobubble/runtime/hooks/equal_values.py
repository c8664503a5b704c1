"""Refuses copies of a parameter with values that drift apart: tied places, and copies of a stage on several routes.

Copies get the same gradients and have equal optimizers. They still drift if a rank changes gradients or weights by itself between steps: by
noise, by the names of parameters, or if it skips the step of an optimizer. When a step ends, a rank compares the sum and the norm of each
copy with those of the next and the previous rank that hold one.

Cost per step: one read of each of these parameters, and two numbers for each to these ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar, NamedTuple, NoReturn

import torch
from torch import Tensor

from zerobubble.errors import InputError
from zerobubble.runtime.hooks.equal_optimizers import SharedWith
from zerobubble.runtime.step.hook import StepHook, TrainingStep
from zerobubble.runtime.transport.control import Expected, Sending, Topic

_DOING = "comparing the values of a parameter that several ranks hold"
_ROUNDING = 1e-6
"""The share of the norm by which sums and norms may differ: kernels of optimizers may round differently."""
_ROUNDING_IN_16_BITS = 1e-2


class Measure(NamedTuple):
    """The sum of the values of a tensor, and their norm."""

    total: float
    norm: float

    def is_close(self, other: Measure, rounding: float) -> bool:
        """Whether another tensor may have the same values. Numbers that are not finite are not compared."""
        most = max(self.norm, other.norm)
        difference = max(abs(self.total - other.total), abs(self.norm - other.norm))
        return not math.isfinite(most) or difference <= rounding * most


@dataclass(frozen=True, slots=True)
class Measures:
    """The measures of the parameters that two ranks share, in the same order on both."""

    topic: ClassVar[Topic] = Topic.COPIES

    of_parameters: tuple[Measure, ...]

    def numbers(self) -> tuple[float, ...]:
        return tuple(chain.from_iterable(self.of_parameters))

    @classmethod
    def read(cls, numbers: Tensor) -> Measures:
        return cls(tuple(Measure(*pair) for pair in numbers.view(-1, 2).tolist()))


class EqualValues(StepHook):
    """Compares the values of the parameters that this rank shares with others, at the end of each step."""

    def __init__(self, shared: Iterable[SharedWith]) -> None:
        self._shared = list(shared)
        self._sends: list[Sending] = []
        self._expected: list[Expected[Measures]] = []

    @property
    def is_needed(self) -> bool:
        """Whether this rank shares any parameter."""
        return bool(self._shared)

    def on_step_end(self, step: TrainingStep) -> None:
        """Raises `InputError` if a copy has other values. An optimizer that steps ahead has settled by now."""
        mine = [_measured([tensors[0] for tensors in shared.held]) for shared in self._shared]
        pairs = [(shared, measures) for shared, measures in zip(self._shared, mine, strict=True) if shared.peer != shared.peers.rank]
        self._sends = [shared.peers.send_control(measures, shared.peer) for shared, measures in pairs]
        self._expected = [shared.peers.expect_control(Measures, 2 * len(shared.held), shared.peer) for shared, _ in pairs]
        theirs = [expected.wait(_DOING) for expected in self._expected]
        for sending in self._sends:
            sending.wait(_DOING)
        self.on_close()
        for shared in self._shared:
            _refuse_on_one_rank(shared)
        for (shared, measures), others in zip(pairs, theirs, strict=True):
            _refuse_other(shared, measures, others)

    def on_close(self) -> None:
        """Drops messages in flight: they would keep connections open."""
        self._sends, self._expected = [], []


def _measured(tensors: Sequence[Tensor]) -> Measures:
    numbers = torch.stack(list(chain.from_iterable(map(_sum_and_norm, tensors)))).tolist()
    return Measures(tuple(map(Measure, numbers[::2], numbers[1::2])))


def _sum_and_norm(tensor: Tensor) -> Iterator[Tensor]:
    values = (torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()).double()
    yield values.sum()
    yield torch.linalg.vector_norm(values)


def _rounding_of(tensor: Tensor) -> float:
    return _ROUNDING_IN_16_BITS if tensor.element_size() < 4 else _ROUNDING


def _refuse_on_one_rank(shared: SharedWith) -> None:
    """Raises `InputError` if two tensors of this rank differ."""
    for tensors, names in zip(shared.held, shared.here, strict=True):
        if len(tensors) > 1:
            first, *others = _measured(tensors).of_parameters
            for name, other in zip(names[1:], others, strict=True):
                if not first.is_close(other, _rounding_of(tensors[0])):
                    _refuse(names[0], first, name, other)


def _refuse_other(shared: SharedWith, mine: Measures, theirs: Measures) -> None:
    """Raises `InputError` if the other rank has other values: the same error on both."""
    peers, peer = shared.peers, shared.peer
    for tensors, here, there, measured, other in zip(
        shared.held, shared.here, shared.there, mine.of_parameters, theirs.of_parameters, strict=True
    ):
        if not measured.is_close(other, _rounding_of(tensors[0])):
            pairs = [(f"{here[0]} on rank {peers.members[peers.rank]}", measured), (f"{there} on rank {peers.members[peer]}", other)]
            (first, measure), (second, second_measure) = pairs if peers.rank < peer else pairs[::-1]
            _refuse(first, measure, second, second_measure)


def _refuse(first: str, measure: Measure, second: str, other: Measure) -> NoReturn:
    raise InputError(
        (
            "{first} and its copy {second} have other values: their norms are {norm:.6g} and {other_norm:.6g}, "
            "their sums {total:.6g} and {other_total:.6g}"
        ),
        first=first,
        second=second,
        norm=measure.norm,
        other_norm=other.norm,
        total=measure.total,
        other_total=other.total,
        remedy="change the gradients and values of all copies alike, and step their optimizers in the same steps; draw noise for them from "
        "a generator with the same seed",
    )
