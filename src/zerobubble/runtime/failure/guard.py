"""Stops all ranks of a pipeline with one error if one of them fails. `FailureGuard` is the object of a pipeline for all failures.

See the package for the life of a pipeline, and for the order of the steps in `fail` and `close`. Methods marked as running in another
thread must not wait for this rank's own thread: it may be blocked on a message, and they are what unblocks it.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from math import inf
from typing import NamedTuple, NoReturn, Protocol
from weakref import WeakValueDictionary

from zerobubble.error_reports.error_file import forget_error_file, write_error_file, write_error_file_of_other
from zerobubble.error_reports.text import describe
from zerobubble.error_reports.uncaught import show_uncaught, write_report
from zerobubble.error_reports.user_code import begin_at_user_code, calling_place, user_place
from zerobubble.errors import InputError, PipelineError
from zerobubble.runtime.failure import forked, termination
from zerobubble.runtime.failure.blame import CLOSING, OUTSIDE, agent_end_report, sigterm_report
from zerobubble.runtime.failure.context import Activity, AgreedError, CallLock, FailureContext, PlaysActions, words_of
from zerobubble.runtime.failure.processes import ProcessWatch
from zerobubble.runtime.failure.report import FailureReport, HoldsMicrobatches, RankStatus, describe_error, error_of, forget_locals
from zerobubble.runtime.failure.torchrun import end_with_agent
from zerobubble.runtime.failure.watch import FailureWatch
from zerobubble.runtime.transport.contact import ELSEWHERE, NOBODY, LostContactError
from zerobubble.runtime.transport.rank_process import RankProcess
from zerobubble.runtime.transport.transport import Transport

CLOSED = "the pipeline is closed"
"""Why connections are closed after `Pipeline.close`."""
GO_ON = "make a new Pipeline to go on"
NEVER_OPENED = "the pipeline was never opened"
FORKED = "the pipeline belongs to the process from which this one was forked"


class FailureGuard:
    """Guards the calls in which a rank communicates: its failure is reported to all ranks, and a failure of another rank ends its calls.

    Attributes:
        activity: What this rank does now; None in user code.
        outermost: The outermost activity of the current or last call.
        closed: Why the connections are closed; None while they are open.
        report: The failure that closed them, if one did.
        entered: When the outermost call was entered, in seconds of `time.monotonic`.
        num_calls: The number of calls that play steps, the same on every rank.
        call_lock: Admits one thread at a time.
        schedule: The name of the first schedule, for reports.
        stages: The stages of the current program, for reports.
    """

    def __init__(self, transport: Transport) -> None:
        self.activity: Activity | None = None
        self.outermost: Activity | None = None
        self.closed: str | None = None
        self.report: FailureReport | None = None
        self.entered = time.monotonic()
        self.num_calls = 0
        self.call_lock = CallLock()
        self.schedule = ""
        self.stages: Mapping[int, HoldsMicrobatches] = {}
        self._timed_out: CallStatus | None = None
        self._transport = transport
        self._number = register_pipeline(self)
        self._release: weakref.WeakMethod[Callable[[], None]] | None = None
        self._watch = FailureWatch(transport.group, self._status, transport.disconnect, transport.abort)
        self._processes: ProcessWatch | None = None
        self._error_files: Mapping[int, str] = {}
        with self.during("while meeting the other ranks"):
            # Before any connection opens: from here on a fork, a signal or the end of the agent finds this pipeline.
            forked.detach_in_children(self)
            termination.report_on_sigterm(self)
            end_with_agent()
            forget_error_file()
            show_uncaught()

    def is_failure_reported(self, waited_s: float) -> bool:
        """Returns whether a failure has been reported. `waited_s` are the seconds that this rank has waited since its last call."""
        self._watch.count(waited_s)
        return self._watch.received is not None

    @property
    def is_aborted(self) -> bool:
        """Whether the work of the device was aborted because a rank has failed: tensors may hold data that was never sent."""
        return self._transport.is_aborted

    @property
    def failure(self) -> PipelineError | None:
        """The error that this rank raised for the failure that closed the pipeline, if one did."""
        return None if self.report is None else error_of(self.report, self._transport.rank)

    def on_closing(self, release: Callable[[], None]) -> None:
        """Calls `release()` once, before the connections close: it frees memory and drops what keeps them open.

        `release` is a bound method, held weakly.
        """
        self._release = weakref.WeakMethod(release)

    def watch_processes(self, processes: Sequence[RankProcess]) -> None:
        """Detects at once when one of the `processes` of all ranks ends, even while its children keep connections open."""
        by_rank = dict(zip(self._transport.ranks, processes, strict=True))
        here = by_rank[self._transport.rank].place
        self._error_files = {rank: process.error_file for rank, process in by_rank.items() if process.place == here}
        self._processes = ProcessWatch(by_rank, self._process_ended)

    def during(self, when: str) -> FailureContext:
        """Returns a context for one activity: an error inside stops all ranks, and names `when`, such as "while clipping gradients"."""
        return FailureContext(self, when)

    def during_call(self, when: str) -> FailureContext:
        """Like `during`, for a call that plays steps: it is counted."""
        return FailureContext(self, when, counts=1)

    def during_step(self, player: PlaysActions) -> FailureContext:
        """Like `during`, for a step: the error names the current action."""
        player.at = -1
        return FailureContext(self, player)

    @contextmanager
    def opening(self, when: str) -> Iterator[None]:
        """Like `during`, while the pipeline is created: every rank raises an `InputError` inside alike, so each closes and raises it."""
        with self.during(when):
            try:
                yield
            except InputError as error:
                self.close_after(error, NEVER_OPENED)
                raise

    @contextmanager
    def agreed_errors(self) -> Iterator[None]:
        """A context in which an `InputError` leaves the pipeline open: every rank raises it alike, or it concerns no other rank."""
        try:
            yield
        except InputError as error:
            raise AgreedError(error) from error

    def refuse_if_closed(self) -> None:
        """Raises `PipelineError` once the connections are closed."""
        if self.closed is not None:
            raise PipelineError(f"{self.closed}; {GO_ON}")

    def fail(self, error: BaseException, when: str, action: str = "") -> NoReturn:
        """Reports `error` to all ranks, or finds the rank that is lost; closes the pipeline, and raises what all of them raise.

        Closes the connections and raises `error`, regardless of further errors. It depends on nothing that may be broken: it starts no
        thread, needs no answer from the store, and tolerates a failing error text or hook.
        """
        is_lost = isinstance(error, LostContactError)
        try:
            # Publish before anything closes: a peer that loses contact must find this report, or it would blame this rank's silence.
            report = self._report(error, when, action)
        except BaseException:  # such as a second Ctrl-C
            self._transport.abort()
            self.close(f"rank {self._transport.rank} failed {when}")
            raise
        # Abort before closing: freeing stages may synchronize with a device that waits for a rank that is gone.
        self._transport.abort()
        self._transport.waiting.forget()
        forget_locals(error)
        begin_at_user_code(error)  # after all frames have been cleared
        if report.rank == self._transport.rank:
            write_report(error, f"{report.message} ({user_place(error) or calling_place()})")
        else:
            self._write_for_absent(report)
        ends_process = not isinstance(error, Exception)  # KeyboardInterrupt, SystemExit: this process is to end
        raised = error if ends_process else error_of(report, self._transport.rank)
        self.close_after(raised, report.message, report)
        if ends_process:
            raise raised
        raise raised from (None if is_lost else error)

    def _report(self, error: BaseException, when: str, action: str) -> FailureReport:
        """Returns what all ranks raise for `error`: the first report of any rank, which may describe another error."""
        if isinstance(error, LostContactError):
            status = RankStatus(error.what, error.peer, error.reason, action, self._name, among=error.among, in_call=self._in_call)
            status = status._replace(call=self._method)
            self._timed_out = CallStatus(time.monotonic(), status)
            return self._watch.find_culprit(status)
        rank = self._transport.rank
        return self._watch.publish(FailureReport(rank, action, f"rank {rank} failed {when}: {describe_error(error, self.stages)}"))

    def report_error(self, error: BaseException, when: str) -> FailureReport:
        """Publishes an `error` of this rank's own code outside of calls, and returns the first report of any rank. Close afterwards."""
        return self._report(error, when, "")

    def close_after(self, error: BaseException, reason: str, report: FailureReport | None = None) -> None:
        """Closes the pipeline because of `error`. An error while closing does not replace it, but becomes a note of it."""
        self._watch.leave_after(error)
        try:
            self.close(reason, report)
        except Exception as another:  # noqa: BLE001 - hooks may raise anything
            error.add_note(f"closing the pipeline failed, too: {describe(another)}")

    def close(self, reason: str, report: FailureReport | None = None) -> None:
        """Closes every connection; with the `report` of a failure, waits a few seconds for the others to read it.

        Does all of this even if a part of it raises, and raises that afterwards.
        """
        self.closed, self.report = reason, report or self.report
        release = self._release() if self._release is not None else None
        # The stack runs from its end. Stages are released first, while the connections that they use are open. The watch closes last:
        # until the others have read the report, its thread answers them, and this process may host the store.
        with ExitStack() as rest:
            rest.callback(self._watch.close, report)
            rest.callback(self._transport.close)
            if self._processes is not None:
                rest.callback(self._processes.close)
            rest.callback(termination.forget, self)
            if release is not None:
                release()

    def detach(self) -> None:
        """Detaches a forked child from the pipeline: closes its descriptors and leaves everything else to the parent."""
        self.closed = FORKED
        if self._processes is not None:
            self._processes.detach()
        self._watch.detach()
        self._transport.detach()

    def _process_ended(self, rank: int) -> None:
        """Reports the end to all ranks, and wakes this one if it waits for `rank`. Runs in the thread that watches processes."""
        # Report first: `disconnect` wakes this rank's own thread, which then looks for the report.
        if self.closed is None and self._watch.report_process_end(rank, self._status()):
            if self._watch.received is not None:
                self._write_for_absent(self._watch.received)  # now: torchrun may end this process before it raises
            self._transport.disconnect(rank)

    def _write_for_absent(self, report: FailureReport) -> None:
        """Writes the error file of the rank to blame if it has ended or is frozen, and so cannot write it."""
        if report.rank in report.absent and report.rank != self._transport.rank:
            write_error_file_of_other(self._error_files.get(report.rank, ""), report.message)

    def report_agent_end(self) -> None:
        """Reports to all ranks that this process ends with the agent that started it. Runs in the thread that watches the agent."""
        if self.closed is None:
            self._watch.publish(agent_end_report(self._transport.rank, self._status()))

    def report_termination(self) -> None:
        """Reports to all ranks that this process ends by SIGTERM, and disconnects. Runs in the thread that waits for the signal.

        The store ends with the process that hosts it. That process therefore stays a few seconds, until the others have read the report.
        """
        if self.closed is not None:
            return
        rank = self._transport.rank
        report = self._watch.publish(sigterm_report(rank, self._status()))
        if report.rank == rank:
            write_error_file(report.message, report.message)
        for other in self._transport.ranks:
            self._transport.disconnect(other)
        if rank == self._transport.group.store_host:
            self._watch.wait_for_readers(report)

    @property
    def _name(self) -> str:
        """The name of this pipeline in this process; other processes may number theirs differently."""
        return f"its pipeline {self._number} ({self.schedule!r})"

    @property
    def _in_call(self) -> float:
        return time.monotonic() - self.entered

    @property
    def _method(self) -> str:
        """The method that this rank calls, such as `describe`; empty if its call has no name."""
        when = "" if self.outermost is None else words_of(self.outermost)[0]
        return when.removeprefix("in ") if when.startswith("in ") else ""

    def call_status(self) -> CallStatus | None:
        """Returns what this rank does in a call, or did when it timed out so recently that others may ask; None between two calls."""
        if self._timed_out is not None:
            return self._timed_out if time.monotonic() < self._timed_out.until + self._transport.group.timing.answer_s else None
        # Read each once: this runs in the listener's thread while the rank's own thread changes them.
        activity, waits_for = self.activity, self._transport.waiting.now
        if activity is None:
            return None
        if waits_for is not None:
            peer, doing, among = waits_for
            return CallStatus(inf, RankStatus(doing, peer, pipeline=self._name, among=among, in_call=self._in_call))
        when, action = words_of(activity)
        return CallStatus(inf, RankStatus(when.removeprefix("while "), op=action, pipeline=self._name, in_call=self._in_call))

    def _status(self) -> RankStatus:
        """Returns what this rank answers when another has waited for it too long."""
        if self.closed is not None:
            return CLOSING
        call = self.call_status()
        return self._status_elsewhere() or OUTSIDE if call is None else call.status

    def _status_elsewhere(self) -> RankStatus | None:
        """Returns what this rank does in a call of another pipeline, None if it is in none."""
        status = status_in_other_pipeline(self)
        if status is None:
            return None
        if status.peer == NOBODY:
            return RankStatus(f"{status.doing} in {status.pipeline}, another one,")
        return status._replace(peer=ELSEWHERE)


