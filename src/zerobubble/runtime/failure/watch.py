"""Makes one rank's failure every rank's error: the first rank to fail publishes a report and closes its connections, which wakes others.

A rank that is blocked on a message wakes when the other end closes, or after its timeout. It reads the report and closes its connections in
turn, and so the failure spreads through the group. After a kill there is no report. The rank that lost contact then raises an alarm. A
thread on every rank polls for it, even while the rank computes or waits, and publishes what the rank does. `diagnose` finds the culprit
from what all ranks publish.

The torch.distributed store holds the report. Three rules keep all ranks on the same one:

- The first report wins (`compare_set`). Each rank raises the report in the store, not its own finding.
- A report is written before the alarm: a listener that sees the alarm may look for the report at once.
- The listener caches the report, since the process that hosts the store may end before a busy rank reads it.

Only if the store is gone or silent does a rank report what it knows by itself.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from zerobubble.error_reports.text import text_of
from zerobubble.runtime.failure.blame import CLOSING, closing_after, diagnose, lost_contact, process_end_report, store_host_end_report
from zerobubble.runtime.failure.report import FailureReport, RankStatus, error_of
from zerobubble.runtime.failure.store_thread import StoreThread
from zerobubble.runtime.transport.contact import host_is_silent, stalled
from zerobubble.runtime.transport.endpoint import Group
from zerobubble.runtime.transport.measured_store import MeasuredStore
from zerobubble.runtime.transport.stalls import StallMonitor

_POLL_S = 0.02
_POLLS_FOR_END = 50
"""The end of a process is detected after the end of its connections, within this number of pauses of `_POLL_S`. Pauses are counted, not
timed: if this process was starved meanwhile, its other threads, which detect the end, need a chance to run."""
_REPORT, _ALARM = "report", "alarm"
"""Keys of the store: the report, and the rank that was first to publish one or to ask the others for their status."""

Answer = TypeVar("Answer")


class FailureWatch:
    """Publishes and receives the failure reports of one pipeline for this rank.

    `status()` returns what this rank does. When a report arrives, `disconnect(rank)` closes the connections to a rank that no longer
    answers, and `abort()` ends what the device does. They are bound methods, held weakly. Only the constructor raises, and only it starts a
    thread.
    """

    def __init__(
        self, group: Group, status: Callable[[], RankStatus], disconnect: Callable[[int], None], abort: Callable[[], None]
    ) -> None:
        self._group = group
        self._ended: list[int] = []
        self._kills = memory_kills()
        self._listener = _Listener(group, weakref.WeakMethod(status), weakref.WeakMethod(disconnect), weakref.WeakMethod(abort))
        try:
            listener, timing = self._listener, group.timing
            self._thread = StoreThread(group.store, listener.stalls, timing.listen_s, listener.poll, listener.leave, timing.answer_s)
        except RuntimeError as error:
            failed = FailureReport(group.rank, "", f"rank {group.rank} failed while meeting the other ranks: RuntimeError: {error}")
            raise error_of(_publish(group.store, group.rank, failed), group.rank) from error

    @property
    def received(self) -> FailureReport | None:
        """The report, once this rank has received it."""
        return self._listener.received

    def count(self, seconds: float) -> None:
        """Counts `seconds` that this rank has waited, in which the store may have been silent."""
        self._thread.count(seconds)

    def publish(self, report: FailureReport) -> FailureReport:
        """Publishes a report unless one exists already, and returns the one that exists. Without the store, returns `report` itself."""
        if self._listener.received is None:
            first = self._ask(lambda: _publish(self._thread.store, self._group.rank, report))
            self._listener.received = first or self._listener.received or report
        return self._listener.received

    def find_culprit(self, status: RankStatus) -> FailureReport:
        """Returns the report that exists, or the one that the ranks find together.

        `status` says with which rank this one lost contact, and how.
        """
        lost = lost_contact(self._group.rank, status)
        # Ask before and after: a silent store may take so long to give up that a stall before it no longer counts as recent.
        before = self._own_stall(lost)
        report = self._listener.received or self._ask(lambda: self._diagnose_together(status))
        stall = before or self._own_stall(lost)
        return report or self._received_from_process_watch() or stall or self._report_without_store(status)

    def _received_from_process_watch(self) -> FailureReport | None:
        """Returns the report, after a short wait if the store is gone: another thread detects the end of the store's host."""
        for _ in range(_POLLS_FOR_END if self._group.store_host is not None else 0):
            if self._listener.received is not None:
                break
            time.sleep(_POLL_S)
        return self._listener.received

    def report_process_end(self, ended: int, status: RankStatus) -> bool:
        """Publishes that the process of rank `ended` has ended while this rank did what `status` says.

        Returns False if that rank had left the pipeline normally. If the store ended with it, all ranks that see this find the same report
        by themselves.
        """
        if ended == self._group.store_host:
            stall = self._own_stall(f"the process of rank {ended}, which hosted the torch.distributed store, had ended")
            self._listener.received = self._listener.received or stall or store_host_end_report(ended, memory_kills() - self._kills)
            self._thread.give_up()
            return True
        self._ended.append(ended)
        return self._ask(lambda: self._report_end(status) is not None) is not False

    def _report_end(self, status: RankStatus) -> FailureReport | None:
        """Returns the report if a process has ended without leaving normally. In that case, waiting for answers is pointless.

        A process may have ended because this one stalled. In that case, it published its own report and left normally. But if this process
        hosts the store, the other process could do neither. So a stall of the host is checked first.
        """
        rank, store = self._group.rank, self._thread.store
        ended = [other for other in self._ended if not store.check([_left_key(other)])]
        if not ended:
            return None
        report = process_end_report(ended, rank, status, memory_kills() - self._kills)
        stall = self._own_stall(report.message, self._group.timing.silence_s) if rank == self._group.store_host else None
        self._listener.received = _publish(store, rank, stall or report)
        return self._listener.received

    def detach(self) -> None:
        """Leaves everything to the parent: this is a forked child."""
        self._thread.end.detach()

    def close(self, report: FailureReport | None = None) -> None:
        """Stops listening. After a failure, waits for the readers first: this process may end next, and the store with it."""
        if report is not None:
            self.wait_for_readers(report)
        self._thread.end()

    def leave_after(self, error: BaseException) -> None:
        """Notes the `error` because of which this rank leaves, for ranks that still wait for it."""
        self._listener.left_as = closing_after(error)

    def wait_for_readers(self, report: FailureReport) -> None:
        """Waits a few seconds until every rank except the absent ones has read the report or has left."""
        self._ask(lambda: self._wait_for_readers(report.absent))

    def _ask(self, call: Callable[[], Answer]) -> Answer | None:
        return self._thread.ask(call, self._group.timing.silence_s)

    def _diagnose_together(self, status: RankStatus) -> FailureReport:
        """Returns the report that the first rank to raise the alarm makes of all statuses."""
        rank, ranks, store = self._group.rank, self._group.ranks, self._thread.store
        # The own status comes before the alarm: any rank that sees the alarm waits for all statuses.
        store.set(_status_key(rank), _write_status(status._replace(stalled_s=self._listener.stalls.longest(self._group.timing.answer_s))))
        first = int(store.compare_set(_ALARM, "", str(rank)))
        # Other ranks wait longer than the first, which may end just before it would publish.
        end = time.monotonic() + self._group.timing.answer_s * (1 if first == rank else 1.5)
        absent = set(ranks) - {rank}
        while not store.check([_REPORT]):
            if self._ended and (report := self._report_end(status)) is not None:
                return report
            absent = {other for other in absent if not store.check([_status_key(other)])}
            if time.monotonic() > end or (not absent and first == rank):
                present = [other for other in ranks if other not in absent]
                statuses = {other: _read_status(store.get(_status_key(other))) for other in present}
                # While the host of the store stalled, the others could exchange nothing: their statuses are worthless.
                stall = self._own_stall(lost_contact(rank, status)) if rank == self._group.store_host else None
                return _publish(store, rank, stall or diagnose(statuses, ranks, rank))
            time.sleep(_POLL_S)
        return _read_report(store.get(_REPORT))

    def _own_stall(self, finding: str, least_s: float | None = None) -> FailureReport | None:
        """Returns a report that this process has recently stalled, followed by the `finding`; None if the stall was short.

        A stall counts from `least_s` seconds, by default from those that the others wait for an answer.
        """
        recent_s = self._group.timing.answer_s
        seconds = self._listener.stalls.longest(recent_s)
        if seconds < (recent_s if least_s is None else least_s):
            return None
        rank = self._group.rank
        return FailureReport(rank, "", f"{stalled(rank, seconds)}; then {finding}")

    def _report_without_store(self, status: RankStatus) -> FailureReport:
        host = self._group.store_host
        if host is not None:
            return FailureReport(host, "", host_is_silent(host))
        lost = lost_contact(self._group.rank, status)
        message = f"{lost}, and the torch.distributed store does not answer: see the log of the process that hosts it"
        return FailureReport(status.peer, "", message)

    def _wait_for_readers(self, absent: tuple[int, ...]) -> bool:
        store = self._thread.store
        store.set(_left_key(self._group.rank), "1")
        end = time.monotonic() + self._group.timing.stay_s
        while time.monotonic() < end:
            gone = {*absent, *self._ended}  # more may end meanwhile
            if store.check([_left_key(rank) for rank in self._group.ranks if rank not in gone]):
                break
            time.sleep(_POLL_S)
        return True


