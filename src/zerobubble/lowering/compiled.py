"""A compiled schedule: its graph and its program, each checked once and shared by all users."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zerobubble.display import Displayed
from zerobubble.errors import ProgramError
from zerobubble.garbage_pause import garbage_collection_paused
from zerobubble.graph import Graph
from zerobubble.ir import Schedule
from zerobubble.lowering.buffers import release_points
from zerobubble.lowering.messages import hoist_receives, messages_of, post_points
from zerobubble.lowering.write import write
from zerobubble.program import Program
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
    def of(cls, schedule: Schedule, prefetch: int = PREFETCH) -> Compiled:
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
    return graph, write(schedule, graph, messages, posts, release_points(graph, messages, schedule.num_stages))


def sound(program: Program) -> Program:
    """Return `program` if it has no `program_faults`; raises `ProgramError` with every fault otherwise."""
    faults = program_faults(program)
    if faults:
        raise ProgramError(faults, program.name)
    return program