class CallStatus(NamedTuple):
    """The `status` of a rank in a call of a pipeline, and when it timed out there.

    `until` is a time of `time.monotonic`, inf while the call is running.
    """

    until: float
    status: RankStatus


class UsesPipeline(Protocol):
    """A rank's part in a pipeline; `call_lock` knows the thread that made its last call."""

    call_lock: CallLock

    def call_status(self) -> CallStatus | None:
        """Returns what the rank does in a call of this pipeline, or did when it timed out recently; None between two calls."""


_numbers = count(1)
_registered: WeakValueDictionary[int, UsesPipeline] = WeakValueDictionary()


def register_pipeline(user: UsesPipeline) -> int:
    """Registers a new pipeline of this process and returns its number, from 1 in the order of creation."""
    number = next(_numbers)
    _registered[number] = user
    return number


def status_in_other_pipeline(user: UsesPipeline) -> RankStatus | None:
    """Returns the status of the thread that last called this pipeline, if it is now in a call of another pipeline; otherwise None.

    If it timed out in several pipelines, returns its status in the last one: the rank has left the earlier ones.
    """
    users = [reference() for reference in _registered.valuerefs()]
    others = [other for other in users if other is not None and other is not user and other.call_lock.thread == user.call_lock.thread]
    calls = [call for other in others if (call := other.call_status()) is not None]
    return max(calls, key=lambda call: call.until).status if calls else None