class _Listener:
    """Answers alarms while the rank is busy.

    `received` is the report, once it has arrived. `left_as` is the status of the rank once it has left, if that is known.

    It runs in the thread of the store and holds the pipeline weakly, so a thread that is blocked keeps no pipeline alive.
    """

    def __init__(
        self,
        group: Group,
        status: weakref.WeakMethod[Callable[[], RankStatus]],
        disconnect: weakref.WeakMethod[Callable[[int], None]],
        abort: weakref.WeakMethod[Callable[[], None]],
    ) -> None:
        self.received: FailureReport | None = None
        self.left_as: RankStatus | None = None
        self.stalls = group.stalls or StallMonitor()
        self._rank = group.rank
        self._recent_s = group.timing.answer_s
        self._status = status
        self._disconnect = disconnect
        self._abort = abort

    def poll(self, store: MeasuredStore) -> bool:
        """Answers an alarm and receives the report, if they exist. Returns True once it has the report: nothing is left to poll for."""
        if not store.check([_ALARM]):
            return False
        # The first status counts: what the rank did when the alarm was raised, not what it does after it was woken.
        store.compare_set(_status_key(self._rank), "", _write_status(self._status_now()))
        if not store.check([_REPORT]):
            return False
        # Keep the report before saying so: the host of the store may end as soon as all have said so.
        self.received = _read_report(store.get(_REPORT))
        store.set(_left_key(self._rank), "1")
        self._wake(self.received.absent)
        return True

    def leave(self, store: MeasuredStore) -> None:
        """Publishes that this rank's pipeline is closed and that no rank need wait for it."""
        store.compare_set(_status_key(self._rank), "", _write_status(self.left_as or closing_after(_uncaught_error())))
        store.set(_left_key(self._rank), "1")

    def _wake(self, absent: tuple[int, ...]) -> None:
        """Wakes this rank if it waits for its device or for an absent rank, whose connections child processes may keep open."""
        abort = self._abort()
        if abort is not None:
            abort()
        disconnect = self._disconnect()
        if disconnect is not None:
            for rank in absent:
                disconnect(rank)

    def _status_now(self) -> RankStatus:
        current = self._status()
        status = self.left_as or (current() if current is not None else CLOSING)
        return status._replace(stalled_s=self.stalls.longest(self._recent_s))


