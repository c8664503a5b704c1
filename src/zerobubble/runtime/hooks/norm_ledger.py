"""The ledger of gradient norms, which passes from rank to rank: each rank adds its norms, then decides whether it may step at once.

A rank may step at once only if the norms so far need neither clipping nor skipping. Later ranks can only increase the total, so if one rank
has to wait, all later ranks do: the flag is never cleared. The total is computed from all norms in the order of the stages, so every rank
gets the same bits as a single device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from zerobubble.runtime.hooks.clip import Norms
from zerobubble.runtime.transport.control import Topic

_WAITS, _OVERFLOWED, _HEAD = 0, 1, 2
"""The entries of the two flags, and the number of entries before the norms."""
_ABSENT = -1.0
"""Stands for the norm of a parameter without a gradient."""

Dtypes = dict[int, list[torch.dtype]]
Parts = Mapping[int, list[nn.Parameter]]
"""For each stage of a rank, the parameters that count toward the norm of the whole model."""


def dtypes_of(parts: Parts) -> Dtypes:
    """Returns the dtypes of a rank's gradients by stage. All ranks exchange them before they make ledgers."""
    return {stage: [parameter.dtype for parameter in parameters] for stage, parameters in parts.items()}


@dataclass(frozen=True, slots=True, eq=False)
class _Ledger:
    ledger: Tensor

    def numbers(self) -> list[float]:
        return self.ledger.tolist()

    @classmethod
    def read(cls, numbers: Tensor) -> Self:
        return cls(numbers)


class NormsSoFar(_Ledger):
    """The ledger that a rank sends to the next, with the norms of all ranks so far."""

    topic: ClassVar[Topic] = Topic.NORMS_SO_FAR


class NormsOfAll(_Ledger):
    """The complete ledger, which the last rank sends to all others."""

    topic: ClassVar[Topic] = Topic.NORMS_OF_ALL


class NormLedger:
    """The layout of the ledgers of one model. `all_dtypes` has the dtypes of gradients by rank. Of a stage's copies, only the first counts.

    A ledger is a float64 tensor of `length` on the CPU: whether a rank must wait, whether a GradScaler found an overflow, then
    the norms of all stages in order.
    """

    def __init__(self, parts: Parts, all_dtypes: Sequence[Dtypes], rank: int, max_norm: float | None) -> None:
        first = {stage: (owner, dtypes) for owner, entry in reversed(list(enumerate(all_dtypes))) for stage, dtypes in entry.items()}
        self._max_norm = max_norm
        self._mine: list[tuple[int, int, list[nn.Parameter]]] = []
        self._places: dict[torch.dtype, list[int]] = {}
        self.length = _HEAD
        for stage, (owner, dtypes) in sorted(first.items()):
            if owner == rank:
                self._mine.append((self.length, stage, parts[stage]))
            for dtype in dtypes:
                self._places.setdefault(dtype, []).append(self.length)
                self.length += 1

    def empty(self) -> Tensor:
        """Returns an empty ledger."""
        ledger = torch.full((self.length,), _ABSENT, dtype=torch.float64, device="cpu")
        ledger[:_HEAD] = 0.0
        return ledger

    def write(self, ledger: Tensor, norms: Norms, *, overflowed: bool) -> None:
        """Writes this rank's norms. The rank must wait if the norms so far need clipping or skipping."""
        for place, stage, parameters in self._mine:
            written = dict(zip(norms[stage].parameters, norms[stage].values.tolist(), strict=True)) if stage in norms else {}
            row = [written.get(parameter, _ABSENT) for parameter in parameters]
            ledger[place : place + len(row)] = torch.tensor(row, dtype=torch.float64, device="cpu")
        if overflowed:
            ledger[_OVERFLOWED] = 1.0
        if not self._may_step(ledger):
            ledger[_WAITS] = 1.0

    def total(self, ledger: Tensor) -> Tensor:
        """Returns the norm of all gradients in the ledger, bitwise equal to `torch.nn.utils.get_total_norm`; 0 without any."""
        written = ledger[_HEAD:] != _ABSENT
        dtypes = [dtype for dtype, places in self._places.items() if written[[place - _HEAD for place in places]].any()]
        if not dtypes:
            return torch.tensor(0.0, device="cpu")
        dtype = dtypes[0]
        for other in dtypes[1:]:
            dtype = torch.promote_types(dtype, other)
        total: Tensor = torch.linalg.vector_norm(ledger[_HEAD:][written].to(dtype))
        return total

    def waits(self, ledger: Tensor) -> bool:
        """Returns whether a rank that has written must wait for the complete ledger before it steps."""
        return bool(ledger[_WAITS])

    def overflowed(self, ledger: Tensor) -> bool:
        """Returns whether a GradScaler found an overflow on a rank that has written."""
        return bool(ledger[_OVERFLOWED])

    def is_skipped(self, ledger: Tensor) -> bool:
        """Returns whether the step is skipped: a gradient is not finite, or the norm of all is not."""
        return self.overflowed(ledger) or not bool(self.total(ledger).isfinite())

    def _may_step(self, ledger: Tensor) -> bool:
        """Returns whether the norms so far need neither skipping nor clipping."""
        total = self.total(ledger)
        # the factor of `torch.nn.utils.clip_grad_norm_`, with its 1e-6
        clips = self._max_norm is not None and bool(self._max_norm / (total + 1e-6) < 1)
        return bool(total.isfinite()) and not clips and not self.overflowed(ledger)
