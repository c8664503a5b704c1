"""The end of a rank's process is heard at once, even while children that it forked keep its connections open.

Ranks tell each other which process they are when they meet. A thread on each rank sleeps until one of those that run on its machine ends;
where Linux does not let it watch a process, the end is found by the connections alone.
"""

from __future__ import annotations

import os
import select
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from zerobubble.runtime.transport.rank_process import RankProcess, start_of, this_process

_LONGEST_STOP_S = 3.0


class ProcessWatch:
    """Calls `ended(rank)` in a thread of its own when the process of a rank on this machine ends; `ended` is a method that is held weakly.

    `processes` are those of ranks 0, 1, ...; that of this rank itself is left out.
    """

    def __init__(self, processes: Sequence[RankProcess], ended: Callable[[int], None]) -> None:
        self._end: Any = None
        watched, gone = _watchable(processes)
        if watched or gone:
            over = os.eventfd(0, os.EFD_CLOEXEC)
            arguments = (watched, gone, over, weakref.WeakMethod(ended))
            thread = threading.Thread(target=_watch, args=arguments, name="zerobubble-processes", daemon=True)
            thread.start()
            self._end = weakref.finalize(self, _stop, over, thread)

    def close(self) -> None:
        """Watch no more."""
        if self._end is not None:
            self._end()

    def abandon(self) -> None:
        """Leave everything to the parent: this is a forked child."""
        if self._end is not None:
            self._end.detach()


def _watchable(processes: Sequence[RankProcess]) -> tuple[dict[int, int], list[int]]:
    """The ranks whose processes can be watched from here, by descriptors to poll; and those whose processes have ended already."""
    here = this_process()
    watched: dict[int, int] = {}
    gone: list[int] = []
    if not here.place or not hasattr(os, "pidfd_open"):
        return watched, gone
    for rank, process in enumerate(processes):
        if process.place == here.place and process.number != here.number:
            try:
                watched[_descriptor_of(process)] = rank
            except ProcessLookupError:
                gone.append(rank)
            except OSError:  # an old kernel, or a sandbox that forbids it
                continue
    return watched, gone


def _descriptor_of(process: RankProcess) -> int:
    """A descriptor that can be polled for the end of a process; raises `ProcessLookupError` after it, `OSError` where there can be none."""
    descriptor = os.pidfd_open(process.number)
    try:
        started = start_of(process.number)
    except OSError:
        started = -1
    if started != process.started:
        os.close(descriptor)
        raise ProcessLookupError(f"process {process.number} is another one by now")
    return descriptor


def _watch(watched: dict[int, int], gone: list[int], over: int, ended: weakref.WeakMethod[Callable[[int], None]]) -> None:
    """Sleep until a process ends, or until it is `over`. The descriptors are closed here alone, so nobody else is given their numbers."""
    poll = select.poll()
    for descriptor in (over, *watched):
        poll.register(descriptor, select.POLLIN)
    try:
        for rank in gone:
            _tell(ended, rank)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == over:
                    return
                poll.unregister(descriptor)
                _tell(ended, watched[descriptor])
    finally:
        for descriptor in (over, *watched):
            os.close(descriptor)


def _tell(ended: weakref.WeakMethod[Callable[[int], None]], rank: int) -> None:
    """In a frame of its own, so that the thread keeps no pipeline alive."""
    tell = ended()
    if tell is not None:
        tell(rank)


def _stop(over: int, thread: threading.Thread) -> None:
    os.eventfd_write(over, 1)
    if thread is not threading.current_thread():
        thread.join(_LONGEST_STOP_S)
