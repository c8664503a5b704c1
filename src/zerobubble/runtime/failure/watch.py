"""One rank's failure is every rank's clear error: the first to fail writes down why, closes its connections, and so wakes the rest.

A rank blocked on a message is woken when the other end closes, or gives up after its timeout; it reads the note, closes in turn, and
the wave passes through the group. Where no note hangs, as after a kill, the rank that lost contact rings the alarm. On every rank a thread
listens for it, even while the rank computes or waits, and says what the rank does; from what they say, `inquest` finds the culprit.

The notes hang in the store of torch.distributed, and the first to hang is everyone's. The store may have gone or frozen with the process
that hosts it, so nobody bears its silence for longer than a few seconds; only then does a rank tell what it knows by itself.
"""

from __future__ import annotations

import json
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from zerobubble.errors import PipelineError
from zerobubble.runtime.failure.blame import CLOSING, FailureReport, RankStatus, diagnose
from zerobubble.runtime.stage.stage import Stage
from zerobubble.runtime.transport.endpoint import Group

GRACE_S = 3.0
"""How long the ranks have to answer the alarm; who does not is gone or frozen."""
PATIENCE_S = 6.0
"""How long the store may be silent before it counts as gone."""
FAREWELL_S = 3.0
"""How long a rank stays after a failure, so that the others can read the note before its process may end."""
PERIOD_S = 0.5
"""How often a rank listens for the alarm."""
_TICK_S = 0.1

Answer = TypeVar("Answer")


class _Heard:
    """A store whose every answer ends its silence, which whoever waits for it counts up."""

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
    """The place where a failed pipeline's note hangs. `doing` is a bound method that says what this rank does; it is held weakly."""

    def __init__(self, group: Group, doing: Callable[[], RankStatus]) -> None:
        store, rank = group.store, group.rank
        self._store = _Heard(store)
        self._rank = rank
        self._size = group.size
        self._host = group.store_host
        self._answers = True
        over = threading.Event()
        listener = threading.Thread(
            target=_listen, args=(store, rank, over, weakref.WeakMethod(doing)), name="zerobubble-listener", daemon=True
        )
        listener.start()
        self._end = weakref.finalize(self, _stop, over, listener)

    def report(self, note: FailureReport) -> FailureReport:
        """Hang `note` up unless one hangs already; gives the one that hangs. Without the store, `note` itself."""
        return self._ask(lambda: self._hang(note)) or note

    def ask_who_failed(self, word: RankStatus) -> FailureReport:
        """The note that hangs, or the one that an inquest finds: this rank's `word` tells with whom it lost contact, and how."""
        return self._ask(lambda: self._diagnose_together(word)) or self._without_store(word)

    def close(self, note: FailureReport | None = None) -> None:
        """Stop listening for the alarm. After a failure, wait first, a few seconds, until every rank but the absent has read the note or
        has closed the pipeline without one."""
        if note is not None:
            self._ask(lambda: self._part(note.absent))
        self._end()

    def _ask(self, call: Callable[[], Answer]) -> Answer | None:
        """What `call` gives; None where the store raises or is silent for `PATIENCE_S`, and from then on.

        Silence is counted in ticks, not by the clock, which goes on while this rank itself is frozen or starved.
        """
        future: Future[Answer] = Future()

        def run() -> None:
            try:
                future.set_result(call())
            except RuntimeError as error:
                future.set_exception(error)

        if self._answers:
            self._store.silence_s = 0.0
            threading.Thread(target=run, name="zerobubble-notice", daemon=True).start()
            while self._store.silence_s < PATIENCE_S:
                try:
                    return future.result(_TICK_S)
                except TimeoutError:
                    self._store.silence_s += _TICK_S
                except RuntimeError:
                    break
            self._answers = False
        return None

    def _hang(self, note: FailureReport) -> FailureReport:
        won: bytes = self._store.compare_set("note", "", json.dumps(note))
        return _read_note(won)

    def _diagnose_together(self, word: RankStatus) -> FailureReport:
        """The caller's words count at once; the first caller's verdict, on what all have said, is everyone's."""
        self._store.set(f"word/{self._rank}", json.dumps(word))
        first = int(self._store.compare_set("alarm", "", str(self._rank)))
        end = time.monotonic() + GRACE_S * (1 if first == self._rank else 1.5)
        absent = set(range(self._size)) - {self._rank}
        while not self._store.check(["note"]):
            absent = {rank for rank in absent if not self._store.check([f"word/{rank}"])}
            if time.monotonic() > end or (not absent and first == self._rank):
                words = {rank: RankStatus(*json.loads(self._store.get(f"word/{rank}"))) for rank in range(self._size) if rank not in absent}
                return self._hang(diagnose(words, self._size, self._rank))
            time.sleep(0.02)
        return _read_note(self._store.get("note"))

    def _without_store(self, word: RankStatus) -> FailureReport:
        lost = f"rank {self._rank} lost contact{'' if word.peer < 0 else f' with rank {word.peer}'} while {word.doing} ({word.reason})"
        if self._host is None:
            return FailureReport(
                word.peer, "", f"{lost}, and the store of torch.distributed does not answer: see the log of the one who started it"
            )
        store = f"the store of torch.distributed, in the process of rank {self._host}, does not answer: see the log there"
        return FailureReport(self._host, "", f"rank {self._host} is gone or frozen: {lost}, and {store}")

    def _part(self, absent: tuple[int, ...]) -> bool:
        self._store.set(f"left/{self._rank}", "1")
        others = [f"left/{rank}" for rank in range(self._size) if rank not in absent]
        end = time.monotonic() + FAREWELL_S
        while not self._store.check(others) and time.monotonic() < end:
            time.sleep(0.02)
        return True


