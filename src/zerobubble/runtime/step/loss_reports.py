"""What ranks tell each other of the losses of a step: those of microbatches, and behind them what stages added by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import ClassVar

import torch
from torch import Tensor

from zerobubble.runtime.transport.control import Topic

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""What a loss may be."""


@dataclass(frozen=True, slots=True)
class LossReport:
    """The losses that a rank knows, each in the place of its microbatch and 0 elsewhere; `dtype` is None where there are no targets.

    `number` is the mean of all losses, from the rank that has it, or the weight of all microbatches, from a rank that tells its losses.
    `weighing` differs where the weights of single microbatches do. `num_behind` is how many numbers an `AddedLossReport` has that comes
    behind this one, 0 where none does. `goes_back` says whether any of these losses requires a gradient.
    """

    topic: ClassVar[Topic] = Topic.LOSS

    dtype: torch.dtype | None
    number: float
    weighing: int
    num_behind: int
    goes_back: bool
    losses: tuple[float, ...]

    @staticmethod
    def num_numbers(num_microbatches: int) -> int:
        """How many numbers a report of so many microbatches has."""
        return 5 + num_microbatches

    def numbers(self) -> tuple[float, ...]:
        dtype = -1 if self.dtype is None else DTYPES.index(self.dtype)
        return (float(dtype), self.number, self.weighing, self.num_behind, float(self.goes_back), *self.losses)

    @classmethod
    def read(cls, numbers: Tensor) -> LossReport:
        dtype, number, weighing, num_behind, goes_back, *losses = numbers.tolist()
        return cls(None if dtype < 0 else DTYPES[int(dtype)], number, int(weighing), int(num_behind), bool(goes_back), tuple(losses))


@dataclass(frozen=True, slots=True)
class AddedLossReport:
    """By name what stages added to the losses of microbatches: its part in the mean, summed over the microbatches of the rank that tells.

    It is written as the number of names, the length of each name in bytes of UTF-8, the parts, and the bytes of all names.
    """

    topic: ClassVar[Topic] = Topic.ADDED_LOSSES

    parts: Mapping[str, float]

    @classmethod
    def of(cls, parts: Mapping[str, Tensor]) -> AddedLossReport:
        """The report of these scalar tensors, read off their device at once."""
        numbers: list[float] = torch.stack([part.double() for part in parts.values()]).tolist()
        return cls(dict(zip(parts, numbers, strict=True)))

    def numbers(self) -> tuple[float, ...]:
        names = [name.encode() for name in self.parts]
        return (float(len(names)), *map(len, names), *self.parts.values(), *b"".join(names))

    @classmethod
    def read(cls, numbers: Tensor) -> AddedLossReport:
        count = int(numbers[0].item())
        lengths = [int(length) for length in numbers[1 : 1 + count].tolist()]
        parts = numbers[1 + count : 1 + 2 * count].tolist()
        letters = bytes(map(int, numbers[1 + 2 * count :].tolist()))
        ends = list(accumulate(lengths, initial=0))
        return cls({letters[start:end].decode(): part for (start, end), part in zip(pairwise(ends), parts, strict=True)})
