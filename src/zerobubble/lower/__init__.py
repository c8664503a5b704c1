"""Schedule to program, in passes: place messages, then frees; each step leaves a program the next one can rely on."""

from __future__ import annotations

from zerobubble.errors import ProgramError, ScheduleError
from zerobubble.ir import Schedule
from zerobubble.lower.buffers import place_frees
from zerobubble.lower.messages import hoist_receives, place_receives, place_sends
from zerobubble.program import Program
from zerobubble.verify import schedule_faults
from zerobubble.verify_program import program_faults

PREFETCH = 2
"""Receives posted ahead on each channel beyond the one waited for: enough that a message seldom finds no buffer."""


def lower(schedule: Schedule, prefetch: int = PREFETCH) -> Program:
    """The program that runs `schedule`: messages in one order at both ends, receives posted `prefetch` messages ahead.

    Raises `ScheduleError` with every fault when the schedule is not legal. The result has no `program_faults`.
    """
    faults = schedule_faults(schedule)
    if faults:
        raise ScheduleError(faults, schedule.name)
    program = place_frees(hoist_receives(place_receives(place_sends(schedule), prefetch)))
    wrong = program_faults(program)
    if wrong:
        raise ProgramError(wrong, program.name)
    return program
