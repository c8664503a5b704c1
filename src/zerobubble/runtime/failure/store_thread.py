"""All that a rank says to the store about failures is said by one thread, which is made with the pipeline.

When something has gone wrong, no thread can be started any more where memory or the number of processes has run out, or where the
interpreter ends. And the store may be gone or frozen with the process that hosts it, so nobody bears its silence for longer than a few
seconds: the rank waits for this thread, not for the store.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from zerobubble.runtime.transport.measured_store import MeasuredStore

_TICK_S = 0.1

Answer = TypeVar("Answer")


class _Request(Generic[Answer]):
    """A call for the thread to make. Where it raises, whatever it is, `answer` stays None."""

    def __init__(self, call: Callable[[], Answer]) -> None:
        self.is_done = threading.Event()
        self.answer: Answer | None = None
        self._call = call

    def run(self) -> None:
        try:
            self.answer = self._call()
        except Exception:  # noqa: BLE001 - a store may raise anything
            self.answer = None
        finally:
            self.is_done.set()


class Standstill:
    """How long this process stood still, and when it went on: stopped, starved, or with Python's lock held by a thread in foreign code.

    One thread waits; any may ask.
    """

    def __init__(self) -> None:
        self._due: float | None = None
        self._past: tuple[tuple[float, float], ...] = ()
        """The standstills that no later one has exceeded: when this process went on, and for how many seconds it had not."""

    @contextmanager
    def waiting(self, seconds: float) -> Iterator[None]:
        """A context for a wait of at most `seconds`: what it takes beyond is a standstill."""
        self._due = time.monotonic() + seconds
        try:
            yield
        finally:
            late, self._due = time.monotonic() - self._due, None
            if late > _TICK_S:
                self._past = (*(each for each in self._past if each[1] > late), (time.monotonic(), late))

    def lately(self, seconds: float) -> float:
        """How long the longest standstill was, in seconds, that lasts or has ended within the last `seconds`; 0 if there was none.

        One who was stopped for long often gets no time at first when it goes on: that is not to hide for how long it was stopped.
        """
        due, now = self._due, time.monotonic()
        lasting = 0.0 if due is None else now - due  # the thread that waits has not gone on yet
        return max(lasting if lasting > _TICK_S else 0.0, *(late for went_on, late in self._past if now - went_on < seconds), 0.0)


class StoreThread:
    """Calls `store` for its rank, and meanwhile `look(store)` every `look_s` seconds until that is true; in the end `leave(store)`.

    It tells its waits to `standstill`, from which any may see for how long this process stood still. Raises `RuntimeError` where no thread
    can be started.
    """

    def __init__(
        self,
        store: Any,
        standstill: Standstill,
        look_s: float,
        look: Callable[[MeasuredStore], bool],
        leave: Callable[[MeasuredStore], object],
        longest_s: float,
    ) -> None:
        self.store = MeasuredStore(store)
        self._is_lost = threading.Event()
        self._requests: SimpleQueue[_Request[Any] | None] = SimpleQueue()
        serve = _Serving(self.store, standstill, self._requests, look_s, look, leave)
        self._thread = threading.Thread(target=serve.run, name="zerobubble-listener", daemon=True)
        self._thread.start()
        self.end = weakref.finalize(self, _stop, self._requests, self._thread, self._is_lost, longest_s)

    def count(self, seconds: float) -> None:
        """This rank has waited for `seconds`, for whatever it may be; the store, which is looked into meanwhile, may have been silent."""
        self.store.count(seconds)

    def ask(self, call: Callable[[], Answer], silence_s: float) -> Answer | None:
        """What `call` gives; None where it raises or the store is silent for `silence_s`, and from then on."""
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
        """The store is known to be gone: nobody waits for it any more, nor for the thread, which may be waiting for it."""
        self._is_lost.set()


class _Serving:
    """What the thread runs. It knows nothing of the `StoreThread`, which would live as long as the thread."""

    def __init__(
        self,
        store: MeasuredStore,
        standstill: Standstill,
        requests: SimpleQueue[_Request[Any] | None],
        look_s: float,
        look: Callable[[MeasuredStore], bool],
        leave: Callable[[MeasuredStore], object],
    ) -> None:
        self._store = store
        self._standstill = standstill
        self._requests = requests
        self._look_s = look_s
        self._look = look
        self._leave = leave

    def run(self) -> None:
        has_seen = False
        while True:
            try:
                with self._standstill.waiting(self._look_s):
                    request = self._requests.get(timeout=self._look_s)
            except Empty:
                has_seen = has_seen or self._looks()
                continue
            if request is None:
                break
            request.run()
            del request  # it holds the pipeline
        _Request(lambda: self._leave(self._store)).run()

    def _looks(self) -> bool:
        """Whether there is nothing more to look for: a store that raises is gone for good."""
        try:
            return self._look(self._store)
        except Exception:  # noqa: BLE001 - a store may raise anything
            return True


def _stop(requests: SimpleQueue[_Request[Any] | None], thread: threading.Thread, is_lost: threading.Event, longest_s: float) -> None:
    """End the thread, and wait for it, unless it waits for a store that is lost."""
    requests.put(None)
    if thread is not threading.current_thread() and not is_lost.is_set():
        thread.join(longest_s)
