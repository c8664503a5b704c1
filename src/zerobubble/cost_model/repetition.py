"""Long steps by short ones: a schedule repeats itself, so p more microbatches take as long each time."""

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
"""Steps of more than so many microbatches a rank are played with this many a rank, and then with one a rank less."""
MOST_PASSES_KEPT = 400_000


class Ready(NamedTuple):
    """A schedule ready to be played."""

    schedule: Schedule
    graph: Graph
    order: list[int]

    def makespan(self, costs: Costs) -> int:
        """How long it takes under `costs`, in ns, with the sums over replicas."""
        return metrics_of(self.graph, play(self.graph, self.order, *pass_times(self.graph, costs)), costs).makespan


class Shapes:
    """Published schedules by shape, made once and kept as long as there is room."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, int, int, int | None], Ready] = OrderedDict()

    def ready(self, name: str, ranks: int, microbatches: int, v: int | None) -> Ready:
        """The schedule of this shape, ready to be played."""
        shape = name, ranks, microbatches, v
        if shape not in self._kept:
            schedule = make(name, ranks, microbatches, v)
            self._kept[shape] = Ready(schedule, *checked(schedule))
            while len(self._kept) > 1 and sum(len(each.graph.ops) for each in self._kept.values()) > MOST_PASSES_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(shape)
        return self._kept[shape]


class LongStep:
    """A step of a published schedule, played in full or, where it is long, by its repetition.

    A long one is `SHORT` microbatches a rank, with as many left over as the whole has, and what these take longer than one a rank less for
    each one a rank more. It holds as much memory as the short one: none of the schedules tried holds more with more microbatches.
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
        """The most bytes of activations that each rank holds."""
        return peak_memory(self.schedule, costs)

    def makespan(self, costs: Costs) -> int:
        """How long it takes under `costs`, in ns."""
        last = self.whole.makespan(costs)
        return last if self._less is None else last + self.repeated * (last - self._less.makespan(costs))
