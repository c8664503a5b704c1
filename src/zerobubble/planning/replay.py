"""Replays one order with different times: a faster `graph.play`, for which the order is resolved once into columns.

A replay costs two additions and a comparison per pass, a third of `graph.play`, and returns only the objective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from zerobubble.costs import Costs
from zerobubble.garbage_pause import garbage_collection_paused
from zerobubble.graph import Graph
from zerobubble.ir import Schedule, Step
from zerobubble.planning.problem.problem import Objective
from zerobubble.verify import checked


@dataclass(frozen=True, slots=True)
class Replay:
    """The steps of a schedule in a topological order, numbered from 1 so that 0 means none.

    A step follows step `before` of its row and uses the message that step `maker` sends over link `link`, also numbered from 1. A step with
    two messages, such as an overlapped one, follows an empty step that waits for the other. `samples` has one step of each kind and stage,
    and step i takes as long as sample `alike[i]` if microbatches are of equal cost. `ends` are the first and the last step of each row.
    """

    steps: tuple[Step, ...]
    before: tuple[int, ...]
    maker: tuple[int, ...]
    link: tuple[int, ...]
    samples: tuple[Step, ...]
    alike: tuple[int, ...]
    ends: tuple[tuple[int, int], ...]

    @classmethod
    @garbage_collection_paused()
    def from_schedule(cls, schedule: Schedule) -> Replay:
        """Resolves `schedule`; raises `ScheduleError` with every fault if it cannot run."""
        graph, order = checked(schedule)
        lines, place = _lines(graph, order)
        steps, before, makers, links = (tuple(column) for column in zip(*lines, strict=True))
        kinds = [tuple([op[:2] for op in step]) for step in steps]
        samples = dict(zip(kinds, steps, strict=True))
        number = {kind: number for number, kind in enumerate(samples)}
        ends = tuple((place[first], place[end - 1]) for first, end in pairwise(graph.first) if end > first)
        return cls(steps, before, makers, links, tuple(samples.values()), tuple([number[kind] for kind in kinds]), ends)

    def durations(self, costs: Costs) -> list[int]:
        """Duration of each step under `costs`, in ns."""
        if costs.shares:
            return [costs.step_time(step) if step else 0 for step in self.steps]
        times = [costs.step_time(sample) if sample else 0 for sample in self.samples]
        return [times[alike] for alike in self.alike]

    def time(self, objective: Objective, costs: Costs) -> int:
        """The objective under `costs` in ns, equal to that of `simulate`."""
        return self.play(objective, self.durations(costs), costs.comm)

    def play(self, objective: Objective, durations: Sequence[int], comm: Sequence[int]) -> int:
        """Returns the objective in ns for these durations of steps and these message times `comm` by link."""
        finished, delay = [0], (0, *comm)  # index 0 stands for no step and no link
        for before, maker, link, duration in zip(self.before, self.maker, self.link, durations, strict=True):
            begin, arrival = finished[before], finished[maker] + delay[link]
            finished.append((arrival if arrival > begin else begin) + duration)
        begins = [finished[first] - durations[first - 1] for first, _ in self.ends]
        if objective is Objective.MAKESPAN:
            return max(finished) - min(begins)
        return max(finished[last] - begin for begin, (_, last) in zip(begins, self.ends, strict=True))


Line = tuple[Step, int, int, int]
"""A step, the step before it in its row, and the maker and link of the message it uses."""


def _lines(graph: Graph, order: Sequence[int]) -> tuple[list[Line], list[int]]:
    """Returns the lines of the steps in `order`, and for each pass the number of its step."""
    lines: list[Line] = []
    place = [0] * len(order)
    for number in order:
        if number - 1 in graph.pairs:  # the second pass of a step
            continue
        together = (number, number + 1) if number in graph.pairs else (number,)
        before = place[number - 1] if graph.position(number) else 0
        last, *others = _messages(graph, place, together) or [(0, 0)]
        for message in others:
            lines.append(((), before, *message))
            before = len(lines)
        lines.append((tuple([graph.ops[each] for each in together]), before, *last))
        for each in together:
            place[each] = len(lines)
    return lines, place


def _messages(graph: Graph, place: Sequence[int], together: Sequence[int]) -> list[tuple[int, int]]:
    """The steps whose messages these passes use, each with its link; `place[n]` is the step of pass n."""
    used = ((user, need) for user in together for need in graph.needs[user] if graph.rank[need] != graph.rank[user])
    return [(place[need], min(graph.ops[user].stage, graph.ops[need].stage) + 1) for user, need in used]
