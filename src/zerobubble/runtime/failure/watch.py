"""One rank's failure becomes every rank's error: the first to fail publishes a report and closes its connections, which wakes the others.

A rank that is blocked on a message is woken when the other end closes, or gives up after its timeout; it reads the report, closes in turn,
and so on through the group. Where there is no report, as after a kill, the rank that lost contact raises an alarm. On every rank a thread
listens for it, even while the rank computes or waits, and publishes what the rank does; `diagnose` finds the culprit from what all publish.

Reports are kept in the store of torch.distributed, and the first is everyone's: the thread keeps it for a rank that is too busy to read it
before the process with the store ends. Only where the store is gone or silent does a rank report what it knows by itself.
"""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from zerobubble.runtime.failure.blame import CLOSING, diagnose, lost_contact, report_ended, report_ended_with_store
from zerobubble.runtime.failure.error_text import text_of
from zerobubble.runtime.failure.memory_kills import memory_kills
from zerobubble.runtime.failure.report import FailureReport, RankStatus, error_of
from zerobubble.runtime.failure.store_thread import Standstill, StoreThread
from zerobubble.runtime.transport.contact import host_is_silent, stood_still
from zerobubble.runtime.transport.endpoint import Group
from zerobubble.runtime.transport.measured_store import MeasuredStore

_POLL_S = 0.02
_LOOKS_FOR_END = 50
"""The end of a process is heard after the end of its connections, within so many pauses of `_POLL_S` of those who lost it. They are counted
and not timed: who was kept from running meanwhile has to give its other threads, which hear of the end, time to run."""
_REPORT, _ALARM = "report", "alarm"
"""Keys of the store: the report, and the rank that was first to publish one or to ask the others what they do."""

Answer = TypeVar("Answer")


