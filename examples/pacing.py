"""Pacing: nominal pass times for ranks that share cores.

Four ranks on two cores wait for each other's arithmetic, and no schedule can show what it is worth. So every pass does its real
arithmetic and then sleeps until the time it would take on an accelerator this much slower, which each rank then seems to own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zerobubble.costs import Costs
from zerobubble.ir import Kind
from zerobubble.timeline import Timeline

SLACK = 1.7
"""How much longer a nominal pass is than one that gets its fair share of a core, so that few take longer."""
SHORTEST_NS = 1_000_000
"""No nominal pass of a layer is shorter, for sleeping is not exact."""


@dataclass(frozen=True)
class LayerTimes:
    """Nominal times of F, B and W for one layer, in ns."""

    forward: int
    backward: int
    weight: int

    def costs(self, layers: int, num_stages: int) -> Costs:
        """The costs of `layers` layers in `num_stages` equal stages, with messages that take no time. Bytes are not part of a pace."""
        share, none = layers // num_stages, (0,) * num_stages
        forward, backward, weight = ((share * time,) * num_stages for time in (self.forward, self.backward, self.weight))
        return Costs(forward, backward, weight, none[1:], none, none)

    def step_seconds(self, layers: int, microbatches: int) -> float:
        """What a step takes one device that runs one pass after the other."""
        return microbatches * layers * (self.forward + self.backward + self.weight) / 1e9


def layer_times(measured: Sequence[Timeline], layers_per_stage: int, ranks_per_core: float) -> LayerTimes:
    """Nominal times from passes at full speed: what they take undisturbed, times the ranks that share a core, with slack.

    Where backward was measured in one piece, B and W get half of it each.
    """
    forward, backward, weight, fused = (_undisturbed(measured, kind) for kind in (Kind.F, Kind.B, Kind.W, Kind.BW))
    stretch = SLACK * max(1.0, ranks_per_core) / layers_per_stage
    return LayerTimes(*(max(SHORTEST_NS, round(stretch * time)) for time in (forward, backward or fused // 2, weight or fused // 2)))


def _undisturbed(measured: Sequence[Timeline], kind: Kind) -> int:
    """The quickest pass of `kind` of the slowest stage, in ns; 0 where there is none."""
    quickest: dict[int, int] = {}
    for op, duration in ((span.op, span.duration) for timeline in measured for _, span in timeline.spans()):
        if op.kind is kind:
            quickest[op.stage] = min(duration, quickest.get(op.stage, duration))
    return max(quickest.values(), default=0)
