"""One rank's failure becomes every rank's error: the first to fail publishes a report and closes its connections, which wakes the others.

A rank that is blocked on a message is woken when the other end closes, or gives up after its timeout; it reads the report, closes in turn,
and so on through the group. Where there is no report, as after a kill, the rank that lost contact raises an alarm. On every rank a thread
listens for it, even while the rank computes or waits, and publishes what the rank does; `diagnose` finds the culprit from what all publish.

Reports are kept in the store of torch.distributed, and the first is everyone's. The store may be gone or frozen with the process that hosts
it, so nobody bears its silence for longer than a few seconds; only then does a rank report what it knows by itself.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from zerobubble.runtime.failure.blame import CLOSING, diagnose
from zerobubble.runtime.failure.report import FailureReport, RankStatus
from zerobubble.runtime.transport.endpoint import Group

_TICK_S = 0.1
_POLL_S = 0.02
_REPORT, _ALARM = "report", "alarm"
"""Keys of the store: the report, and the rank that first raised the alarm."""

Answer = TypeVar("Answer")


class _MeasuredStore:
    """A store that ends its silence with every answer; whoever waits for one counts the silence up."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.silence_s = 0.0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def ask(*args: Any) -> Any:
            answer = getattr(self._store, name)(*args)
            self.silence_s = 0.0
            return answer

        return ask


class FailureWatch:
    """This rank's access to what the ranks of one pipeline tell each other about a failure.

    `status` is a bound method that tells what this rank does; it is held weakly.
    """

    def __init__(self, group: Group, status: Callable[[], RankStatus]) -> None:
        self._group = group
        self._store = _MeasuredStore(group.store)
        self._store_answers = True
        self.has_report = threading.Event()
        over = threading.Event()
        arguments = (group, over, self.has_report, weakref.WeakMethod(status))
        listener = threading.Thread(target=_listen, args=arguments, name="zerobubble-listener", daemon=True)
        listener.start()
        self._end = weakref.finalize(self, _stop, over, listener, group.timing.answer_s)

    def publish(self, report: FailureReport) -> FailureReport:
        """Publish a report unless there is one already; gives the one that there is. Without the store, `report` itself."""
        return self._ask(lambda: self._publish(report)) or report

    def find_culprit(self, status: RankStatus) -> FailureReport:
        """The report that there is, or the one that the ranks find together; `status` says with whom this rank lost contact, and how."""
        return self._ask(lambda: self._diagnose_together(status)) or self._report_without_store(status)

    def close(self, report: FailureReport | None = None) -> None:
        """Stop listening for the alarm.

        After a failure, wait first, a few seconds, until every rank but the absent ones has read the report or has closed the pipeline
        without one: this process may end then, and the store with it.
        """
        if report is not None:
            self._ask(lambda: self._leave(report.absent))
        self._end()

    def _ask(self, call: Callable[[], Answer]) -> Answer | None:
        """What `call` gives; None where the store raises or is silent for too long, and from then on.

        Silence is counted in ticks, not by the clock, which goes on while this rank itself is frozen or starved.
        """
        future: Future[Answer] = Future()

        def run() -> None:
            try:
                future.set_result(call())
            except RuntimeError as error:
                future.set_exception(error)

        if self._store_answers:
            self._store.silence_s = 0.0
            threading.Thread(target=run, name="zerobubble-report", daemon=True).start()
            while self._store.silence_s < self._group.timing.silence_s:
                try:
                    return future.result(_TICK_S)
                except TimeoutError:
                    self._store.silence_s += _TICK_S
                except RuntimeError:
                    break
            self._store_answers = False
        return None

    def _publish(self, report: FailureReport) -> FailureReport:
        first: bytes = self._store.compare_set(_REPORT, "", json.dumps(report))
        self._store.compare_set(_ALARM, "", str(self._group.rank))
        return _read_report(first)

    def _diagnose_together(self, status: RankStatus) -> FailureReport:
        """What the caller says counts at once; the report of the first caller, from what all have said, is everyone's."""
        rank, size = self._group.rank, self._group.size
        self._store.set(_status_key(rank), json.dumps(status))
        first = int(self._store.compare_set(_ALARM, "", str(rank)))
        end = time.monotonic() + self._group.timing.answer_s * (1 if first == rank else 1.5)
        absent = set(range(size)) - {rank}
        while not self._store.check([_REPORT]):
            absent = {other for other in absent if not self._store.check([_status_key(other)])}
            if time.monotonic() > end or (not absent and first == rank):
                present = [other for other in range(size) if other not in absent]
                statuses = {other: RankStatus(*json.loads(self._store.get(_status_key(other)))) for other in present}
                return self._publish(diagnose(statuses, size, rank))
            time.sleep(_POLL_S)
        return _read_report(self._store.get(_REPORT))

    def _report_without_store(self, status: RankStatus) -> FailureReport:
        rank, host = self._group.rank, self._group.store_host
        lost = f"rank {rank} lost contact{'' if status.peer < 0 else f' with rank {status.peer}'} while {status.doing} ({status.reason})"
        if host is None:
            message = f"{lost}, and the store of torch.distributed does not answer: see the log of the one who started it"
            return FailureReport(status.peer, "", message)
        store = f"the store of torch.distributed, in the process of rank {host}, does not answer: see the log there"
        return FailureReport(host, "", f"rank {host} is gone or frozen: {lost}, and {store}")

    def _leave(self, absent: tuple[int, ...]) -> bool:
        self._store.set(_left_key(self._group.rank), "1")
        others = [_left_key(rank) for rank in range(self._group.size) if rank not in absent]
        end = time.monotonic() + self._group.timing.stay_s
        while not self._store.check(others) and time.monotonic() < end:
            time.sleep(_POLL_S)
        return True


def _status_key(rank: int) -> str:
    """The key of what a rank does."""
    return f"status/{rank}"


def _left_key(rank: int) -> str:
    """The key by which a rank says that it needs the store no more."""
    return f"left/{rank}"


def _read_report(text: bytes) -> FailureReport:
    rank, op, message, absent = json.loads(text)
    return FailureReport(rank, op, message, tuple(absent))


def _listen(group: Group, over: threading.Event, has_report: threading.Event, status: weakref.WeakMethod[Callable[[], RankStatus]]) -> None:
    """Answer the alarm once, if there ever is one. A pipeline that is closed publishes that it is, and that nobody need wait for it."""
    try:
        while not over.wait(group.timing.listen_s):
            if group.store.check([_ALARM]):
                group.store.compare_set(_status_key(group.rank), "", json.dumps(_status_now(status)))
                if group.store.check([_REPORT]):
                    has_report.set()
                    over.wait()
        group.store.compare_set(_status_key(group.rank), "", json.dumps(CLOSING))
        group.store.set(_left_key(group.rank), "1")
    except RuntimeError:  # without a store there is no alarm
        return


def _status_now(status: weakref.WeakMethod[Callable[[], RankStatus]]) -> RankStatus:
    """In a frame of its own, so that the listener keeps no pipeline alive."""
    tell = status()
    return tell() if tell is not None else CLOSING


def _stop(over: threading.Event, listener: threading.Thread, longest_s: float) -> None:
    over.set()
    if listener is not threading.current_thread():
        listener.join(longest_s)