class FailureWatch:
    """This rank's access to what the ranks of one pipeline tell each other about a failure.

    `status` tells what this rank does, `hang_up(rank)` ends the connections to a rank that no longer answers, and `abort()` what the device
    does, when a report has come. They are bound methods that are held weakly. Only the constructor raises, and only it starts a thread.
    """

    def __init__(self, group: Group, status: Callable[[], RankStatus], hang_up: Callable[[int], None], abort: Callable[[], None]) -> None:
        self._group = group
        self._ended: list[int] = []
        self._kills = memory_kills()
        self._listener = _Listener(group, weakref.WeakMethod(status), weakref.WeakMethod(hang_up), weakref.WeakMethod(abort))
        try:
            listener, timing = self._listener, group.timing
            self._thread = StoreThread(group.store, listener.standstill, timing.listen_s, listener.look, listener.leave, timing.answer_s)
        except RuntimeError as error:
            failed = FailureReport(group.rank, "", f"rank {group.rank} failed while meeting the other ranks: RuntimeError: {error}")
            raise error_of(_publish(group.store, group.rank, failed)) from error

    @property
    def heard(self) -> FailureReport | None:
        """The report, as soon as this rank has heard of it."""
        return self._listener.heard

    def count(self, seconds: float) -> None:
        """This rank has waited for `seconds`, in which the store may have been silent."""
        self._thread.count(seconds)

    def publish(self, report: FailureReport) -> FailureReport:
        """Publish a report unless there is one already; gives the one that there is. Without the store, `report` itself."""
        if self._listener.heard is None:
            told = self._ask(lambda: _publish(self._thread.store, self._group.rank, report))
            self._listener.heard = told or self._listener.heard or report
        return self._listener.heard

    def find_culprit(self, status: RankStatus) -> FailureReport:
        """The report that there is, or the one that the ranks find together; `status` says with whom this rank lost contact, and how."""
        lost = lost_contact(self._group.rank, status)
        # A silent store may take longer to ask than a standstill counts as the last thing that happened.
        before = self._own_standstill(lost)
        found = self._listener.heard or self._ask(lambda: self._diagnose_together(status))
        still = before or self._own_standstill(lost)
        return found or self._heard_of_host() or still or self._report_without_store(status)

    def _heard_of_host(self) -> FailureReport | None:
        """The report, for which this rank waits a little where the store is gone: the end of its host is heard in another thread."""
        for _ in range(_LOOKS_FOR_END if self._group.store_host is not None else 0):
            if self._listener.heard is not None:
                break
            time.sleep(_POLL_S)
        return self._listener.heard

    def tell_of_end(self, ended: int, status: RankStatus) -> bool:
        """Publish that the process of rank `ended` has ended while this one did what `status` says; False if it had left in order.

        Where the store has ended with it, it is asked no more, and every rank that has seen the same tells the same.
        """
        if ended == self._group.store_host:
            still = self._own_standstill(f"the process of rank {ended}, which held the store of torch.distributed, had ended")
            self._listener.heard = self._listener.heard or still or report_ended_with_store(ended, memory_kills() - self._kills)
            self._thread.give_up()
            return True
        self._ended.append(ended)
        return self._ask(lambda: self._report_end(status) is not None) is not False

    def _report_end(self, status: RankStatus) -> FailureReport | None:
        """The report, if a process is known to have ended that had not left in order: then there is nobody to be waited for.

        A process that gave up on this one because it stood still has left and published its own report before. But if this one hosts the
        store, the others could do neither once they had given up on the store, too.
        """
        rank, store = self._group.rank, self._thread.store
        ended = [other for other in self._ended if not store.check([_left_key(other)])]
        if not ended:
            return None
        found = report_ended(ended, rank, status, memory_kills() - self._kills)
        still = self._own_standstill(found.message, self._group.timing.silence_s) if rank == self._group.store_host else None
        return _publish(store, rank, still or found)

    def abandon(self) -> None:
        """Leave everything to the parent: this is a forked child."""
        self._thread.end.detach()

    def close(self, report: FailureReport | None = None) -> None:
        """Stop listening for the alarm.

        After a failure, `stay` first: this process may end then, and the store with it.
        """
        if report is not None:
            self.stay(report)
        self._thread.end()

    def stay(self, report: FailureReport) -> None:
        """Wait a few seconds until every rank but the absent ones has read the report, or needs none."""
        self._ask(lambda: self._leave(report.absent))

    def _ask(self, call: Callable[[], Answer]) -> Answer | None:
        return self._thread.ask(call, self._group.timing.silence_s)

    def _diagnose_together(self, status: RankStatus) -> FailureReport:
        """What the caller says counts at once; the report of the first caller, from what all have said, is everyone's."""
        rank, size, store = self._group.rank, self._group.size, self._thread.store
        store.set(
            _status_key(rank), _write_status(status._replace(stood_still=self._listener.standstill.lately(self._group.timing.answer_s)))
        )
        first = int(store.compare_set(_ALARM, "", str(rank)))
        end = time.monotonic() + self._group.timing.answer_s * (1 if first == rank else 1.5)
        absent = set(range(size)) - {rank}
        while not store.check([_REPORT]):
            if self._ended and (report := self._report_end(status)) is not None:
                return report
            absent = {other for other in absent if not store.check([_status_key(other)])}
            if time.monotonic() > end or (not absent and first == rank):
                present = [other for other in range(size) if other not in absent]
                statuses = {other: _read_status(store.get(_status_key(other))) for other in present}
                # While the host of the store stood still, the others could tell each other nothing.
                still = self._own_standstill(lost_contact(rank, status)) if rank == self._group.store_host else None
                return _publish(store, rank, still or diagnose(statuses, size, rank))
            time.sleep(_POLL_S)
        return _read_report(store.get(_REPORT))

    def _own_standstill(self, found: str, longest_s: float | None = None) -> FailureReport | None:
        """That this process has just stood still for `longest_s` or longer, and what it `found` then; by default too long to answer."""
        lately_s = self._group.timing.answer_s
        seconds = self._listener.standstill.lately(lately_s)
        if seconds < (lately_s if longest_s is None else longest_s):
            return None
        rank = self._group.rank
        return FailureReport(rank, "", f"{stood_still(rank, seconds)}; then {found}")

    def _report_without_store(self, status: RankStatus) -> FailureReport:
        host = self._group.store_host
        if host is not None:
            return FailureReport(host, "", host_is_silent(host))
        lost = lost_contact(self._group.rank, status)
        message = f"{lost}, and the store of torch.distributed does not answer: see the log of the one who started it"
        return FailureReport(status.peer, "", message)

    def _leave(self, absent: tuple[int, ...]) -> bool:
        store = self._thread.store
        store.set(_left_key(self._group.rank), "1")
        end = time.monotonic() + self._group.timing.stay_s
        while time.monotonic() < end:
            gone = {*absent, *self._ended}  # more may end meanwhile
            if store.check([_left_key(rank) for rank in range(self._group.size) if rank not in gone]):
                break
            time.sleep(_POLL_S)
        return True


