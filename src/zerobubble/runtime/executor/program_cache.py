"""Caches compiled programs: one schedule per number of microbatches, lowered and prepared when it is first needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from math import isclose
from typing import Any

from zerobubble.arguments import WHOLE, Wanted, require, wrong
from zerobubble.costs import Costs
from zerobubble.errors import InputError
from zerobubble.garbage_pause import garbage_collection_paused
from zerobubble.ir import Schedule
from zerobubble.lowering import Compiled, prefetch_depth
from zerobubble.lowering.compiled import lowered, sound
from zerobubble.lowering.rollback import RollbackPoint, with_rollback_points
from zerobubble.offload import RankOffloads
from zerobubble.planned_run import Planned
from zerobubble.program import Channel, Program
from zerobubble.runtime.executor.executor import Executor
from zerobubble.runtime.executor.gradient_completion import RowListener
from zerobubble.runtime.executor.offloading import Offloads
from zerobubble.runtime.executor.overrides import Overlap, Pace
from zerobubble.runtime.mailbox.handshake import StepHandshake, read_passes
from zerobubble.runtime.measure.profile import one_by_one
from zerobubble.runtime.stage.rank_stages import Stages
from zerobubble.runtime.stage.stage import Stage
from zerobubble.runtime.transport.peers import Peers
from zerobubble.schedules import make

MOST_KEPT = 16
"""The number of cached programs, one for each number of microbatches. The least recently used program is dropped."""

MOST_PLANNED = 8
"""The number of cached schedules that were planned for the microbatches of a single step."""

MakeSchedule = Callable[[int, int], Schedule]
"""A function `(num_ranks, num_microbatches) -> Schedule`."""
_MOST = 10_000
MICROBATCHES = Wanted(
    f"a whole number of microbatches from 1 to {_MOST}",
    lambda count: WHOLE.accepts(count) and 1 <= count <= _MOST,
    lambda count: (
        "make them larger, or spread the batch over several steps" if WHOLE.accepts(count) and count > _MOST else WHOLE.remedy(count)
    ),
)
"""Larger schedules take too long to write, check and compile."""


class ReadyProgram:
    """A compiled schedule with its stages, and the executor that trains; None if the schedule has no backward passes.

    `make_infer` creates the executor that evaluates, whose steps `forward_handshake` opens. It is called at the first evaluation, which
    most pipelines never have.
    """

    def __init__(
        self,
        compiled: Compiled,
        stages: dict[int, Stage],
        train: Executor | None,
        forward_handshake: StepHandshake,
        make_infer: Callable[[], Executor],
    ) -> None:
        self.compiled = compiled
        self.stages = stages
        self.train = train
        self.forward_handshake = forward_handshake
        self._make_infer = make_infer

    @property
    def schedule(self) -> Schedule:
        """The schedule that it plays."""
        return self.compiled.schedule

    @cached_property
    def infer(self) -> Executor:
        """The executor of the forwards alone, which saves nothing."""
        return self._make_infer()

    @property
    def executor(self) -> Executor:
        """The executor that trains, or else the one that evaluates."""
        return self.train or self.infer

    def training_with(self, recording: bool) -> Executor:
        """Returns the executor that trains, with messages timed or not."""
        assert self.train is not None
        self.train.recording = recording
        return self.train

    def close(self) -> None:
        """Frees everything that its steps have left."""
        self.forward_handshake.clear()
        for executor in (self.train, vars(self).get("infer")):
            if executor is not None:
                executor.close()


class ProgramCache:
    """The compiled programs of one pipeline, at most `MOST_KEPT`; `now` is the current one.

    Every rank chooses the same numbers in the same order, so all ranks keep the same programs.

    Args:
        given: The schedule that the user requested; it makes schedules for other numbers of microbatches.
        listener: Is called in training before each step of the row, and when gradients are complete.
        gathered_bytes: The memory for gathered weights of sharded stages.
        offloads: The offloads of one schedule; no other schedule can train with them.
    """

    def __init__(
        self,
        given: str | Schedule | MakeSchedule,
        stages: Stages,
        peers: Peers,
        pace: Pace | None,
        overlap: Overlap | None,
        listener: RowListener,
        gathered_bytes: int | None = None,
        offloads: Offloads | None = None,
    ) -> None:
        self._given = given
        self._stages = stages
        self._peers = peers
        self._pace = pace
        self._overlap = overlap
        self._listener = listener
        self._gathered_bytes = gathered_bytes
        self._offloads = offloads
        self._has_rollback_points = False
        self._ready: dict[int, ReadyProgram] = {}
        self._planned: dict[tuple[int, tuple[int, ...]], ReadyProgram] = {}
        self._ahead: dict[tuple[int, tuple[int, ...]], Compiled] = {}
        self._trial: Executor | None = None
        self.now: ReadyProgram

    def play(self, compiled: Compiled) -> None:
        """Plays only this schedule from now on. Raises `InputError` if the offloads are for another schedule."""
        schedule = compiled.schedule
        if self._offloads is not None and schedule != self._offloads.schedule:
            raise InputError(
                "the offloads of this pipeline are planned for schedule {expected!r}, so it cannot change to {got!r}",
                expected=self._offloads.schedule.name,
                got=schedule.name,
                remedy="create a Pipeline with offloads for this schedule",
            )
        self._played = compiled
        self._close_all()
        self._keep(self._make_ready(compiled))

    def choose(self, num_microbatches: int) -> ReadyProgram:
        """Returns the program for this number of microbatches, and makes it current. The handshake of the step compares it among ranks.

        Raises `InputError` if there is no such schedule, or if its placement differs.
        """
        ready = self._ready.pop(num_microbatches, None) or self._make_ready(self._compiled_for(num_microbatches))
        self._keep(ready)
        return ready

    def compile_ahead(self, played: Schedule, passes: tuple[int, ...]) -> None:
        """Compiles in advance what `planned` will return while `played` is current; may run on a thread, during a step.

        Raises `ZeroBubbleError` for passes that no rank can run.
        """
        compiled = _unproven(played, passes, self._played.prefetch)
        self._with_rollback(sound(compiled.program))
        # A new dictionary, because a step may read this one meanwhile. Its own passes and those of the next step are kept.
        self._ahead = dict([*self._ahead.items(), ((played.num_microbatches, passes), compiled)][-2:])

    def planned(self, passes: tuple[int, ...]) -> ReadyProgram:
        """Returns the program for one step with these passes, in the form of `write_passes`, instead of the current ones.

        Only the rank that chose the passes proves the program sound, in `compile_ahead`: this rank compiles the same program.
        """
        key = self.now.schedule.num_microbatches, passes
        ready = self._planned.pop(key, None)
        if ready is None:
            compiled = self._ahead.get(key) or _unproven(self.now.schedule, passes, self._played.prefetch)
            ready = self._make_ready(compiled, self.now)
        self._planned[key] = ready
        if len(self._planned) > MOST_PLANNED:
            self._planned.pop(next(iter(self._planned))).close()
        return ready

    def _keep(self, ready: ReadyProgram) -> None:
        """Makes `ready` the current program, and closes the least recently used one if there are too many."""
        self.now = self._ready[ready.schedule.num_microbatches] = ready
        if len(self._ready) > MOST_KEPT:
            self._ready.pop(next(iter(self._ready))).close()

    def _compiled_for(self, num_microbatches: int) -> Compiled:
        played = self._played.schedule
        if num_microbatches == played.num_microbatches:
            return self._played
        schedule = schedule_for(self._given, self._peers.size, num_microbatches // played.slices, played.slices)
        if schedule.placement != played.placement:
            raise InputError(
                "schedule {schedule!r} places the stages differently for {num_microbatches} microbatches than for {played}: {got} instead "
                "of {expected}",
                schedule=schedule.name,
                num_microbatches=num_microbatches,
                played=played.num_microbatches,
                got=str(schedule.placement),
                expected=str(played.placement),
            )
        if schedule.head_parts != played.head_parts:
            raise InputError(
                "schedule {schedule!r} divides the head over the ranks of stages {got} for {num_microbatches} microbatches, but over those "
                "of {expected} for {played}",
                schedule=schedule.name,
                got=list(schedule.head_parts),
                num_microbatches=num_microbatches,
                expected=list(played.head_parts),
                played=played.num_microbatches,
                remedy="divide it in the same way",
            )
        return Compiled.from_schedule(schedule, self._played.prefetch)

    def offloads_of(self, schedule: Schedule) -> Sequence[RankOffloads] | None:
        """Returns what each rank offloads in `schedule`; None if nothing."""
        return self._offloads.ranks if self._offloads is not None and schedule == self._offloads.schedule else None

    def refuse_to_train(self, num_microbatches: int) -> None:
        """Raises `InputError` if the offloads are for another number of microbatches."""
        if self._offloads is not None and num_microbatches != self._offloads.schedule.num_microbatches:
            raise InputError(
                "the offloads of this pipeline are planned for {expected} microbatches, but a step trains with {got}",
                expected=self._offloads.schedule.num_microbatches,
                got=num_microbatches,
                remedy="leave num_microbatches out, or create a pipeline without offload",
            )

    def use_rollback_points(self) -> None:
        """Compiles every program from now on with a rollback point, at which its steps can start over."""
        if not self._has_rollback_points:
            self._has_rollback_points = True
            now = self.now.compiled
            self._close_all()
            self._keep(self._make_ready(now))

    @contextmanager
    def one_by_one(self, level: str | None = None, algorithm: int | None = None, fuses_backward: bool = False) -> Iterator[ReadyProgram]:
        """A context with a program that runs microbatches one by one through the current stages, for a profile.

        All stages have the recomputation `level`, if it is given. A divided head runs by `algorithm`, by default that of `now`. With
        `fuses_backward` each backward is a BW. After an error the program is kept, so that `close` can free what it has in flight.
        """
        schedule = one_by_one(self.now.schedule, recomputes_all=level is not None, algorithm=algorithm, fuses_backward=fuses_backward)
        stages = self._stages.for_schedule(schedule, level)
        handshake = StepHandshake(schedule, self._peers)
        if self._trial is not None:  # left by a profile that was refused
            self._trial.close()
        compiled = Compiled.from_schedule(schedule)
        trial = Executor(compiled.program, stages, self._peers, handshake, self._pace, gathered_bytes=self._gathered_bytes)
        self._trial = trial
        yield ReadyProgram(compiled, stages, trial, handshake, lambda: trial)
        trial.close()
        self._trial = None

    def close(self) -> None:
        """Frees everything held for steps, and drops messages, which keep connections open."""
        if self._trial is not None:
            self._trial.close()
        self._close_all()

    def _close_all(self) -> None:
        for ready in (*self._ready.values(), *self._planned.values()):
            ready.close()
        self._ready.clear()
        self._planned.clear()
        self._ahead = {}

    def _make_ready(self, compiled: Compiled, like: ReadyProgram | None = None) -> ReadyProgram:
        """Prepares the program. `like` gives its stages to a program for one step, which is not proved to be sound."""
        schedule = compiled.schedule
        stages = self._stages.for_schedule(schedule) if like is None else like.stages
        forward_only = schedule.forward_only()
        forward_handshake = StepHandshake(forward_only, self._peers) if like is None else like.forward_handshake
        make_infer = partial(self._infer, forward_only, stages, forward_handshake)
        if schedule.is_forward_only:
            return ReadyProgram(compiled, stages, None, forward_handshake, make_infer)
        program, rollback = self._with_rollback(compiled.program, proven=like is None)
        handshake = StepHandshake(schedule, self._peers)
        offloads = self._offloads if self.offloads_of(schedule) is not None else None
        train = Executor(
            program, stages, self._peers, handshake, self._pace, self._overlap, rollback, self._listener, self._gathered_bytes, offloads
        )
        return ReadyProgram(compiled, stages, train, forward_handshake, make_infer)

    def _infer(self, schedule: Schedule, stages: dict[int, Stage], forward_handshake: StepHandshake) -> Executor:
        return Executor(
            Compiled.from_schedule(schedule).program, stages, self._peers, forward_handshake, None, gathered_bytes=self._gathered_bytes
        )

    def _with_rollback(self, program: Program, *, proven: bool = True) -> tuple[Program, RollbackPoint | None]:
        """Returns the program that trains, and the point at which this rank's row can start over, if it must be able to."""
        if not self._has_rollback_points:
            return program, None
        program, points = with_rollback_points(program)
        return sound(program) if proven else program, points[self._peers.rank]

    def program_for(self, schedule: Schedule, costs: Costs) -> Program:
        """Returns the program that trains after `play(compiled_for(schedule, costs))`."""
        return self._with_rollback(compiled_for(schedule, costs).program)[0]


