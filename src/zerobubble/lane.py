"""A lane beside the passes of a rank: what it does one after another while it computes, and what its steps wait for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from zerobubble.graph import Graph


class LaneWork(NamedTuple):
    """Something on a lane: it may begin when the steps before step `begins` are over, step `needed` waits for it, it takes `takes` ns."""

    begins: int
    needed: int
    takes: int


class Lane:
    """The works of a rank in their order, played as far as its passes have come: `played` has when each began and ended, in ns.

    `steps` are the numbers of the passes of each of its steps. Works stand in the order of their `begins`.
    """

    def __init__(self, works: Sequence[LaneWork], steps: Sequence[tuple[int, ...]]) -> None:
        self.played: list[tuple[int, int]] = []
        self._works, self._steps = works, steps
        self._place = {numbers[0]: place for place, numbers in enumerate(steps)}
        self._ready = [0] * len(steps)

    def ready(self, number: int, end: Sequence[int]) -> int:
        """When all is done that the step waits for which begins with pass `number`; all steps before it have ended as `end` says."""
        place = self._place.get(number)
        if place is None:  # the second pass of an overlapped step
            return 0
        while len(self.played) < len(self._works) and self._works[len(self.played)].begins <= place:
            self._play(self._works[len(self.played)], end)
        return self._ready[place]

    def _play(self, work: LaneWork, end: Sequence[int]) -> None:
        may_begin = max(end[number] for number in self._steps[work.begins - 1]) if work.begins else 0
        begin = max(may_begin, self.played[-1][1] if self.played else 0)
        over = begin + work.takes
        self._ready[work.needed] = max(self._ready[work.needed], over)
        self.played.append((begin, over))


def steps_of_ranks(graph: Graph) -> list[list[tuple[int, ...]]]:
    """The numbers of the passes of each step, for each rank."""
    rows: list[list[tuple[int, ...]]] = [[] for _ in graph.first[1:]]
    for step in graph.steps():
        rows[graph.rank[step[0]]].append(step)
    return rows
