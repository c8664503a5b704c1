"""A rank that torchrun started ends with the agent that did, however that one ends: nobody else would end it, or start it again.

A thread sleeps until the agent's process ends, from the first pipeline of this process on. Then the other ranks are told, and this process
ends as by SIGTERM, which the agent would have sent. Without a system that lets a process watch another nothing is watched.
"""

from __future__ import annotations

import os
import select
import threading
from contextlib import suppress

from zerobubble.runtime.failure.termination import end_this_process, open_pipelines

_STARTED_BY_AGENT = "TORCHELASTIC_RUN_ID"
"""The environment variable that torchrun gives to the processes that it starts."""
_lock = threading.Lock()
_watched_by: list[int] = []
"""The process that watches its agent: this one, once it does."""


def end_with_agent() -> None:
    """End this process when the agent of torchrun that started it ends; nothing where it was started otherwise."""
    with _lock:
        if _STARTED_BY_AGENT in os.environ and hasattr(os, "pidfd_open") and _watched_by != [os.getpid()]:
            with suppress(OSError):  # an old kernel, or a sandbox that forbids it
                descriptor = os.pidfd_open(os.getppid())
                threading.Thread(target=_watch, args=(descriptor,), name="zerobubble-agent", daemon=True).start()
            _watched_by[:] = [os.getpid()]


def _watch(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.poll()
    for pipeline in open_pipelines():
        pipeline.tell_of_end_of_agent()
    end_this_process()
