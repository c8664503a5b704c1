"""Each thread that waits for a silent store gives up at its own timeout, even if others wait with it.

A silent store is reported once.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from zerobubble.runtime.failure.store_thread import StoreThread
from zerobubble.runtime.transport import stalls as stalls_module
from zerobubble.runtime.transport.stalls import StallMonitor

SILENCE_S, EARLY_S = 1.0, 0.15
"""For how long a store may be silent, and by how much less than that may be borne: a tick, and what counting is off."""


def test_three_that_wait_for_a_silent_store_count_its_silence_once() -> None:
    answer = threading.Event()
    thread = StoreThread(None, StallMonitor(), 60.0, lambda _: False, lambda _: None, 0.1)
    is_over = threading.Event()

    began = time.monotonic()  # before anybody counts: a thread may get no time to start in while another counts already

    def ask() -> float:
        assert thread.ask(lambda: answer.wait(30.0), SILENCE_S) is None
        return time.monotonic() - began

    def wait_for_a_message() -> None:
        while not is_over.wait(0.1):
            thread.count(0.1)

    with ThreadPoolExecutor(3) as pool:
        waiting = pool.submit(wait_for_a_message)
        asking = [pool.submit(ask) for _ in range(2)]
        borne = [each.result() for each in asking]
        is_over.set()
        waiting.result()
    answer.set()
    thread.end()
    assert min(borne) > SILENCE_S - EARLY_S, borne


def test_a_short_stall_does_not_hide_a_long_one_just_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a process that was stopped is starved when it goes on."""
    now = [100.0]
    monkeypatch.setattr(stalls_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    stalls = StallMonitor()
    found = []
    for takes in (0.5, 9.5, 0.9, 0.5):
        with stalls.waiting(0.5):
            now[0] += takes
            lasting = stalls.longest(2.0)
        found.append((lasting, stalls.longest(2.0)))
    assert found == [(0.0, 0.0), (9.0, 9.0), (pytest.approx(9.0), 9.0), (9.0, 9.0)]
    now[0] += 0.7  # the long one ended 2.1 s ago, the short one 1.2 s
    assert stalls.longest(2.0) == pytest.approx(0.4)
    now[0] += 2.0
    assert stalls.longest(2.0) == 0.0
