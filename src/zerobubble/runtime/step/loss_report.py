"""The messages in which ranks exchange losses, as numbers of a control message."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntFlag
from itertools import accumulate, pairwise
from typing import ClassVar

import torch
from torch import Tensor

from zerobubble.runtime.transport.control import Topic

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""The dtypes that a loss may have."""


class SetState(IntFlag):
    """Who has set state on a rank in a call that other ranks lack. `HOOKS` may have set what `loss_fn` lacks."""

    NOTHING = 0
    MODEL = 1
    LOSS = 2
    HOOKS = 4


@dataclass(frozen=True, slots=True)
class LossReport:
    """The losses that a rank knows, in the order of microbatches, with 0 for others. `dtype` is None if there are no targets.

    `number` is the mean of all losses, from the rank that sums, or the total weight, from a rank that sends its losses. `weights_hash`
    differs if the weights of single microbatches do. `num_following` is the size of the `AddedLossReport` that follows, 0 if none does.
    `requires_grad` says whether any of these losses requires a gradient, `is_refused` whether `loss_fn` has a fault that all ranks raise,
    and `set_state` who has set state on the rank.
    """

    topic: ClassVar[Topic] = Topic.LOSS

    dtype: torch.dtype | None
    number: float
    weights_hash: int
    num_following: int
    requires_grad: bool
    is_refused: bool
    set_state: SetState
    losses: tuple[float, ...]

    @staticmethod
    def num_numbers(num_microbatches: int) -> int:
        """Returns the size of a report of `num_microbatches` microbatches."""
        return 7 + num_microbatches

    def numbers(self) -> tuple[float, ...]:
        dtype = -1 if self.dtype is None else DTYPES.index(self.dtype)
        flags = map(float, (self.requires_grad, self.is_refused, self.set_state))
        return (float(dtype), self.number, self.weights_hash, self.num_following, *flags, *self.losses)

    @classmethod
    def read(cls, numbers: Tensor) -> LossReport:
        dtype, number, weights_hash, num_following, *rest = numbers.tolist()
        kind = None if dtype < 0 else DTYPES[int(dtype)]
        requires_grad, is_refused = map(bool, rest[:2])
        set_state = SetState(int(rest[2]))
        return cls(kind, number, int(weights_hash), int(num_following), requires_grad, is_refused, set_state, tuple(rest[3:]))


@dataclass(frozen=True, slots=True)
class AddedLossReport:
    """By name, what stages added to the losses: its part in the mean, summed over the microbatches of the sending rank.

    It is written as the number of names, the length of each name in UTF-8 bytes, the parts, and the bytes of all names.
    """

    topic: ClassVar[Topic] = Topic.ADDED_LOSSES

    parts: Mapping[str, float]

    @classmethod
    def from_parts(cls, parts: Mapping[str, Tensor]) -> AddedLossReport:
        """Returns the report of these scalar tensors, which are read from their device at once."""
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
