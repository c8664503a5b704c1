"""Pass times of a layer, and pacing: nominal times for ranks that share cores.

Four ranks on two cores wait for each other's arithmetic, which hides the differences between schedules. So every pass does its real
arithmetic and then sleeps to a nominal time, as if each rank had its own, slower accelerator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zerobubble.costs import Costs
from zerobubble.ir import Kind
from zerobubble.timeline import Timeline

SLACK = 1.7
"""The nominal time of a pass over its time with a fair share of a core, so that few passes take longer."""
SHORTEST_NS = 1_000_000
"""The shortest nominal pass of a layer, because sleeping is not exact."""


@dataclass(frozen=True)
class LayerTimes:
    """Times of F, B and W for one layer, in ns."""

    forward: int
    backward: int
    weight: int

    def costs(self, layers: int, num_stages: int) -> Costs:
        """Returns the costs of `layers` layers in `num_stages` equal stages, with messages of no time and no bytes."""
        share, none = layers // num_stages, (0,) * num_stages
        forward, backward, weight = ((share * time,) * num_stages for time in (self.forward, self.backward, self.weight))
        return Costs(forward, backward, weight, none[1:], none, none)

    def step_seconds(self, layers: int, microbatches: int) -> float:
        """Returns the seconds of a step on one device, which runs passes in sequence."""
        return microbatches * layers * (self.forward + self.backward + self.weight) / 1e9

    def paced(self, ranks_per_core: float) -> LayerTimes:
        """Returns nominal times: these times, multiplied by the ranks that share a core, with slack."""
        stretch = SLACK * max(1.0, ranks_per_core)
        return LayerTimes(*(max(SHORTEST_NS, round(stretch * time)) for time in (self.forward, self.backward, self.weight)))


def layer_times(measured: Sequence[Timeline], layers_per_stage: int) -> LayerTimes:
    """Returns the undisturbed times of a layer. If backward was measured in one pass, B and W get half of it each."""
    times = [_undisturbed(measured, kind) // layers_per_stage for kind in (Kind.F, Kind.B, Kind.W, Kind.BW)]
    forward, backward, weight, fused = times
    return LayerTimes(forward, backward or fused // 2, weight or fused // 2)


def _undisturbed(measured: Sequence[Timeline], kind: Kind) -> int:
    """Returns the quickest pass of `kind` of the slowest stage, in ns; 0 if there is none."""
    quickest: dict[int, int] = {}
    for op, duration in ((span.op, span.duration) for timeline in measured for _, span in timeline.spans()):
        if op.kind is kind:
            quickest[op.stage] = min(duration, quickest.get(op.stage, duration))
    return max(quickest.values(), default=0)
