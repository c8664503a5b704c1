"""What stops one rank of a pipeline stops all of them, with one error: the object of a pipeline for everything about failures."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from math import inf
from typing import NoReturn

from zerobubble.errors import InputError, PipelineError
from zerobubble.runtime.failure import forked, termination
from zerobubble.runtime.failure.activity import Activity, PlaysActions, words_of
from zerobubble.runtime.failure.agent import end_with_agent
from zerobubble.runtime.failure.blame import CLOSING, report_told_to_end, report_without_agent
from zerobubble.runtime.failure.elastic import forget_error_file, write_error_file
from zerobubble.runtime.failure.error_text import describe
from zerobubble.runtime.failure.frame import AgreedError, Frame
from zerobubble.runtime.failure.pipelines import Inside, enlist, status_beside
from zerobubble.runtime.failure.processes import ProcessWatch
from zerobubble.runtime.failure.report import FailureReport, HoldsMicrobatches, RankStatus, describe_error, error_of, forget_locals
from zerobubble.runtime.failure.turn import Turn
from zerobubble.runtime.failure.watch import FailureWatch
from zerobubble.runtime.transport.contact import ELSEWHERE, NOBODY, LostContactError
from zerobubble.runtime.transport.rank_process import RankProcess
from zerobubble.runtime.transport.transport import Transport

NEVER_OPENED = "the pipeline was never opened"
FORKED = "the pipeline belongs to the process from which this one was forked"
OUTSIDE = RankStatus("outside the pipeline, in code of its own")


class FailureGuard:
    """Runs what a rank does together with others, so that its failure is told to all of them, and theirs here.

    `activity` is what this rank does now, None in code of the user's own. `closed` says, once the connections are closed, why, and `report`
    has the failure that closed them, if one did. `num_calls`
    counts the calls that play steps, the same on every rank, and by its `turn` one thread at a time makes them. For reports, `schedule` is
    the name of what is played first, and `stages` are those of the program that is played now. A `release` that was set with `on_closing`
    is called once before the connections close.
    """

    def __init__(self, transport: Transport) -> None:
        self.activity: Activity | None = None
        self.closed: str | None = None
        self.report: FailureReport | None = None
        self.entered = time.monotonic()
        self.num_calls = 0
        self.turn = Turn()
        self.schedule = ""
        self._gave_up: Inside | None = None
        self.stages: Mapping[int, HoldsMicrobatches] = {}
        self._transport = transport
        self._number = enlist(self)
        self._release: weakref.WeakMethod[Callable[[], None]] | None = None
        self._watch = FailureWatch(transport.group, self._status, transport.hang_up, transport.abort)
        self._processes: ProcessWatch | None = None
        with self.during("while meeting the other ranks"):
            forked.leave_in_children(self)
            termination.tell_before_the_end(self)
            end_with_agent()
            forget_error_file()

    def is_told(self, waited_s: float) -> bool:
        """Whether this rank, which has waited for so many seconds since it asked last, has heard that one of them failed."""
        self._watch.count(waited_s)
        return self._watch.heard is not None

    @property
    def is_aborted(self) -> bool:
        """Whether what the device does was ended because a rank has failed: tensors may hold what was never sent."""
        return self._transport.is_aborted

    def on_closing(self, release: Callable[[], None]) -> None:
        """Call `release()`, a bound method that is held weakly, to give back what is held and drop whatever keeps connections open."""
        self._release = weakref.WeakMethod(release)

    def watch_processes(self, processes: Sequence[RankProcess]) -> None:
        """Hear at once when a process of these ends, which are those of ranks 0, 1, ..., even while its children keep connections open."""
        self._processes = ProcessWatch(processes, self._process_ended)

    def during(self, when: str) -> Frame:
        """Whatever stops this rank inside stops them all, and is told as what happened `when`, such as "while clipping gradients"."""
        return Frame(self, when)

    def during_call(self, when: str) -> Frame:
        """As `during`, for a call that plays steps: it is counted."""
        return Frame(self, when, counts=1)

    def during_step(self, player: PlaysActions) -> Frame:
        """As `during`, for a step: the error names the action in hand."""
        player.at = -1
        return Frame(self, player)

    @contextmanager
    def opening(self, when: str) -> Iterator[None]:
        """As `during`, while the pipeline is made: an `InputError` inside is raised on every rank alike, so each closes and raises it."""
        with self.during(when):
            try:
                yield
            except InputError as error:
                self.close_after(error, NEVER_OPENED)
                raise

    @contextmanager
    def alike(self) -> Iterator[None]:
        """An `InputError` inside is raised on every rank alike, or concerns no other: the pipeline stays open."""
        try:
            yield
        except InputError as error:
            raise AgreedError(error) from error

    def refuse_if_closed(self) -> None:
        """Raise `PipelineError` once the connections are closed."""
        if self.closed is not None:
            raise PipelineError(f"{self.closed}; make a new Pipeline to go on")

    def fail(self, error: BaseException, when: str, action: str = "") -> NoReturn:
        """Tell all ranks of `error`, or find out who is lost; close, and raise what all of them raise.

        Whatever goes wrong meanwhile, connections are closed and `error` is told: this needs no new thread, no store that answers, no
        text that can be made and no hook that can be closed.
        """
        is_lost = isinstance(error, LostContactError)
        try:
            report = self._tell(error, when, action)
        except BaseException:  # such as a second Ctrl-C
            self._transport.abort()
            self.close(f"rank {self._transport.rank} failed {when}")
            raise
        self._transport.abort()
        self._transport.waiting.forget()
        if report.rank == self._transport.rank:
            write_error_file(report.message, error)
        forget_locals(error)
        ends_process = not isinstance(error, Exception)  # KeyboardInterrupt, SystemExit: this process was told to end
        raised = error if ends_process else error_of(report)
        self.close_after(raised, report.message, report)
        if ends_process:
            raise raised
        raise raised from (None if is_lost else error)

    def _tell(self, error: BaseException, when: str, action: str) -> FailureReport:
        """What all ranks tell of `error`, which may be their error, too."""
        if isinstance(error, LostContactError):
            status = RankStatus(error.what, error.peer, error.reason, action, self._name, among=error.among, in_call=self._in_call)
            self._gave_up = Inside(time.monotonic(), status)
            return self._watch.find_culprit(status)
        rank = self._transport.rank
        return self._watch.publish(FailureReport(rank, action, f"rank {rank} failed {when}: {describe_error(error, self.stages)}"))

    def close_after(self, error: BaseException, reason: str, report: FailureReport | None = None) -> None:
        """Close because of `error`. What goes wrong in closing does not hide it, and is told as a note of it."""
        try:
            self.close(reason, report)
        except Exception as another:  # noqa: BLE001 - hooks may raise anything
            error.add_note(f"closing the pipeline failed, too: {describe(another)}")

    def close(self, reason: str, report: FailureReport | None = None) -> None:
        """Close every connection; with the `report` of a failure, wait a few seconds for the others to read it.

        All of this is done, whatever a part of it raises; then it is raised.
        """
        self.closed, self.report = reason, report or self.report
        release = self._release() if self._release is not None else None
        with ExitStack() as rest:
            rest.callback(self._watch.close, report)
            rest.callback(self._transport.close)
            if self._processes is not None:
                rest.callback(self._processes.close)
            rest.callback(termination.forget, self)
            if release is not None:
                release()

    def abandon(self) -> None:
        """This process was forked from the one that has the pipeline: close its descriptors, and leave all else to the parent."""
        self.closed = FORKED
        if self._processes is not None:
            self._processes.abandon()
        self._watch.abandon()
        self._transport.abandon()

    def _process_ended(self, rank: int) -> None:
        """Tell all ranks, and wake those here that wait for `rank`. This runs in a thread that watches processes."""
        if self.closed is None and self._watch.tell_of_end(rank, self._status()):
            self._transport.hang_up(rank)

    def tell_of_end_of_agent(self) -> None:
        """Tell all ranks that this process ends with the agent that started it. This runs in a thread that watches the agent."""
        if self.closed is None:
            self._watch.publish(report_without_agent(self._transport.rank, self._status()))

    def tell_of_own_end(self) -> None:
        """Tell all ranks that this process ends by SIGTERM, and hang up. This runs in a thread that waits for the signal.

        The store ends with the process that holds it, which therefore stays for a few seconds until the others have read what it tells.
        """
        if self.closed is not None:
            return
        rank = self._transport.rank
        told = self._watch.publish(report_told_to_end(rank, self._status()))
        if told.rank == rank:
            write_error_file(told.message)
        for other in range(self._transport.size):
            self._transport.hang_up(other)
        if rank == self._transport.group.store_host:
            self._watch.stay(told)

    @property
    def _name(self) -> str:
        """This pipeline among those of this process; other processes may count otherwise."""
        return f"its pipeline {self._number} ({self.schedule!r})"

    @property
    def _in_call(self) -> float:
        return time.monotonic() - self.entered

    def inside(self) -> Inside | None:
        """What this rank does in a call of this pipeline, or has given up so lately that others may ask; None between two calls."""
        if self._gave_up is not None:
            return self._gave_up if time.monotonic() < self._gave_up.until + self._transport.group.timing.answer_s else None
        # Read once: this runs in the listener's thread while the rank goes on.
        activity, waits_for = self.activity, self._transport.waiting.now
        if activity is None:
            return None
        if waits_for is not None:
            peer, doing, among = waits_for
            return Inside(inf, RankStatus(doing, peer, pipeline=self._name, among=among, in_call=self._in_call))
        when, action = words_of(activity)
        return Inside(inf, RankStatus(when.removeprefix("while "), op=action, pipeline=self._name, in_call=self._in_call))

    def _status(self) -> RankStatus:
        """What this rank answers when another waits for it in vain."""
        if self.closed is not None:
            return CLOSING
        inside = self.inside()
        return self._beside() or OUTSIDE if inside is None else inside.status

    def _beside(self) -> RankStatus | None:
        """What this rank does in a call of another pipeline, None where it is in none."""
        status = status_beside(self)
        if status is None:
            return None
        if status.peer == NOBODY:
            return RankStatus(f"{status.doing} in {status.pipeline}, another one,")
        return status._replace(peer=ELSEWHERE)
