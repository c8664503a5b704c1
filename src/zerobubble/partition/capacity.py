"""Memory limits and speeds of ranks, and the peak memory of a rank with given layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from zerobubble.costs import Limits
from zerobubble.errors import InputError
from zerobubble.ir import Op, Placement, Schedule
from zerobubble.kinds import ValueKind, traits_of
from zerobubble.partition.layers import Layer
from zerobubble.partition.speeds import Speeds, speed_of
from zerobubble.rules import recomputed

Moment = tuple[tuple[int, int], ...]
"""For each stage of a rank, in model order, the numbers of microbatches that wait for B and for W at one moment."""

Moments = tuple[Moment, ...]
"""The moments at which the memory of a rank may peak, depending on the sizes of its stages."""

Pieces = Sequence[tuple[int, int]]
"""The layers of each stage of a rank, as the numbers of the first layer and of the layer after the last."""


@dataclass(frozen=True)
class Loads:
    """Prefix sums over layers: ns of F, B and W together, and bytes of parameters, of what F saves, and of what B leaves for W.

    `time` is for ranks of speed 1. `at_speeds` has the times for the other speeds of ranks.
    """

    time: list[int]
    parameters: list[int]
    saved: list[int]
    pending: list[int]
    at_speeds: Mapping[float, list[int]] = field(default_factory=dict)

    @classmethod
    def from_layers(cls, layers: Sequence[Layer], speeds: Speeds = ()) -> Loads:
        """Returns the loads of `layers` for ranks of these speeds."""
        columns = ("time", "parameters_bytes", "held_after_f", "held_after_b")
        time, parameters, saved, pending = ([0, *accumulate(getattr(layer, column) for layer in layers)] for column in columns)
        at_speeds = {speed: [0, *accumulate(layer.time_at(speed) for layer in layers)] for speed in set(speeds)}
        return cls(time, parameters, saved, pending, at_speeds)


@dataclass(frozen=True)
class Capacity:
    """The memory limit of a rank in bytes (None for no limit), the moments at which its memory may peak, and its speed."""

    limit: int | None
    moments: Moments
    speed: float = 1.0

    def time(self, loads: Loads) -> list[int]:
        """Returns the prefix sums of the ns of F, B and W on this rank."""
        return loads.at_speeds.get(self.speed, loads.time)

    def work(self, loads: Loads, pieces: Pieces) -> int:
        """Returns the ns of F, B and W of these layers for a microbatch on this rank."""
        time = self.time(loads)
        return sum(time[end] - time[first] for first, end in pieces)

    def bytes(self, loads: Loads, pieces: Pieces) -> int:
        """Returns the peak bytes of the rank with these layers. `pieces` may be only those of its first stages."""
        parameters = sum(loads.parameters[end] - loads.parameters[first] for first, end in pieces)
        sizes = [(loads.saved[end] - loads.saved[first], loads.pending[end] - loads.pending[first]) for first, end in pieces]
        return parameters + max(_held(moment, sizes) for moment in self.moments)

    def prefix_sums(self, loads: Loads) -> list[list[list[int]]]:
        """Returns the prefix sums of bytes over layers, for each moment and stage of the rank."""
        columns = list(zip(loads.parameters, loads.saved, loads.pending, strict=True))
        return [
            [[kept + saved * after_f + pending * after_b for kept, after_f, after_b in columns] for saved, pending in moment]
            for moment in self.moments
        ]

    def missing(self, loads: Loads, pieces: Pieces) -> int:
        """Returns the bytes over the limit."""
        return 0 if self.limit is None else max(0, self.bytes(loads, pieces) - self.limit)


def _held(moment: Moment, sizes: Sequence[tuple[int, int]]) -> int:
    return sum(
        saved * after_f + pending * after_b for (saved, pending), (after_f, after_b) in zip(moment, sizes, strict=False)
    )  # `sizes` may be shorter


def capacities_of(placement: Placement, limits: Limits | None, held: int | Schedule, speeds: Speeds = ()) -> list[Capacity]:
    """Returns the capacity of each rank. `held` is how many microbatches wait for B in each stage, or a schedule that determines it."""
    memory = [None] * placement.num_ranks if limits is None else limits.memory
    if isinstance(held, Schedule):
        moments = held_at_once(held)
    else:
        moments = tuple((((held, 0),) * len(placement.stages(rank)),) for rank in range(placement.num_ranks))
    paired = enumerate(zip(memory, moments, strict=True))
    return [Capacity(limit, of_rank, speed_of(rank, speeds)) for rank, (limit, of_rank) in paired]


def held_at_once(schedule: Schedule) -> tuple[Moments, ...]:
    """Returns the moments of each rank, without those at which no stage holds more than at another moment.

    Raises `InputError` for a schedule with recomputation, because a `Layer` does not have the bytes that a recomputed forward keeps.
    """
    kind = next((kind for row in schedule.rows for kind in recomputed(row).values()), None)
    if kind is not None:
        raise InputError(
            "schedule {schedule!v} has {kind} passes, but layers lack the bytes that recomputed forwards keep",
            schedule=schedule.name,
            kind=str(kind),
            remedy="cut the layers for the schedule without them, and add the passes afterwards",
        )
    stages = [[stage for _, stage in schedule.placement.stages(rank)] for rank in range(schedule.num_ranks)]
    return tuple(_moments(row, held) for row, held in zip(schedule.rows, stages, strict=True))


def _moments(row: Iterable[Op], stages: Sequence[int]) -> Moments:
    counts = {(value_kind, stage): 0 for stage in stages for value_kind in (ValueKind.SAVED, ValueKind.WEIGHT_WORK)}
    seen = {tuple(counts.values())}
    for kind, stage, _ in row:
        traits = traits_of(kind)
        for value_kind in traits.makes:
            if (value_kind, stage) in counts:
                counts[value_kind, stage] += 1
        for value_kind, hop in traits.uses:
            if hop == 0 and (value_kind, stage) in counts:
                counts[value_kind, stage] -= 1
        seen.add(tuple(counts.values()))
    return tuple(tuple(zip(counts[::2], counts[1::2], strict=True)) for counts in _not_dominated(seen))


def _not_dominated(seen: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    kept: list[tuple[int, ...]] = []
    for counts in sorted(seen, key=sum, reverse=True):
        if not any(all(have <= more for have, more in zip(counts, other, strict=True)) for other in kept):
            kept.append(counts)
    return kept