class _Listener:
    """What the thread looks for while its rank is busy, in frames that keep no pipeline alive. `heard` is the report, once it has come."""

    def __init__(
        self,
        group: Group,
        status: weakref.WeakMethod[Callable[[], RankStatus]],
        hang_up: weakref.WeakMethod[Callable[[int], None]],
        abort: weakref.WeakMethod[Callable[[], None]],
    ) -> None:
        self.heard: FailureReport | None = None
        self.standstill = Standstill()
        self._rank = group.rank
        self._lately_s = group.timing.answer_s
        self._status = status
        self._hang_up = hang_up
        self._abort = abort

    def look(self, store: MeasuredStore) -> bool:
        """Answer an alarm, if there is one, and keep the report, if there is one: then there is no more to look for."""
        if not store.check([_ALARM]):
            return False
        store.compare_set(_status_key(self._rank), "", _write_status(self._status_now()))
        if not store.check([_REPORT]):
            return False
        self.heard = _read_report(store.get(_REPORT))
        store.set(_left_key(self._rank), "1")
        self._wake(self.heard.absent)
        return True

    def leave(self, store: MeasuredStore) -> None:
        """Publish that this rank's pipeline is closed, and that nobody need wait for it."""
        store.compare_set(_status_key(self._rank), "", _write_status(CLOSING))
        store.set(_left_key(self._rank), "1")

    def _wake(self, absent: tuple[int, ...]) -> None:
        """Wake this rank if it waits for its device, or for one of these: other processes of another machine may hold their connections."""
        abort = self._abort()
        if abort is not None:
            abort()
        hang_up = self._hang_up()
        if hang_up is not None:
            for rank in absent:
                hang_up(rank)

    def _status_now(self) -> RankStatus:
        tell = self._status()
        status = tell() if tell is not None else CLOSING
        return status._replace(stood_still=self.standstill.lately(self._lately_s))


def _publish(store: Any, rank: int, report: FailureReport) -> FailureReport:
    """The first report is everyone's; the alarm has every rank's listener read it."""
    first: bytes = store.compare_set(_REPORT, "", json.dumps(report))
    store.compare_set(_ALARM, "", str(rank))
    return _read_report(first)


def _status_key(rank: int) -> str:
    """The key of what a rank does."""
    return f"status/{rank}"


def _left_key(rank: int) -> str:
    """The key by which a rank says that it needs the store no more."""
    return f"left/{rank}"


def _write_status(status: RankStatus) -> str:
    return json.dumps(status._replace(doing=text_of(status.doing), reason=text_of(status.reason)))


def _read_status(text: bytes) -> RankStatus:
    status = RankStatus(*json.loads(text))
    return status._replace(among=tuple(status.among))


def _read_report(text: bytes) -> FailureReport:
    rank, op, message, absent = json.loads(text)
    return FailureReport(rank, op, message, tuple(absent))
