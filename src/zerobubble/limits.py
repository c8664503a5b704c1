"""Memory limits of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zerobubble.arguments import BYTES, as_tuple, takes, wrong
from zerobubble.display import Displayed
from zerobubble.errors import InputError, raise_all
from zerobubble.units import as_bytes, counted, show_bytes, show_range

MAX_LIMIT = 2**62
"""The largest limit in bytes. No sum of bytes that passes hold exceeds it, so it stands for unlimited memory."""


def _for_each_rank(memory: object) -> str:
    if type(memory) is int and memory > 0:
        return f"Limits(({memory},) * num_ranks) gives {memory:,} bytes to each"
    return "Limits(('40GB',) * num_ranks) gives 40 GB to each"


def _fault(what: str, value: Any) -> InputError | None:
    if not BYTES.accepts(value):
        return wrong(what, value, BYTES.words)
    return wrong(what, value, f"at most {MAX_LIMIT:.0e} bytes") if as_bytes(value) > MAX_LIMIT else None


@takes()
@dataclass(frozen=True, slots=True, repr=False, init=False)
class Limits(Displayed):
    """Limits on the activation memory of each rank.

    Attributes:
        memory: The limit of each rank: bytes, or text such as "40GB", which becomes bytes.

    >>> import zerobubble as zb
    >>> zb.Limits(("40GB",) * 8)
    <Limits of 8 ranks: 40 GB>
    """

    memory: tuple[int, ...]

    def __init__(self, memory: Sequence[int | str]) -> None:
        of_ranks = as_tuple("memory of Limits", memory, "a list or tuple with the bytes of each rank", _for_each_rank)
        raise_all(_fault(f"the memory limit of rank {rank}", value) for rank, value in enumerate(of_ranks))
        object.__setattr__(self, "memory", tuple(map(as_bytes, of_ranks)))

    def require_ranks(self, count: int, what: str) -> None:
        """Raise `InputError` unless the limits are those of the `count` ranks of `what`, such as a placement."""
        if len(self.memory) != count:
            raise InputError("{what} has {ranks} ranks, but the limits describe {got}", what=what, ranks=count, got=len(self.memory))

    def _summary(self) -> str:
        return f"of {counted(len(self.memory), 'rank')}: {show_range(self.memory, show_bytes)}"
