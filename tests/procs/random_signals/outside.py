"""Evidence of causes outside of what is tested, as the kernel and the store's file have it.

A process may be kept from the processors, and a rank may be struck while it holds the lock of the file that is the store, or has written a
part of an entry to it. No rank can do anything about either.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

EVERY_S = 0.25


class Delays:
    """How long the threads of processes waited for a processor, sampled from the scheduler's own count until `close`."""

    def __init__(self, pids: Mapping[int, int]) -> None:
        """Watch the processes of these ranks."""
        self._pids = pids
        self._seen = [self._sample()]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(EVERY_S):
            self._seen.append(self._sample())

    def _sample(self) -> tuple[float, dict[tuple[int, str], float]]:
        return time.monotonic(), {key: waited for rank in self._pids for key, waited in self._of(rank)}

    def _of(self, rank: int) -> list[tuple[tuple[int, str], float]]:
        """The seconds that each thread of a rank has waited since it began."""
        found = []
        with suppress(OSError):
            for thread in os.listdir(f"/proc/{self._pids[rank]}/task"):
                with suppress(OSError):
                    text = Path(f"/proc/{self._pids[rank]}/task/{thread}/schedstat").read_text()
                    found.append(((rank, thread), int(text.split()[1]) / 1e9))
        return found

    def between(self, begin: float, end: float) -> dict[int, float]:
        """The seconds that one thread of each rank waited between two times, that which waited longest."""
        first = self._seen[0][1]
        last: dict[tuple[int, str], float] = {}
        for at, waited in self._seen:
            if at <= begin:
                first = waited
            elif at <= end + EVERY_S:
                last |= waited
        longest = dict.fromkeys(self._pids, 0.0)
        for key, seconds in last.items():
            longest[key[0]] = max(longest[key[0]], seconds - first.get(key, 0.0))
        return longest

    def close(self) -> None:
        """Stop watching."""
        self._over.set()
        self._thread.join()


def is_locked(file: Path) -> bool:
    """Whether some process holds the lock of a file that is a store: one that is frozen holds it for good."""
    if not file.exists():
        return False
    with file.open("rb") as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def is_torn(file: Path) -> bool:
    """Whether a file that is a store ends within an entry: a key and a value, each the 4 bytes of its length and then itself."""
    if not file.exists():
        return False
    data = file.read_bytes()
    place, parts = 0, 0
    while place < len(data):
        place += 4 + int.from_bytes(data[place : place + 4], "little")
        parts += 1
    return place != len(data) or parts % 2 == 1
