"""A lower bound on the time of schedules, with the reason for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from zerobubble.display import WIDEST, clipped
from zerobubble.units import show_ms


class Bound(NamedTuple):
    """A lower bound: no schedule takes less.

    Attributes:
        time: The bound in ns.
        reason: A sentence that explains it with figures.
    """

    time: int
    reason: str

    def __repr__(self) -> str:
        return clipped(f"<Bound at least {show_ms(self.time)}: {self.reason}>", ">", WIDEST)

    def __str__(self) -> str:
        return f"at least {show_ms(self.time)}: {self.reason}"


class Bounds(NamedTuple):
    """Lower bounds on the longest `span` of a rank and on the `makespan`."""

    span: Bound
    makespan: Bound

    def with_remark(self, remark: str) -> Bounds:
        """The same bounds with `remark` appended to each reason."""
        return Bounds(*(bound._replace(reason=f"{bound.reason}, {remark}") for bound in self))

    def __repr__(self) -> str:
        return f"<Bounds span at least {show_ms(self.span.time)}, makespan at least {show_ms(self.makespan.time)}>"

    def __str__(self) -> str:
        return f"span {self.span}\nmakespan {self.makespan}"


def strongest(bounds: Sequence[Bounds]) -> Bounds:
    """The strongest of several valid bounds, for the span and for the makespan."""
    return Bounds(*(max(alternatives, key=lambda bound: bound.time) for alternatives in zip(*bounds, strict=True)))
