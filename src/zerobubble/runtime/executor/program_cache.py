"""The cache of compiled programs: one schedule for each number of microbatches, lowered and made ready when it is first asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

from zerobubble.arguments import WHOLE, Wanted, require
from zerobubble.costs import Costs
from zerobubble.errors import InputError
from zerobubble.garbage_pause import garbage_collection_paused
from zerobubble.ir import Schedule
from zerobubble.lowering import Compiled, prefetch_depth
from zerobubble.lowering.compiled import lowered, sound
from zerobubble.lowering.rollback import RollbackPoint, with_rollback_points
from zerobubble.offload import RankOffloads
from zerobubble.program import Channel, Program
from zerobubble.runtime.executor.endings import RowListener
from zerobubble.runtime.executor.executor import Executor
from zerobubble.runtime.executor.offloading import Offloads
from zerobubble.runtime.executor.overlapped import Overlap
from zerobubble.runtime.executor.pace import Pace
from zerobubble.runtime.mailbox.handshake import StepHandshake
from zerobubble.runtime.mailbox.written_passes import read_passes
from zerobubble.runtime.measure.profile import one_by_one
from zerobubble.runtime.stage.rank_stages import Stages
from zerobubble.runtime.stage.stage import Stage
from zerobubble.runtime.transport.peers import Peers
from zerobubble.schedules import make

MOST_KEPT = 16
"""Numbers of microbatches whose programs are kept; the one not played for longest is compiled anew when it comes back."""

MOST_PLANNED = 8
"""Schedules planned for the microbatches of one step that are kept ready, in case such a step comes back."""

MakeSchedule = Callable[[int, int], Schedule]
"""A function `(num_ranks, num_microbatches) -> Schedule`."""
_MOST = 10_000
MICROBATCHES = Wanted(f"a whole number of microbatches up to {_MOST}", lambda given: WHOLE.accepts(given) and given <= _MOST)
"""A schedule of more would be written, checked and compiled for longer than anyone waits."""


class ReadyProgram:
    """A compiled schedule made ready: its stages, and the executor that trains, None if it has no backward passes.

    `make_infer` makes the executor that evaluates, which opens its steps with `opening`. It is called for the first evaluation: most
    pipelines have none.
    """

    def __init__(
        self,
        compiled: Compiled,
        stages: dict[int, Stage],
        train: Executor | None,
        opening: StepHandshake,
        make_infer: Callable[[], Executor],
    ) -> None:
        self.compiled = compiled
        self.stages = stages
        self.train = train
        self.opening = opening
        self._make_infer = make_infer

    @property
    def schedule(self) -> Schedule:
        """What it plays."""
        return self.compiled.schedule

    @cached_property
    def infer(self) -> Executor:
        """The executor of the forwards alone, which saves nothing."""
        return self._make_infer()

    @property
    def executor(self) -> Executor:
        """The one that trains, or else the one that evaluates."""
        return self.train or self.infer

    def training_with(self, recording: bool) -> Executor:
        """The executor that trains, there being one, with messages timed or not."""
        assert self.train is not None
        self.train.recording = recording
        return self.train

    def close(self) -> None:
        """Give back all that its steps have left."""
        self.opening.clear()
        for executor in (self.train, vars(self).get("infer")):
            if executor is not None:
                executor.close()


class ProgramCache:
    """The compiled programs of one pipeline, not more than `MOST_KEPT`; `now` is the one that is played.

    Every rank chooses the same numbers in the same order, so that all keep the same programs.

    `given` is what the user asked to play, and makes the schedules for further numbers of microbatches. `listener` is told in training
    which step is next and when gradients are complete. Not more than `gathered_bytes` of weights that lie in shards are gathered at a time.
    `offloads` are for one schedule, and no other trains with them.
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
        """Play this schedule and nothing else from here on.

        Raises `InputError` for another one than the offloads are for.
        """
        schedule = compiled.schedule
        if self._offloads is not None and schedule != self._offloads.schedule:
            name = self._offloads.schedule.name
            raise InputError(f"this pipeline moves what waits to the host as fits {name!r}, and cannot change to {schedule.name!r}")
        self._played = compiled
        self._close_all()
        self._keep(self._make_ready(compiled))

    def choose(self, num_microbatches: int) -> ReadyProgram:
        """The program for this number of microbatches, played from here on; the step's handshake compares it among the ranks.

        Raises `InputError` where there is no such schedule, or it places the stages otherwise.
        """
        ready = self._ready.pop(num_microbatches, None) or self._make_ready(self._compiled_for(num_microbatches))
        self._keep(ready)
        return ready

    def compile_ahead(self, played: Schedule, passes: tuple[int, ...]) -> None:
        """Compile what `planned` will be asked for where `played` is played; on a thread, alongside a step.

        Raises `ZeroBubbleError` for passes that no rank can run.
        """
        compiled = _unproven(played, passes, self._played.prefetch)
        self._with_rollback(sound(compiled.program))
        # A new dictionary, since a step may look into this one meanwhile: its own passes and those of the step after it are kept.
        self._ahead = dict([*self._ahead.items(), ((played.num_microbatches, passes), compiled)][-2:])

    def planned(self, passes: tuple[int, ...]) -> ReadyProgram:
        """The program for one step with these passes, as `write_passes` gives them, in the place of those that are played now.

        Only the rank that has chosen them proves the program sound, in `compile_ahead`: this rank makes the same one.
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
        """Play `ready` from here on, and close the one that was not for longest where there are too many."""
        self.now = self._ready[ready.schedule.num_microbatches] = ready
        if len(self._ready) > MOST_KEPT:
            self._ready.pop(next(iter(self._ready))).close()

    def _compiled_for(self, num_microbatches: int) -> Compiled:
        played = self._played.schedule
        if num_microbatches == played.num_microbatches:
            return self._played
        schedule = schedule_for(self._given, self._peers.size, num_microbatches)
        if schedule.placement != played.placement:
            raise InputError(
                f"schedule {schedule.name!r} places the stages otherwise for {num_microbatches} microbatches than for "
                f"{played.num_microbatches}: {schedule.placement} instead of {played.placement}"
            )
        if schedule.head_parts != played.head_parts:
            raise InputError(
                f"schedule {schedule.name!r} divides the head over the ranks of stages {list(schedule.head_parts)} for {num_microbatches} "
                f"microbatches, and over those of {list(played.head_parts)} for {played.num_microbatches}: divide it alike"
            )
        return Compiled.of(schedule, self._played.prefetch)

    def offloads_of(self, schedule: Schedule) -> Sequence[RankOffloads] | None:
        """What each rank moves to the host in `schedule`; None where nothing goes."""
        return self._offloads.ranks if self._offloads is not None and schedule == self._offloads.schedule else None

    def refuse_to_train(self, num_microbatches: int) -> None:
        """Raise `InputError` where the offloads are for another number of microbatches."""
        if self._offloads is not None and num_microbatches != self._offloads.schedule.num_microbatches:
            raise InputError(
                f"what this pipeline moves to the host is planned for {self._offloads.schedule.num_microbatches} microbatches, and a step "
                f"is to train with {num_microbatches}: leave num_microbatches out, or make a pipeline without offload"
            )

    def use_rollback_points(self) -> None:
        """From here on, compile every program so that its steps can start over at a rollback point."""
        if not self._has_rollback_points:
            self._has_rollback_points = True
            now = self.now.compiled
            self._close_all()
            self._keep(self._make_ready(now))

    @contextmanager
    def one_by_one(self, level: str | None = None, algorithm: int | None = None, in_one_piece: bool = False) -> Iterator[ReadyProgram]:
        """Inside, a program that takes microbatches one by one through the stages of `now`, for a profile.

        With a `level` of recomputation all stages have it. A divided head is divided by `algorithm`, by default as in `now`. With
        `in_one_piece` each backward is a BW. After an error the program is kept, for `close` to let go of what it has in flight.
        """
        schedule = one_by_one(self.now.schedule, computes_all_again=level is not None, algorithm=algorithm, in_one_piece=in_one_piece)
        stages = self._stages.of(schedule, level)
        handshake = StepHandshake(schedule, self._peers)
        if self._trial is not None:  # of a profile that was refused
            self._trial.close()
        compiled = Compiled.of(schedule)
        trial = Executor(compiled.program, stages, self._peers, handshake, self._pace, gathered_bytes=self._gathered_bytes)
        self._trial = trial
        yield ReadyProgram(compiled, stages, trial, handshake, lambda: trial)
        trial.close()
        self._trial = None

    def close(self) -> None:
        """Give back all that is held for steps, and let go of the messages that keep connections open."""
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
        """The program made ready; where it is to be `like` another for one step, with its stages, and without proof that it is sound."""
        schedule = compiled.schedule
        stages = self._stages.of(schedule) if like is None else like.stages
        forward_only = schedule.forward_only()
        opening = StepHandshake(forward_only, self._peers) if like is None else like.opening
        make_infer = partial(self._infer, forward_only, stages, opening)
        if schedule.is_forward_only:
            return ReadyProgram(compiled, stages, None, opening, make_infer)
        program, rollback = self._with_rollback(compiled.program, proven=like is None)
        handshake = StepHandshake(schedule, self._peers)
        offloads = self._offloads if self.offloads_of(schedule) is not None else None
        train = Executor(
            program, stages, self._peers, handshake, self._pace, self._overlap, rollback, self._listener, self._gathered_bytes, offloads
        )
        return ReadyProgram(compiled, stages, train, opening, make_infer)

    def _infer(self, schedule: Schedule, stages: dict[int, Stage], opening: StepHandshake) -> Executor:
        return Executor(Compiled.of(schedule).program, stages, self._peers, opening, None, gathered_bytes=self._gathered_bytes)

    def _with_rollback(self, program: Program, *, proven: bool = True) -> tuple[Program, RollbackPoint | None]:
        """The program that trains, and where this rank's row can start over if it has to be able to."""
        if not self._has_rollback_points:
            return program, None
        program, points = with_rollback_points(program)
        return sound(program) if proven else program, points[self._peers.rank]

    def program_for(self, schedule: Schedule, costs: Costs) -> Program:
        """What training runs after `play(compiled_for(schedule, costs))`."""
        return self._with_rollback(compiled_for(schedule, costs).program)[0]


