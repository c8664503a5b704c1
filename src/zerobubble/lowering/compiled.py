"""A compiled schedule: its graph and its program, each checked once and shared by all users."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from zerobubble.display import Displayed
from zerobubble.errors import ProgramError
from zerobubble.garbage_pause import garbage_collection_paused
from zerobubble.graph import Graph
from zerobubble.ir import Schedule
from zerobubble.lowering.messages import SentValue, hoist_receives, messages_of, post_points, release_points
from zerobubble.program import Action, Compute, Free, Program, Recv, Send
from zerobubble.rules import Value
from zerobubble.verify import checked
from zerobubble.verify_program import program_faults

PREFETCH = 2
"""Default number of receives posted ahead on each channel. With it, a message rarely arrives before its receive is posted."""


@dataclass(frozen=True, repr=False)
class Compiled(Displayed):
    """A legal `schedule`, the `graph` of its passes, and the fault-free `program` that posts receives `prefetch` messages ahead."""

    schedule: Schedule
    graph: Graph
    program: Program
    prefetch: int

    def _summary(self) -> str:
        return self.program._summary()

    def _details(self) -> Iterator[str]:
        return self.program._details()

    @classmethod
    @garbage_collection_paused()
    def from_schedule(cls, schedule: Schedule, prefetch: int = PREFETCH) -> Compiled:
        """Compile `schedule`, with receives posted `prefetch` messages ahead.

        Raises `ScheduleError` with every fault if the schedule is not legal.
        """
        graph, program = lowered(schedule, prefetch)
        return cls(schedule, graph, sound(program), prefetch)


def lowered(schedule: Schedule, prefetch: int) -> tuple[Graph, Program]:
    """Return the graph of `schedule` and its program; raises `ScheduleError` with every fault if the schedule is not legal."""
    graph, _ = checked(schedule)
    messages = messages_of(graph, schedule.num_stages)
    # Prefetch alone does not rule out deadlocks under a transport whose sends wait, so receives are hoisted where needed.
    posts = hoist_receives(graph, messages, post_points(graph, messages, prefetch))
    return graph, _write(schedule, graph, messages, posts, release_points(graph, messages, schedule.num_stages))


def _write(schedule: Schedule, graph: Graph, messages: Sequence[SentValue], posts: Sequence[int], releases: Mapping[Value, int]) -> Program:
    """Return the program of `schedule`: before each step its receives, after it its sends, then the frees.

    `posts` has, for each message, the pass before which its receive is posted. `releases` has, for each sent value, the pass after which
    it is freed. Sends come before frees, because a value may be freed after the step that sends it.
    """
    rank = graph.rank
    receives, frees = defaultdict[int, list[Recv]](list), defaultdict[int, list[Free]](list)
    sends = defaultdict[int, list[Send]](list)
    for message, post in zip(messages, posts, strict=True):
        receives[post].append(Recv(message.value, rank[message.maker]))
        sends[message.maker].append(Send(message.value, rank[message.user]))
    for value, release in releases.items():
        frees[release].append(Free(value))
    rows: list[tuple[Action, ...]] = []
    number = 0
    for steps in schedule.steps:
        row: list[Action] = []
        for step in steps:
            passes = (number,) if len(step) == 1 else (number, number + 1)
            number += len(step)
            for at in passes:
                if at in receives:
                    row += receives[at]
            row.append(Compute(step))
            for at in passes:
                if at in sends:
                    row += sends[at]
                if at in frees:
                    row += frees[at]
        rows.append(tuple(row))
    return Program(*schedule.header[:3], tuple(rows), schedule.microbatch_routes, schedule.slices)


def sound(program: Program) -> Program:
    """Return `program` if it has no `program_faults`; raises `ProgramError` with every fault otherwise."""
    faults = program_faults(program)
    if faults:
        raise ProgramError(faults, program.name)
    return program
