"""Ends a rank that torchrun started when torchrun's agent ends.

Nothing else would end such a rank, or restart it. A thread sleeps until the agent's process ends, from the first pipeline of this process
on. It then reports to the other ranks and ends this process as SIGTERM would, which the agent would have sent. Systems without `pidfd_open`
watch nothing.
"""

from __future__ import annotations

import os
import select
import threading
from contextlib import suppress

from zerobubble.runtime.failure.termination import end_this_process, open_pipelines

_STARTED_BY_AGENT = "TORCHELASTIC_RUN_ID"
"""The environment variable that torchrun sets for the processes that it starts."""
_lock = threading.Lock()
_watched_by: list[int] = []
"""The number of the process that watches its agent, once it does. A forked child finds its parent's number and starts to watch."""


def end_with_agent() -> None:
    """Ends this process when the torchrun agent that started it ends. Does nothing if something else started it."""
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
    # Report first: the signal may end this process at once.
    for pipeline in open_pipelines():
        pipeline.report_agent_end()
    end_this_process()