@garbage_collection_paused()
def _unproven(played: Schedule, passes: tuple[int, ...], prefetch: int) -> Compiled:
    """These passes compiled in the place of those of `played`; that the program is sound is not proven."""
    schedule = read_passes(f"{played.name}, planned", played, passes)
    return Compiled(schedule, *lowered(schedule, prefetch), prefetch)


def compiled_for(schedule: Schedule, costs: Costs) -> Compiled:
    """`schedule` compiled for what its passes cost: with receives posted one message earlier than its costs ask for."""
    return Compiled.of(schedule, 1 + prefetch_depth(schedule, costs))


def schedule_for(given: str | Schedule | MakeSchedule, ranks: int, num_microbatches: int) -> Schedule:
    """The schedule for `num_microbatches`; raises `InputError` where there is none or it does not fit."""
    require("num_microbatches", num_microbatches, MICROBATCHES)
    if isinstance(given, str):
        made: Any = make(given, ranks, num_microbatches)
    else:
        made = given if isinstance(given, Schedule) else given(ranks, num_microbatches)
    if not isinstance(made, Schedule):
        raise InputError(f"schedule must be a name, a Schedule or a function that gives one, got {type(made).__name__}")
    if made.num_ranks != ranks:
        raise InputError(
            f"schedule {made.name!r} is for {made.num_ranks} ranks, the pipeline has {ranks}, those of its process group or along 'pp' of "
            "its mesh: give one for as many"
        )
    if made.num_microbatches != num_microbatches:
        raise InputError(
            f"schedule {made.name!r} has {made.num_microbatches} microbatches, num_microbatches is {num_microbatches}: "
            "give a schedule's name, or a function (num_ranks, num_microbatches) -> Schedule, to have one for any number"
        )
    return made


def every_channel(compiled: Compiled) -> list[Channel]:
    """The channels that any schedule of this one's placement may use, where the head is divided as in this one."""
    placement = compiled.schedule.placement
    routes = tuple(range(len(placement.routes)))
    empty = Schedule("every route", placement, len(routes), ((),) * placement.num_ranks, routes if len(routes) > 1 else ())
    programs = (Compiled.of(one_by_one(empty)).program, compiled.program)
    return sorted({channel for program in programs for _, _, channel, _ in program.channels()})
