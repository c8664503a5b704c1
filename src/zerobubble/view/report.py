"""The data of a training report and the figures drawn from it. `html` makes the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isnan

from zerobubble.arguments import takes
from zerobubble.display import Displayed
from zerobubble.errors import InputError
from zerobubble.explain import Difference, Gap
from zerobubble.timeline import Timeline
from zerobubble.units import counted

REFERENCE = "1f1b"
"""The schedule that speed-ups refer to."""


@takes()
@dataclass(frozen=True, slots=True)
class MemoryRow:
    """Activation memory of one rank in bytes; None where a figure is not known or there is no limit.

    Attributes:
        rank: The rank.
        predicted: The peak in the simulation.
        measured: The peak in training.
        limit: The most bytes that the rank may hold.
    """

    rank: int
    predicted: int | None = None
    measured: int | None = None
    limit: int | None = None


@takes()
@dataclass(frozen=True, slots=True)
class ThroughputRow:
    """The speed of one schedule; None where a figure is not known.

    Attributes:
        schedule: The name of the schedule.
        tokens_per_second: Tokens per second over all ranks.
        predicted_bubble: The bubble rate in the simulation, 0 to 1.
        measured_bubble: The bubble rate in training, 0 to 1.
        peak_bytes: Activation bytes of the fullest rank.
    """

    schedule: str
    tokens_per_second: float
    predicted_bubble: float | None = None
    measured_bubble: float | None = None
    peak_bytes: int | None = None


@takes()
@dataclass(frozen=True, repr=False)
class Report(Displayed):
    """The contents of a training report. Every part may be empty, and then its section is left out.

    Attributes:
        title: The heading of the page.
        facts: Pairs (label, value).
        timelines: Timelines on one axis, such as 1F1B above the schedule that was trained and its simulation.
        memory: The activation memory of each rank.
        losses: A loss per step under the name of each run, the pipeline first and what it is compared to second.
        throughput: The speed of each schedule.
        notes: Sentences on how the figures were measured.
        gaps: The idle times of each timeline by what its ranks wait for.
        difference: A comparison of the measured timeline with its plan.
        layers: For each timeline, the bytes that each rank always holds in addition to activations, by name.
        held_out: The loss on data that was not trained on, before and after training.
        caution: A warning about the speeds, shown above all figures; it replaces the headline with the speed.
    """

    title: str
    facts: Sequence[tuple[str, str]] = ()
    timelines: Sequence[Timeline] = ()
    memory: Sequence[MemoryRow] = ()
    losses: Mapping[str, Sequence[float]] = field(default_factory=dict)
    throughput: Sequence[ThroughputRow] = ()
    notes: Sequence[str] = ()
    gaps: Sequence[Sequence[Sequence[Gap]]] = ()
    difference: Difference | None = None
    layers: Sequence[Mapping[str, Sequence[int]]] = ()
    held_out: tuple[float, float] | None = None
    caution: str = ""

    def __post_init__(self) -> None:
        for name, values in (("gaps", self.gaps), ("layers", self.layers)):
            if values and len(values) != len(self.timelines):
                message = "a report needs the {name} of every timeline or of none, got {got} for {num_timelines}"
                raise InputError(message, name=name, got=len(values), num_timelines=len(self.timelines))
        for name, losses in self.losses.items():
            if not losses:
                raise InputError("the losses of {name!r} are empty; give one per step or leave the run out", name=name)

    def _summary(self) -> str:
        return f"{self.title!r}: {counted(len(self.timelines), 'timeline')}, {counted(len(self.losses), 'run')}"

    @property
    def own_timelines(self) -> Sequence[Timeline]:
        """The timelines of the run itself: all but the reference, 1F1B, unless there are no others."""
        return [t for t in self.timelines if t.name != REFERENCE] or self.timelines

    @property
    def predicted(self) -> Timeline | None:
        """The first simulated timeline of the run."""
        return next((t for t in self.own_timelines if t.source == "simulated"), None)

    @property
    def measured(self) -> Timeline | None:
        """The first measured timeline of the run."""
        return next((t for t in self.own_timelines if t.source != "simulated"), None)

    def loss_difference(self) -> tuple[str, str, float, int] | None:
        """The first two runs' names, the largest absolute difference of their losses and its step; None for fewer than two."""
        if len(self.losses) < 2:
            return None
        (name, losses), (other, others) = list(self.losses.items())[:2]
        differences = [_difference(a, b) for a, b in zip(losses, others, strict=False)]
        largest = max(differences)
        return name, other, largest, differences.index(largest)

    def speed_up(self) -> tuple[str, float] | None:
        """The schedule of the timelines (or else the fastest) and its speed as a multiple of 1F1B's; None if one is unknown."""
        speeds = {row.schedule: row.tokens_per_second for row in self.throughput}
        base = speeds.pop(REFERENCE, 0.0)
        if not speeds or base <= 0:
            return None
        names = [timeline.name for timeline in self.timelines if timeline.name in speeds]
        name = names[0] if names else max(speeds, key=speeds.__getitem__)
        return name, speeds[name] / base

    def drawn_steps(self) -> tuple[Timeline, Timeline] | None:
        """The steps of 1F1B and of the run that the page compares, both measured or else both simulated; None if either is missing."""
        for kind in ("measured", "predicted"):
            step: Timeline | None = getattr(self, kind)
            base = [t for t in self.timelines if t.name == REFERENCE and (t.source == "simulated") == (kind == "predicted")]
            if step is not None and step.name != REFERENCE and step.makespan and base:
                return base[0], step
        return None


def _difference(a: float, b: float) -> float:
    """Returns the difference of two losses: 0 if both are NaN, infinite if one is."""
    if isnan(a) or isnan(b):
        return 0.0 if isnan(a) and isnan(b) else inf
    return 0.0 if a == b else abs(a - b)
