"""Memory limits of ranks."""

from __future__ import annotations

from dataclasses import dataclass

from zerobubble.arguments import WHOLE, as_tuple, require, takes, wrong
from zerobubble.display import Displayed
from zerobubble.units import counted, show_bytes, show_range

MAX_LIMIT = 2**62
"""The largest limit in bytes. No sum of bytes that passes hold exceeds it, so it stands for unlimited memory."""


@takes()
@dataclass(frozen=True, slots=True, repr=False)
class Limits(Displayed):
    """Limits on the activation memory of each rank, in bytes.

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
                raise wrong(f"the memory limit of rank {rank}", value, "positive")
            if value > MAX_LIMIT:
                raise wrong(f"the memory limit of rank {rank}", value, f"at most {MAX_LIMIT:.0e} bytes")

    def _summary(self) -> str:
        return f"of {counted(len(self.memory), 'rank')}: {show_range(self.memory, show_bytes)}"
