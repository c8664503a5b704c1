"""Extrapolates long steps from short ones: a schedule is periodic, so p more microbatches always add the same time."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from zerobubble.costs import Costs
from zerobubble.graph import Graph, play
from zerobubble.ir import Schedule
from zerobubble.schedules import make
from zerobubble.simulation import metrics_of, pass_times, peak_memory
from zerobubble.verify import checked

LONG, SHORT = 6, 4
"""Steps with more microbatches per rank than this are simulated with this many per rank, and with one fewer per rank."""
MOST_PASSES_KEPT = 400_000


class Ready(NamedTuple):
    """A schedule prepared for simulation."""

    schedule: Schedule
    graph: Graph
    order: list[int]

    def makespan(self, costs: Costs) -> int:
        """Returns the makespan under `costs`, in ns, including reductions over replicas."""
        return metrics_of(self.graph, play(self.graph, self.order, *pass_times(self.graph, costs)), costs).makespan


class Shapes:
    """A bounded cache of published schedules by shape."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, int, int, int | None], Ready] = OrderedDict()

    def ready(self, name: str, ranks: int, microbatches: int, v: int | None) -> Ready:
        """Returns the schedule of this shape, prepared for simulation."""
        shape = name, ranks, microbatches, v
        if shape not in self._kept:
            schedule = make(name, ranks, microbatches, v)
            self._kept[shape] = Ready(schedule, *checked(schedule))
            while len(self._kept) > 1 and sum(len(each.graph.ops) for each in self._kept.values()) > MOST_PASSES_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(shape)
        return self._kept[shape]


class LongStep:
    """A step of a published schedule, simulated in full or, if long, extrapolated.

    A long step is simulated with `SHORT` microbatches per rank plus the remainder of the full step. Each further microbatch per rank adds
    the difference to a step with one fewer. Its memory is that of the short step: no schedule tried needs more memory for more
    microbatches.
    """

    def __init__(self, shapes: Shapes, name: str, ranks: int, microbatches: int, v: int | None) -> None:
        more = max(0, microbatches // ranks - SHORT) if microbatches > LONG * ranks else 0
        self.repeated = more
        self.whole = shapes.ready(name, ranks, microbatches - more * ranks, v)
        self._less = shapes.ready(name, ranks, microbatches - (more + 1) * ranks, v) if more else None

    @property
    def schedule(self) -> Schedule:
        return self.whole.schedule

    def peak_memory(self, costs: Costs) -> tuple[int, ...]:
        """Returns the peak bytes of activations of each rank."""
        return peak_memory(self.schedule, costs)

    def makespan(self, costs: Costs) -> int:
        """Returns the makespan under `costs`, in ns."""
        last = self.whole.makespan(costs)
        return last if self._less is None else last + self.repeated * (last - self._less.makespan(costs))
