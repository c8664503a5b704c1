"""How much memory the ranks have."""

from __future__ import annotations

from dataclasses import dataclass

from zerobubble.arguments import WHOLE, as_tuple, require
from zerobubble.display import Displayed
from zerobubble.errors import InputError, shown
from zerobubble.units import counted, show_bytes, show_range

MOST_ROOM = 2**62
"""The most bytes that `Limits` can have, more than any sum of what passes hold."""


@dataclass(frozen=True, slots=True, repr=False)
class Limits(Displayed):
    """Bytes of activation memory each rank may hold.

    >>> import zerobubble as zb
    >>> zb.Limits((40 * 10**9,) * 8)
    <Limits of 8 ranks: 40 GB>
    """

    memory: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "memory", as_tuple("memory of Limits", self.memory, "a list or tuple with the bytes of each rank"))
        for rank, value in enumerate(self.memory):
            require(f"the memory limit of rank {rank}, in bytes,", value, WHOLE)
            if value <= 0:
                raise InputError(f"the memory limit of rank {rank} must be positive, got {value}")
            if value > MOST_ROOM:
                raise InputError(f"the memory limit of rank {rank} must be at most {MOST_ROOM:.0e} bytes, got {shown(value)}")

    def _summary(self) -> str:
        return f"of {counted(len(self.memory), 'rank')}: {show_range(self.memory, show_bytes)}"
