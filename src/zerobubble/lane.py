"""A lane: operations that run one at a time on a rank, in parallel with its passes. Some of its steps wait for them.

Gathers of sharded weights and copies to the host are lanes. A lane is not part of the graph of passes, because its operations belong to
steps of one row and never make ranks wait for each other directly. `graph.play` asks a lane for the earliest start of each step instead.
This works because `play` runs each rank's steps in order: when it asks about a step, the ends of all earlier steps are final, and so are
the operations that may begin before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from zerobubble.graph import Graph


class LaneWork(NamedTuple):
    """An operation of `duration` ns on a lane. It may begin after all steps before `earliest`; step `needed` waits for its end."""

    earliest: int
    needed: int
    duration: int


class Lane:
    """Simulates the operations of one rank as its passes are played. `played` has the begin and end of each operation so far, in ns.

    `steps` are the pass numbers of each step of the rank. `works` must be in order of `earliest`.
    """

    def __init__(self, works: Sequence[LaneWork], steps: Sequence[tuple[int, ...]]) -> None:
        self.played: list[tuple[int, int]] = []
        self._works, self._steps = works, steps
        self._place = {numbers[0]: place for place, numbers in enumerate(steps)}
        self._ready = [0] * len(steps)

    def ready(self, number: int, end: Sequence[int]) -> int:
        """Return when the step that begins with pass `number` may start; `end` must have the ends of all steps before it."""
        place = self._place.get(number)
        if place is None:  # the second pass of an overlapped step
            return 0
        # Operations are played lazily, in lane order. Those that begin later cannot be needed by this step, as earliest <= needed.
        while len(self.played) < len(self._works) and self._works[len(self.played)].earliest <= place:
            self._play(self._works[len(self.played)], end)
        return self._ready[place]

    def _play(self, work: LaneWork, end: Sequence[int]) -> None:
        may_begin = max(end[number] for number in self._steps[work.earliest - 1]) if work.earliest else 0
        begin = max(may_begin, self.played[-1][1] if self.played else 0)
        over = begin + work.duration
        self._ready[work.needed] = max(self._ready[work.needed], over)
        self.played.append((begin, over))


def steps_of_ranks(graph: Graph) -> list[list[tuple[int, ...]]]:
    """Return the pass numbers of each step, for each rank."""
    rows: list[list[tuple[int, ...]]] = [[] for _ in graph.first[1:]]
    for step in graph.steps():
        rows[graph.rank[step[0]]].append(step)
    return rows
