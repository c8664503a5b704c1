"""Evidence for a change of schedule: samples of consecutive steps, what most of them share, and how far they spread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import mean, median, median_low
from typing import NamedTuple

from zerobubble.costs import Costs
from zerobubble.planning import Plan
from zerobubble.planning.replay import Replay

MEASURED = ("forward", "backward", "weight", "comm")
"""The columns of `Costs` that every step measures."""


class Sample(NamedTuple):
    """A measured step: its `makespan` in ns, and the costs that it shows."""

    makespan: int
    costs: Costs


def lasting(values: Sequence[float]) -> float:
    """Returns the largest value that at least three quarters of `values` reach."""
    return sorted(values)[len(values) // 4]


def spread(values: Sequence[float]) -> float:
    """Returns the mean distance of `values` from their median, without the farthest one."""
    middle = median(values)
    near = sorted(abs(value - middle) for value in values)[:-1]
    return mean(near) if near else 0.0


def unsteadiness(samples: Sequence[Sample]) -> float:
    """Returns the mean distance of step times from their median, relative to the median; single slow steps count."""
    times = [sample.makespan for sample in samples]
    middle = median(times)
    return mean(abs(time - middle) for time in times) / max(1, middle)


def typical_costs(samples: Sequence[Sample]) -> Costs:
    """Returns the costs of the samples, with the median of each measured time."""
    forward, backward, weight, comm = (
        tuple(median_low(times) for times in zip(*(getattr(sample.costs, name) for sample in samples), strict=True)) for name in MEASURED
    )
    return replace(samples[0].costs, forward=forward, backward=backward, weight=weight, comm=comm)


def how_far(planned: Costs, samples: Sequence[Costs]) -> float:
    """Returns the largest relative drift of any stage's F, or of its B and W together, by which most samples exceed their spread."""
    pairs = zip(_passes(planned), zip(*map(_passes, samples), strict=True), strict=True)
    return max((_drift([(now - was) / was for now in times]) for was, times in pairs if was), default=0.0)


def how_late(planned: Costs, samples: Sequence[Costs]) -> float:
    """Returns the largest delay of a link's messages over the plan by which most samples exceed their spread.

    It is relative to the mean time of a stage's F, B and W.
    """
    work = median(sum(_passes(costs)) for costs in samples)
    links = zip(planned.comm, zip(*(costs.comm for costs in samples), strict=True), strict=True)
    later = max((_beyond_noise([now - was for now in times]) for was, times in links), default=0.0)
    return later * planned.num_stages / work if work else 0.0


def gain(now: Plan, plan: Plan, samples: Sequence[Costs]) -> float:
    """Returns the time in ns by which a step of `plan` is shorter than a step of `now`, at the costs of most samples."""
    (before, after), objective = [Replay.from_schedule(candidate.schedule) for candidate in (now, plan)], plan.problem.objective
    return lasting([before.time(objective, costs) - after.time(objective, costs) for costs in samples])


def _drift(changes: Sequence[float]) -> float:
    """Returns the change in either direction by which most of `changes` exceed their spread."""
    return max(_beyond_noise(changes), _beyond_noise([-change for change in changes]))


def _beyond_noise(changes: Sequence[float]) -> float:
    return max(0.0, lasting(changes) - spread(changes))


def _passes(costs: Costs) -> list[int]:
    """Returns the time of each stage's F, then of its B and W together."""
    return [*costs.forward, *(backward + weight for backward, weight in zip(costs.backward, costs.weight, strict=True))]
