"""Schedule to program, on pass numbers: who uses each message, where its receive is posted, where it is freed; then written out."""

from __future__ import annotations

from zerobubble.arguments import WHOLE, takes
from zerobubble.costs import Costs
from zerobubble.errors import InputError
from zerobubble.garbage_pause import garbage_collection_paused
from zerobubble.gathers import Gather, RankGathers, plan_gathers
from zerobubble.ir import Schedule
from zerobubble.lowering.compiled import PREFETCH, Compiled, lowered
from zerobubble.lowering.messages import depth_needed, messages_of
from zerobubble.program import Program
from zerobubble.simulation import simulate
from zerobubble.verify import checked
from zerobubble.verify_program import program_faults

__all__ = ["PREFETCH", "Compiled", "Gather", "RankGathers", "lower", "plan_gathers", "prefetch_depth", "program_faults"]


@takes(schedule=Schedule, prefetch=WHOLE)
@garbage_collection_paused()
def lower(schedule: Schedule, prefetch: int = PREFETCH) -> Program:
    """The program that runs `schedule`: messages in one order at both ends, receives posted `prefetch` messages ahead.

    The result has no `program_faults`. Raises `ScheduleError` with every fault when the schedule is not legal, `InputError` for a
    negative `prefetch`.

    Arguments:
        schedule: the order to run; it must be legal.
        prefetch: receives posted ahead on each channel beyond the one waited for. More of them hide late messages and take more buffers.

    >>> import zerobubble as zb
    >>> program = zb.lower(zb.make("1f1b", 2, 2))
    >>> program
    <Program 1f1b: 2 stages on 2 ranks (linear), 2 microbatches, 20 actions>
    >>> print(*map(str, program.rows[1][:5]), sep="; ")
    recv a0.0 from 0; recv a0.1 from 0; run 1F0; run 1BW0; send g1.0 to 0
    """
    if prefetch < 0:
        raise InputError(f"prefetch counts the receives posted ahead and must be >= 0, got {prefetch}")
    return lowered(schedule, prefetch)[1]


@takes(schedule=Schedule, costs=Costs)
def prefetch_depth(schedule: Schedule, costs: Costs) -> int:
    """A `prefetch` for `lower` with which no message finds its receive missing, where passes and messages take `costs`.

    It is the least, but where `lower` posts receives earlier lest the pipeline stops. Raises as `simulate` does.
    """
    ends = [span.end for row in simulate(schedule, costs).rows for span in row]
    graph, _ = checked(schedule)
    return depth_needed(graph, messages_of(graph, schedule.num_stages), ends)