def _uncaught_error() -> BaseException | None:
    """Returns the error with which this process ends; None while it runs, and after a normal end."""
    return None if threading.main_thread().is_alive() else getattr(sys, "last_value", None)


def _publish(store: Any, rank: int, report: FailureReport) -> FailureReport:
    """Publishes a report and returns the first one that any rank has published. The alarm makes every listener read it."""
    first: bytes = store.compare_set(_REPORT, "", json.dumps(report))
    store.compare_set(_ALARM, "", str(rank))
    return _read_report(first)


def _status_key(rank: int) -> str:
    """The key of a rank's status."""
    return f"status/{rank}"


def _left_key(rank: int) -> str:
    """The key that a rank sets when it needs the store no more."""
    return f"left/{rank}"


def _write_status(status: RankStatus) -> str:
    return json.dumps(status._replace(doing=text_of(status.doing), reason=text_of(status.reason)))


def _read_status(text: bytes) -> RankStatus:
    status = RankStatus(*json.loads(text))
    return status._replace(among=tuple(status.among))


def _read_report(text: bytes) -> FailureReport:
    rank, op, message, absent = json.loads(text)
    return FailureReport(rank, op, message, tuple(absent))


_COUNTERS = Path("/proc/vmstat")


def memory_kills() -> int:
    """Returns how many processes the OOM killer has ended on this machine since it booted; 0 if the kernel does not count them."""
    try:
        counters = dict(line.split() for line in _COUNTERS.read_text().splitlines())
        return int(counters.get("oom_kill", 0))
    except (OSError, ValueError):
        return 0
