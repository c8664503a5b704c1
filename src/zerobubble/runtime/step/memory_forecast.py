"""Forecasts the memory of each rank in the steps of a schedule: activations, and message buffers of the transport."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from zerobubble.costs import Costs
from zerobubble.ir import Schedule
from zerobubble.offload import RankOffloads
from zerobubble.offload.offloads import rank_offloads
from zerobubble.simulation import peak_memory
from zerobubble.units import show_bytes


class MemoryForecast(NamedTuple):
    """The peak bytes of `rank` in a step: `activations`, including what waits for W, and the transport's buffers for `messages`."""

    rank: int
    activations: int
    messages: int

    @property
    def total(self) -> int:
        """The sum of both."""
        return self.activations + self.messages

    def __str__(self) -> str:
        return f"rank {self.rank}: {show_bytes(self.activations)} of activations, {show_bytes(self.messages)} for messages"


class MemoryForecasts(tuple[MemoryForecast, ...]):
    """The forecasts of all ranks, in order. `str` prints one per line."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(map(str, self))


def forecast_memory(
    schedule: Schedule, costs: Costs, messages: Sequence[int], offloads: Sequence[RankOffloads] | None, numbers: Sequence[int]
) -> MemoryForecasts:
    """Returns the forecasts of `schedule` for the ranks of these `numbers`.

    They hold bytes by `costs`, less `offloads`, and `messages`, the bytes of buffers on each rank.
    """
    costs.require_schedule(schedule)
    held = peak_memory(schedule, costs)
    if offloads is not None:
        moved = zip(offloads, schedule.steps, strict=True)
        held = tuple(rank_offloads(rank.offloads, steps, costs).peak_bytes for rank, steps in moved)
    return MemoryForecasts(map(MemoryForecast, numbers, held, messages))
