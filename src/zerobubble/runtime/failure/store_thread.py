"""One thread makes all of a rank's store calls that concern failures. It starts with the pipeline.

Starting a thread after a failure may fail: memory or the number of processes may have run out, or the interpreter may be exiting. And the
store may be gone or frozen with the process that hosts it. So a rank waits for this thread and never for the store: it stops waiting after
a few seconds of silence, while the thread may stay blocked.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from zerobubble.runtime.transport.measured_store import MeasuredStore
from zerobubble.runtime.transport.stalls import StallMonitor

_TICK_S = 0.1

Answer = TypeVar("Answer")


class _Request(Generic[Answer]):
    """A call for the thread to make. If it raises anything, `answer` stays None."""

    def __init__(self, call: Callable[[], Answer]) -> None:
        self.is_done = threading.Event()
        self.answer: Answer | None = None
        self._call = call

    def run(self) -> None:
        try:
            with suppress(Exception):  # a store may raise anything
                self.answer = self._call()
        finally:
            self.is_done.set()


class StoreThread:
    """Calls `store` for its rank.

    Between calls, it runs `poll(store)` every `poll_s` seconds until it returns True. At its end, it runs `leave(store)`.

    Its waits feed `stalls`. `join_timeout_s` bounds how long the end of the pipeline waits for the thread.

    Raises `RuntimeError` if no thread can be started.
    """

    def __init__(
        self,
        store: Any,
        stalls: StallMonitor,
        poll_s: float,
        poll: Callable[[MeasuredStore], bool],
        leave: Callable[[MeasuredStore], object],
        join_timeout_s: float,
    ) -> None:
        self.store = MeasuredStore(store)
        self._is_lost = threading.Event()
        self._requests: SimpleQueue[_Request[Any] | None] = SimpleQueue()
        loop = _Loop(self.store, stalls, self._requests, poll_s, poll, leave)
        self._thread = threading.Thread(target=loop.run, name="zerobubble-listener", daemon=True)
        self._thread.start()
        self.end = weakref.finalize(self, _stop, self._requests, self._thread, self._is_lost, join_timeout_s)

    def count(self, seconds: float) -> None:
        """Adds `seconds` in which this rank waited for anything to the silence of the store.

        While the rank waits, the thread polls the store, and each answer ends the silence.
        """
        self.store.count(seconds)

    def ask(self, call: Callable[[], Answer], silence_s: float) -> Answer | None:
        """Runs `call` in the thread and returns its result, which must not be None.

        Returns None if it raises or the store is silent for `silence_s`. From then on the store counts as gone, and every request returns
        None.
        """
        if self._is_lost.is_set():
            return None
        request = _Request(call)
        self._requests.put(request)
        while not request.is_done.wait(_TICK_S):
            self.store.count(_TICK_S)
            if self.store.silence_s > silence_s or not self._thread.is_alive() or self._is_lost.is_set():
                break
        if request.answer is None:
            self._is_lost.set()
        return request.answer

    def give_up(self) -> None:
        """Marks the store as gone: nothing waits for it any more, nor for the thread, which may be blocked on it."""
        self._is_lost.set()


class _Loop:
    """The loop of the thread. It holds no reference to the `StoreThread`, which would then live as long as the thread."""

    def __init__(
        self,
        store: MeasuredStore,
        stalls: StallMonitor,
        requests: SimpleQueue[_Request[Any] | None],
        poll_s: float,
        poll: Callable[[MeasuredStore], bool],
        leave: Callable[[MeasuredStore], object],
    ) -> None:
        self._store = store
        self._stalls = stalls
        self._requests = requests
        self._poll_s = poll_s
        self._poll = poll
        self._leave = leave

    def run(self) -> None:
        is_over = False
        while True:
            try:
                with self._stalls.waiting(self._poll_s):
                    request = self._requests.get(timeout=self._poll_s)
            except Empty:
                is_over = is_over or self._poll_once()
                continue
            if request is None:
                break
            request.run()
            del request  # it holds the pipeline, which must not live until the next request
        _Request(lambda: self._leave(self._store)).run()

    def _poll_once(self) -> bool:
        """Returns whether nothing is left to poll for: a store that raises is gone for good."""
        try:
            return self._poll(self._store)
        except Exception:  # noqa: BLE001 - a store may raise anything
            return True


def _stop(requests: SimpleQueue[_Request[Any] | None], thread: threading.Thread, is_lost: threading.Event, join_timeout_s: float) -> None:
    """Ends the thread, and waits for it unless it is blocked on a store that is gone."""
    requests.put(None)
    if thread is not threading.current_thread() and not is_lost.is_set():
        thread.join(join_timeout_s)