def error_of(note: FailureReport) -> PipelineError:
    """The exception that tells of `note`."""
    return PipelineError(note.message, rank=note.rank if note.rank >= 0 else None, op=note.op or None)


def why(error: BaseException, stages: dict[int, Stage]) -> str:
    """An error in words, with the notes added to it; where memory ran out, with what the stages hold and what would help."""
    told = "; ".join((f"{type(error).__name__}: {error}".rstrip(": "), *getattr(error, "__notes__", ())))
    if not isinstance(error, (MemoryError, torch.OutOfMemoryError)) and "can't allocate memory" not in told:
        return told
    held = {index: stage.in_flight() for index, stage in stages.items()}
    parts = [f"stage {index} held {size} bytes for {count} microbatches in flight" for index, (count, size) in held.items()]
    return f"{told}; {', '.join(parts)}; choose a schedule that holds less, plan one within a memory limit, or cut smaller microbatches"


def let_go(error: BaseException | None) -> None:
    """Forget the local variables on the way of an error and of those that led to it, which would keep activations alive."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _read_note(text: bytes) -> FailureReport:
    rank, op, message, absent = json.loads(text)
    return FailureReport(rank, op, message, tuple(absent))


def _listen(store: Any, rank: int, over: threading.Event, doing: weakref.WeakMethod[Callable[[], RankStatus]]) -> None:
    """Answer the alarm once, if it ever rings; a pipeline that is closed says so on leaving, and that nobody need wait for it."""
    try:
        while not over.wait(PERIOD_S):
            if store.check(["alarm"]):
                store.compare_set(f"word/{rank}", "", json.dumps(_said(doing)))
                over.wait()
        store.compare_set(f"word/{rank}", "", json.dumps(CLOSING))
        store.set(f"left/{rank}", "1")
    except RuntimeError:  # no store, no alarm
        return


def _said(doing: weakref.WeakMethod[Callable[[], RankStatus]]) -> RankStatus:
    """In a frame of its own, so that the listener keeps no pipeline alive."""
    say = doing()
    return say() if say is not None else CLOSING


def _stop(over: threading.Event, listener: threading.Thread) -> None:
    over.set()
    if listener is not threading.current_thread():
        listener.join(GRACE_S)
