"""What a rank holds of the layers it is given, in bytes, and how much it may hold."""

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
"""For each stage of a rank, in the order of the model, how many microbatches wait there for B, and how many for W, at one moment."""

Moments = tuple[Moment, ...]
"""The moments of a rank that can be its fullest; which of them is, the sizes of its stages decide."""

Pieces = Sequence[tuple[int, int]]
"""The layers of each stage of a rank: from the first number up to the second."""


@dataclass(frozen=True)
class Loads:
    """For the layers before each layer, and for all: ns of F, B and W, and bytes of parameters, saved by F, and left by B for W.

    `time` is at speed 1, and `at_speeds` has the same at the other speeds of ranks.
    """

    time: list[int]
    parameters: list[int]
    saved: list[int]
    pending: list[int]
    at_speeds: Mapping[float, list[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, layers: Sequence[Layer], speeds: Speeds = ()) -> Loads:
        """The loads of `layers` for ranks of these speeds."""
        columns = ("time", "parameters_bytes", "held_after_f", "held_after_b")
        time, parameters, saved, pending = ([0, *accumulate(getattr(layer, column) for layer in layers)] for column in columns)
        at_speeds = {speed: [0, *accumulate(layer.time_at(speed) for layer in layers)] for speed in set(speeds)}
        return cls(time, parameters, saved, pending, at_speeds)


@dataclass(frozen=True)
class Room:
    """The bytes that a rank may hold, None where it does not matter, the moments at which it may be fullest, and how fast it is."""

    limit: int | None
    moments: Moments
    speed: float = 1.0

    def time(self, loads: Loads) -> list[int]:
        """For the layers before each layer, and for all, the ns of F, B and W that they take on this rank."""
        return loads.at_speeds.get(self.speed, loads.time)

    def work(self, loads: Loads, pieces: Pieces) -> int:
        """The ns of F, B and W that these layers take on this rank for a microbatch."""
        time = self.time(loads)
        return sum(time[end] - time[first] for first, end in pieces)

    def bytes(self, loads: Loads, pieces: Pieces) -> int:
        """The most bytes that the rank holds if these are the layers of its stages, or of the first of them."""
        parameters = sum(loads.parameters[end] - loads.parameters[first] for first, end in pieces)
        sizes = [(loads.saved[end] - loads.saved[first], loads.pending[end] - loads.pending[first]) for first, end in pieces]
        return parameters + max(_held(moment, sizes) for moment in self.moments)

    def before(self, loads: Loads) -> list[list[list[int]]]:
        """For each moment and stage of the rank, the bytes there of the layers before each layer, and of all: differences are stages."""
        columns = list(zip(loads.parameters, loads.saved, loads.pending, strict=True))
        return [
            [[kept + saved * after_f + pending * after_b for kept, after_f, after_b in columns] for saved, pending in moment]
            for moment in self.moments
        ]

    def missing(self, loads: Loads, pieces: Pieces) -> int:
        """How many of these bytes are over the limit."""
        return 0 if self.limit is None else max(0, self.bytes(loads, pieces) - self.limit)


def _held(moment: Moment, sizes: Sequence[tuple[int, int]]) -> int:
    return sum(saved * after_f + pending * after_b for (saved, pending), (after_f, after_b) in zip(moment, sizes, strict=False))


def rooms(placement: Placement, limits: Limits | None, held: int | Schedule, speeds: Speeds = ()) -> list[Room]:
    """The room of each rank: `held` microbatches that wait for B in each of its stages, or what the schedule holds there at once."""
    memory = [None] * placement.num_ranks if limits is None else limits.memory
    if isinstance(held, Schedule):
        moments = held_at_once(held)
    else:
        moments = tuple((((held, 0),) * len(placement.stages(rank)),) for rank in range(placement.num_ranks))
    paired = enumerate(zip(memory, moments, strict=True))
    return [Room(limit, fullest, speed_of(rank, speeds)) for rank, (limit, fullest) in paired]


def held_at_once(schedule: Schedule) -> tuple[Moments, ...]:
    """The moments of each rank, of which none holds as much as another in all its stages.

    Raises `InputError` for a schedule that recomputes forwards: layers do not say what these keep.
    """
    again = next((kind for row in schedule.rows for kind in recomputed(row).values()), None)
    if again is not None:
        raise InputError(
            f"schedule {schedule.name!r} has {again} passes, and layers do not tell what forwards keep for these: cut them "
            "for the schedule without, and add the passes afterwards"
        )
    stages = [[stage for _, stage in schedule.placement.stages(rank)] for rank in range(schedule.num_ranks)]
    return tuple(_moments(row, held) for row, held in zip(schedule.rows, stages, strict=True))


def _moments(row: Iterable[Op], stages: Sequence[int]) -> Moments:
    counts = {(value_kind, stage): 0 for stage in stages for value_kind in (ValueKind.SAVED, ValueKind.WORK)}
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
    return tuple(tuple(zip(counts[::2], counts[1::2], strict=True)) for counts in _not_below_another(seen))


def _not_below_another(seen: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    kept: list[tuple[int, ...]] = []
    for counts in sorted(seen, key=sum, reverse=True):
        if not any(all(have <= more for have, more in zip(counts, other, strict=True)) for other in kept):
            kept.append(counts)
    return kept
