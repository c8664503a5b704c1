"""What a pipeline can play: one schedule for each number of microbatches, made ready when it is first asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from zerobubble.errors import InputError, ProgramError
from zerobubble.ir import Placement, Schedule
from zerobubble.lower import lower
from zerobubble.program import Channel, Program
from zerobubble.runtime.executor import Executor
from zerobubble.runtime.measure.profile import one_by_one
from zerobubble.runtime.stage import Stage
from zerobubble.schedules import make
from zerobubble.verify_program import program_faults

MakeSchedule = Callable[[int, int], Schedule]


class Piece(NamedTuple):
    """A schedule made ready: its stages, and the executors that train with it, None where it has no backward passes, and evaluate."""

    schedule: Schedule
    stages: dict[int, Stage]
    train: Executor | None
    infer: Executor


def compose(given: str | Schedule | MakeSchedule, ranks: int, num_microbatches: int) -> Schedule:
    """The schedule for `num_microbatches`; raises `InputError` where there is none or it does not fit."""
    if isinstance(given, str):
        made: Any = make(given, ranks, num_microbatches)
    else:
        made = given if isinstance(given, Schedule) else given(ranks, num_microbatches)
    if not isinstance(made, Schedule):
        raise InputError(f"schedule must be a name, a Schedule or a function that gives one, got {type(made).__name__}")
    if made.num_ranks != ranks:
        raise InputError(f"schedule {made.name!r} is for {made.num_ranks} ranks, the process group has {ranks}")
    if made.num_microbatches != num_microbatches:
        raise InputError(
            f"schedule {made.name!r} has {made.num_microbatches} microbatches, num_microbatches is {num_microbatches}: "
            "give a schedule's name, or a function (num_ranks, num_microbatches) -> Schedule, to have one for any number"
        )
    return made


def proved(schedule: Schedule) -> Program:
    """The schedule's program, proved to match its messages and never to stop before a rank runs it."""
    return sound(lower(schedule))


def sound(program: Program) -> Program:
    """`program` if it is; raises `ProgramError` with every fault else."""
    faults = program_faults(program)
    if faults:
        raise ProgramError(faults, program.name)
    return program


def every_channel(placement: Placement) -> list[Channel]:
    """The channels that any schedule of this placement may use."""
    routes = tuple(range(len(placement.routes)))
    empty = Schedule("every route", placement, len(routes), ((),) * placement.num_ranks, routes if len(routes) > 1 else ())
    return sorted({channel for _, _, channel, _ in lower(one_by_one(empty)).channels()})
