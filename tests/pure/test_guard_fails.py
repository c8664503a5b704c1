"""A rank that fails closes its connections and raises its first error, whatever else goes wrong on the way."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from tests.pure.test_watch import PATIENT, DictStore
from tests.refusals import raises
from zerobubble.errors import PipelineError
from zerobubble.runtime.failure.guard import FailureGuard
from zerobubble.runtime.transport.contact import LostContactError
from zerobubble.runtime.transport.endpoint import Endpoint, Group, Line
from zerobubble.runtime.transport.transport import Transport
from zerobubble.runtime.transport.work import Work


class Lonely(Endpoint):
    """The end of no lines, which counts how often it was closed, and then may do something else."""

    def __init__(self, then: Callable[[], None]) -> None:
        self.group = Group(0, 1, DictStore(), timing=PATIENT)
        self.closed = 0
        self.then = then

    def sender(self, line: Line) -> Callable[[Tensor], Work]:
        raise AssertionError("there is nobody")

    def receiver(self, line: Line) -> Callable[[Tensor], Work]:
        raise AssertionError("there is nobody")

    def close(self) -> None:
        self.closed += 1
        self.then()


class Held:
    """What is released before the connections close."""

    def __init__(self, then: Callable[[], None]) -> None:
        self.then = then

    def release(self, *_: Any) -> None:
        self.then()


class Uncountable:
    def in_flight(self) -> tuple[int, int]:
        raise MemoryError


def fine() -> None:
    return


def breaks() -> None:
    raise KeyError("closing")


def interrupted(*_: object) -> Any:
    raise KeyboardInterrupt


def failed(guard: FailureGuard, error: BaseException) -> BaseException:
    with pytest.raises(BaseException) as caught, guard.during("while it was at work"):  # noqa: PT011 - what it is shall be seen
        raise error
    return caught.value


@pytest.mark.parametrize("close", [fine, breaks])
@pytest.mark.parametrize("release", [fine, breaks])
@pytest.mark.parametrize("kind", [ValueError, MemoryError, KeyboardInterrupt])
def test_the_first_error_is_raised_and_all_is_closed(
    close: Callable[[], None], release: Callable[[], None], kind: type[BaseException]
) -> None:
    endpoint, held, error = Lonely(close), Held(release), kind("boom")
    guard = FailureGuard(Transport(endpoint))
    guard.stages = {0: Uncountable()}
    guard.on_closing(held.release)
    raised = failed(guard, error)
    assert endpoint.closed > 0
    assert guard.closed is not None
    found = f"rank 0 failed while it was at work: {kind.__name__}: boom"
    assert guard.closed.startswith(found)
    if isinstance(error, Exception):
        assert isinstance(raised, PipelineError)
        assert str(raised).startswith(found)
        assert raised.__cause__ is error
    else:
        assert raised is error
    notes = getattr(raised, "__notes__", [])
    assert notes == (["closing the pipeline failed, too: KeyError: 'closing'"] if breaks in (close, release) else [])


def test_an_interrupt_while_the_others_are_reported_closes_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = Lonely(fine)
    guard = FailureGuard(Transport(endpoint))
    monkeypatch.setattr(guard._watch, "publish", interrupted)
    assert isinstance(failed(guard, ValueError("boom")), KeyboardInterrupt)
    assert endpoint.closed > 0
    with raises(PipelineError, "rank 0", "Pipeline"):
        guard.refuse_if_closed()


@pytest.mark.parametrize("error", [ValueError("boom"), LostContactError(0, "waiting for a message", "Connection closed by peer")])
def test_a_rank_whose_listener_has_died_shows_what_it_knows(error: Exception) -> None:
    endpoint = Lonely(fine)
    guard = FailureGuard(Transport(endpoint))
    guard._watch._thread.end()
    raised = failed(guard, error)
    assert isinstance(raised, PipelineError)
    assert str(raised).startswith(("rank 0 failed while it was at work: ValueError: boom", "rank 0 lost contact with rank 0 while waiting"))
    assert endpoint.closed > 0


@pytest.mark.parametrize("started", [0, 1])
def test_a_rank_that_cannot_have_its_threads_shows_the_others(monkeypatch: pytest.MonkeyPatch, started: int) -> None:
    """The thread for the store is refused, or the one after it."""
    left, start, handler = [started], threading.Thread.start, signal.getsignal(signal.SIGTERM)

    def refused(thread: threading.Thread) -> None:
        if not left[0]:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        start(thread)

    endpoint = Lonely(fine)
    monkeypatch.setattr(threading.Thread, "start", refused)
    with raises(PipelineError, "rank 0", "RuntimeError"):
        FailureGuard(Transport(endpoint))
    assert b"can't start new thread" in endpoint.group.store.kept["report"]
    assert signal.getsignal(signal.SIGTERM) is handler
