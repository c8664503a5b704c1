"""Lowering of a schedule to a program: each rank's passes with their sends, receives and frees.

To lower a schedule, call `zb.lower`, which is `lower` here. The other names plan gathers of sharded weights, and check programs.

The lowering works on pass numbers, in four steps: find the messages (`messages_of`), choose where to post each receive (`post_points`,
then `hoist_receives`), choose where to free each sent value (`release_points`), and write the actions (`_write`). Three rules make it safe:

- Receives from a rank are in the order of its sends, because transports match messages by order alone: NCCL those of all kinds together.
- Posting a receive never waits. So any receive can be moved earlier, and this removes deadlocks that late receives would cause.
- A sent value is freed only after its arrival is certain, so a free never waits for a message and cannot be part of a deadlock.
"""

from __future__ import annotations

from zerobubble.arguments import WHOLE, takes, wrong
from zerobubble.costs import Costs
from zerobubble.garbage_pause import garbage_collection_paused
from zerobubble.gathers import Gather, RankGathers, plan_gathers
from zerobubble.ir import Schedule
from zerobubble.listing import listing
from zerobubble.lowering.compiled import PREFETCH, Compiled, lowered
from zerobubble.lowering.messages import depth_needed, messages_of
from zerobubble.program import Program
from zerobubble.simulation import simulate
from zerobubble.verify import checked
from zerobubble.verify_program import program_faults

__all__ = ["PREFETCH", "Compiled", "Gather", "RankGathers", "lower", "plan_gathers", "prefetch_depth", "program_faults"]

__dir__ = listing(__all__)


@takes(schedule=Schedule, prefetch=WHOLE)
@garbage_collection_paused()
def lower(schedule: Schedule, prefetch: int = PREFETCH) -> Program:
    """Return the program that runs `schedule`, with receives posted `prefetch` messages ahead.

    The result has no `program_faults`. Raises `ScheduleError` with every fault if the schedule is not legal, and `InputError` for a
    negative `prefetch`.

    Arguments:
        schedule: the order to run; it must be legal.
        prefetch: receives posted ahead on each channel, in addition to the current one. More of them hide late messages but need more
            buffers.

    >>> import zerobubble as zb
    >>> program = zb.lower(zb.make("1f1b", 2, 2))
    >>> program
    <Program 1f1b: 2 stages on 2 ranks (linear), 2 microbatches, 20 actions>
    >>> print(*map(str, program.rows[1][:5]), sep="; ")
    recv a0.0 from 0; recv a0.1 from 0; run 1F0; run 1BW0; send g1.0 to 0
    """
    if prefetch < 0:
        raise wrong("prefetch", prefetch, "a number of receives >= 0")
    return lowered(schedule, prefetch)[1]


@takes(schedule=Schedule, costs=Costs)
def prefetch_depth(schedule: Schedule, costs: Costs) -> int:
    """Return a `prefetch` for `lower(schedule)` that posts every receive before its message is sent, if passes take the times of `costs`.

    It is the smallest such value, unless `lower` has to post receives earlier to avoid a deadlock. Raises as `simulate` does.
    """
    ends = [span.end for row in simulate(schedule, costs).rows for span in row]
    graph, _ = checked(schedule)
    return depth_needed(graph, messages_of(graph, schedule.num_stages), ends)
