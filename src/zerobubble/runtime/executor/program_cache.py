"""What a pipeline can play: one schedule for each number of microbatches, made ready when it is first asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from zerobubble.costs import Costs
from zerobubble.errors import InputError, ProgramError
from zerobubble.ir import Placement, Schedule
from zerobubble.lowering import PREFETCH, lower, prefetch_depth
from zerobubble.lowering.rollback import with_rollback_points
from zerobubble.program import Channel, Program
from zerobubble.runtime.executor.executor import Executor, Overlap
from zerobubble.runtime.executor.pace import Pace
from zerobubble.runtime.measure.profile import one_by_one
from zerobubble.runtime.stage.rank_stages import Stages
from zerobubble.runtime.stage.stage import Stage
from zerobubble.runtime.step.handshake import StepHandshake
from zerobubble.runtime.transport.transport import Transport
from zerobubble.schedules import make
from zerobubble.verify_program import program_faults

MakeSchedule = Callable[[int, int], Schedule]


class CompiledProgram(NamedTuple):
    """A schedule made ready: its stages, and the executors that train with it, None where it has no backward passes, and evaluate."""

    schedule: Schedule
    stages: dict[int, Stage]
    train: Executor | None
    infer: Executor


class ProgramCache:
    """The pieces of one pipeline, `now` the one that is played. `given` says what other pieces may be asked for.

    `handshakes` has one for every executor at work. `on_last_backward` are calls for the end of a stage's last backward pass.
    """

    def __init__(
        self,
        given: str | Schedule | MakeSchedule,
        stages: Stages,
        transport: Transport,
        handshakes: dict[Executor, StepHandshake],
        pace: Pace | None,
        overlap: Overlap | None,
        on_last_backward: Mapping[int, Callable[[], None]],
    ) -> None:
        self._given = given
        self._stages = stages
        self._transport = transport
        self._handshakes = handshakes
        self._pace = pace
        self._overlap = overlap
        self._on_last_backward = on_last_backward
        self._rolls_back = False
        self._prefetch = PREFETCH
        self._compiled: dict[int, CompiledProgram] = {}
        self.now: CompiledProgram

    def play(self, schedule: Schedule, costs: Costs | None = None) -> None:
        """From here on, play `schedule` and nothing else, with receives posted as far ahead as its `costs` ask for, and one more."""
        self._prefetch = PREFETCH if costs is None else 1 + prefetch_depth(schedule, costs)
        self._handshakes.clear()
        self._compiled = {schedule.num_microbatches: self._ready(schedule)}
        self.now = self._compiled[schedule.num_microbatches]

    def choose(self, num_microbatches: int) -> CompiledProgram:
        """What is played for this number of microbatches; every rank finds out with the step's first word whether it plays the same.

        Raises `InputError` where there is no such schedule, or it lays the stages otherwise.
        """
        if num_microbatches not in self._compiled:
            schedule = compose(self._given, self._transport.size, num_microbatches)
            was = self.now.schedule
            if schedule.placement != was.placement:
                raise InputError(
                    f"schedule {schedule.name!r} places the stages otherwise for {num_microbatches} microbatches than for "
                    f"{was.num_microbatches}: {schedule.placement} instead of {was.placement}"
                )
            self._compiled[num_microbatches] = self._ready(schedule)
        self.now = self._compiled[num_microbatches]
        return self.now

    def with_rollback_points(self) -> None:
        """Make every piece anew so that its steps can be taken back at a rollback point."""
        self._rolls_back = True
        self._handshakes.clear()
        self._compiled = {count: self._ready(piece.schedule) for count, piece in self._compiled.items()}
        self.now = self._compiled[self.now.schedule.num_microbatches]

    def one_by_one(self) -> tuple[Executor, dict[int, Stage]]:
        """Microbatches one by one through the stages of `now`, for a profile; forget its opening after it."""
        schedule = one_by_one(self.now.schedule)
        stages = self._stages.of(schedule)
        executor = Executor(proved(schedule), stages, self._transport, self._pace)
        self._handshakes[executor] = StepHandshake(schedule, self._transport)
        return executor, stages

    def _ready(self, schedule: Schedule) -> CompiledProgram:
        stages = self._stages.of(schedule)
        infer = Executor(proved(schedule.forward_only()), stages, self._transport, None)
        self._handshakes[infer] = StepHandshake(schedule.forward_only(), self._transport)
        if schedule.is_forward_only:
            return CompiledProgram(schedule, stages, None, infer)
        program, rollback = proved(schedule, self._prefetch), None
        if self._rolls_back:
            program, points = with_rollback_points(program)
            program, rollback = sound(program), points[self._transport.rank]
        train = Executor(program, stages, self._transport, self._pace, self._overlap, rollback, self._on_last_backward)
        self._handshakes[train] = StepHandshake(schedule, self._transport)
        return CompiledProgram(schedule, stages, train, infer)


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


def proved(schedule: Schedule, prefetch: int = PREFETCH) -> Program:
    """The schedule's program, proved to match its messages and never to stop before a rank runs it."""
    return sound(lower(schedule, prefetch))


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
