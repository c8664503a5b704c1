"""Detects at once when the process of a rank on this machine ends, even while its forked children keep connections open.

Lost connections alone are no reliable sign of a death: a child inherits them. At the rendezvous, ranks exchange the numbers of their
processes. A thread on each rank then polls their `pidfd`s. The start time of the process confirms a `pidfd`, since process numbers are
reused. If Linux does not allow watching a process, its end shows only in its connections.
"""

from __future__ import annotations

import os
import select
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from zerobubble.runtime.transport.rank_process import RankProcess, start_of, this_process

_LONGEST_STOP_S = 3.0


class ProcessWatch:
    """Calls `ended(rank)` in its own thread when the process of a rank on this machine ends; `ended` is a bound method, held weakly.

    `processes` are those of the ranks; this process is left out.
    """

    def __init__(self, processes: Mapping[int, RankProcess], ended: Callable[[int], None]) -> None:
        self._end: Any = None
        watched, already_ended = _watchable(processes)
        if watched or already_ended:
            over = os.eventfd(0, os.EFD_CLOEXEC)
            arguments = (watched, already_ended, over, weakref.WeakMethod(ended))
            thread = threading.Thread(target=_watch, args=arguments, name="zerobubble-processes", daemon=True)
            thread.start()
            self._end = weakref.finalize(self, _stop, over, thread)

    def close(self) -> None:
        """Stops watching."""
        if self._end is not None:
            self._end()

    def detach(self) -> None:
        """Leaves everything to the parent: this is a forked child."""
        if self._end is not None:
            self._end.detach()


def _watchable(processes: Mapping[int, RankProcess]) -> tuple[dict[int, int], list[int]]:
    """Returns the ranks whose processes can be watched, by descriptors to poll, and the ranks whose processes have ended already."""
    here = this_process()
    watched: dict[int, int] = {}
    already_ended: list[int] = []
    if not here.place or not hasattr(os, "pidfd_open"):
        return watched, already_ended
    for rank, process in processes.items():
        if process.place == here.place and process.number != here.number:
            try:
                watched[_descriptor_of(process)] = rank
            except ProcessLookupError:
                already_ended.append(rank)
            except OSError:  # an old kernel, or a sandbox that forbids it
                continue
    return watched, already_ended


def _descriptor_of(process: RankProcess) -> int:
    """Returns a descriptor to poll for the end of a process.

    Raises `ProcessLookupError` if the process has ended, and `OSError` if it cannot be watched.
    """
    descriptor = os.pidfd_open(process.number)
    # Compare after opening: from here on the descriptor stays with this process, even if its number is reused.
    try:
        started = start_of(process.number)
    except OSError:
        started = -1
    if started != process.started:
        os.close(descriptor)
        raise ProcessLookupError(f"number {process.number} belongs to another process by now")
    return descriptor


def _watch(watched: dict[int, int], already_ended: list[int], over: int, ended: weakref.WeakMethod[Callable[[int], None]]) -> None:
    """Sleeps until a process ends, or until `over` is written. Only this thread closes the descriptors, so none is reused while polled."""
    poll = select.poll()
    for descriptor in (over, *watched):
        poll.register(descriptor, select.POLLIN)
    try:
        for rank in already_ended:
            _call(ended, rank)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == over:
                    return
                poll.unregister(descriptor)
                _call(ended, watched[descriptor])
    finally:
        for descriptor in (over, *watched):
            os.close(descriptor)


def _call(ended: weakref.WeakMethod[Callable[[int], None]], rank: int) -> None:
    """Calls the method in a separate stack frame, so that the sleeping thread keeps no pipeline alive."""
    method = ended()
    if method is not None:
        method(rank)


def _stop(over: int, thread: threading.Thread) -> None:
    os.eventfd_write(over, 1)
    if thread is not threading.current_thread():
        thread.join(_LONGEST_STOP_S)
