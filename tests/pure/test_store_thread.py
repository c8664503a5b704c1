"""Whoever waits for a store bears its silence for as long as it may, however many wait with it."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

from zerobubble.runtime.failure.store_thread import Standstill, StoreThread

SILENCE_S, EARLY_S = 1.0, 0.15
"""For how long a store may be silent, and by how much less than that may be borne: a tick, and what counting is off."""


def test_three_that_wait_for_a_silent_store_count_its_silence_once() -> None:
    answer = threading.Event()
    thread = StoreThread(None, Standstill(), 60.0, lambda _: False, lambda _: None, 0.1)
    is_over = threading.Event()

    def ask() -> float:
        began = time.monotonic()
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
