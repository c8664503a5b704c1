"""Pacing: nominal pass times for ranks that share cores.

Four ranks on two cores wait for each other's arithmetic, and no schedule can show what it is worth. So every pass does its real
arithmetic and then sleeps until the time it would take on an accelerator this much slower, which each rank then seems to own.
"""

from __future__ import annotations

from dataclasses import dataclass

from zerobubble.costs import Costs

SLACK = 1.6
"""Nominal times are this many times what passes took while all ranks were busy, so that few take longer."""
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


def layer_times(measured: Costs, layers: int) -> LayerTimes:
    """Nominal times from `measured` ones: those of the slowest stage, per layer, with slack.

    Where backward was measured in one piece, B and W get half of it each.
    """
    slowest = [max(times) for times in (measured.forward, measured.backward, measured.weight)]
    if slowest[2] == 0:
        slowest[1:] = [slowest[1] // 2] * 2
    share = layers // measured.num_stages
    return LayerTimes(*(max(SHORTEST_NS, round(SLACK * time / share)) for time in slowest))