@garbage_collection_paused()
def _unproven(played: Schedule, passes: tuple[int, ...], prefetch: int) -> Compiled:
    """Compiles these passes in the place of those of `played`, without a proof that the program is sound."""
    schedule = read_passes(f"{played.name}, planned", played, passes)
    return Compiled(schedule, *lowered(schedule, prefetch), prefetch)


def compiled_for(schedule: Schedule, costs: Costs) -> Compiled:
    """Compiles `schedule`, with receives posted one message earlier than its costs require."""
    return Compiled.from_schedule(schedule, 1 + prefetch_depth(schedule, costs))


def _made_by(function: MakeSchedule, ranks: int, num_microbatches: int) -> Any:
    try:
        return function(ranks, num_microbatches)
    except Exception as error:
        name = getattr(function, "__qualname__", type(function).__name__)
        error.add_note(f"the schedule {name}({ranks}, {num_microbatches}) raised it: it gets the numbers of ranks and of microbatches")
        raise


def schedule_for(schedule: str | Schedule | Planned | MakeSchedule, ranks: int, num_microbatches: int, slices: int = 1) -> Schedule:
    """Returns the schedule for `num_microbatches` of `slices` each. Raises `InputError` if there is none, or if it does not fit."""
    require("num_microbatches", num_microbatches, MICROBATCHES)
    if isinstance(schedule, str):
        result: Any = make(schedule, ranks, num_microbatches, **({"slices": slices} if slices > 1 else {}))
    elif isinstance(schedule, Planned):
        result = schedule.to_run.schedule
        _require_equal_slices(schedule.to_run.costs)
    else:
        result = schedule if isinstance(schedule, Schedule) else _made_by(schedule, ranks, num_microbatches)
    if not isinstance(result, Schedule):
        raise wrong("schedule", result, "a name, a Schedule or a function that returns one")
    if result.num_ranks != ranks:
        raise InputError(
            "schedule {schedule!r} is for {got} ranks, but the pipeline has {expected}, those of its group or along 'pp' of its mesh",
            schedule=result.name,
            got=result.num_ranks,
            expected=ranks,
            remedy="give one for as many",
        )
    if result.slices != slices:
        raise InputError(
            "schedule {schedule!r} has {got} slices of each microbatch, but slices is {expected}",
            schedule=result.name,
            got=result.slices,
            expected=slices,
            remedy=f"give slices={result.slices}, or another schedule",
        )
    if result.num_microbatches != num_microbatches * slices:
        raise InputError(
            "schedule {schedule!r} has {got} microbatches, but num_microbatches is {expected}",
            schedule=result.name,
            got=result.whole_microbatches,
            expected=num_microbatches,
            remedy="give the name of a schedule, or a function (num_ranks, num_microbatches) -> Schedule, which works for any number",
        )
    return result


def _require_equal_slices(costs: Costs) -> None:
    """Raises `InputError` for a plan whose slices have different lengths, which pipelines cannot cut yet."""
    lengths = [piece.tokens for piece in costs.slices]
    if lengths and not isclose(min(lengths), max(lengths), rel_tol=1e-6):
        raise InputError(
            "pipelines cut a sequence into slices of equal length, and those of the plan have {got}",
            got=" and ".join(f"{length:.1%}" for length in (min(lengths), max(lengths))),
            remedy="plan with slices=N, or give the costs sliced(N)",
        )


def every_channel(compiled: Compiled) -> list[Channel]:
    """Returns the channels that any schedule on this placement may use, with the same division of the head."""
    placement = compiled.schedule.placement
    routes = tuple(range(len(placement.routes)))
    empty = Schedule("every route", placement, len(routes), ((),) * placement.num_ranks, routes if len(routes) > 1 else ())
    programs = (Compiled.from_schedule(one_by_one(empty)).program, compiled.program)
    return sorted({channel for program in programs for _, _, channel, _ in program.channels()})
