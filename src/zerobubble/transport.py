"""Transports carry messages between the ranks of a `Pipeline`. This is the protocol for your own transport. Needs torch.

A transport is a class with the methods of `Endpoint`. Each rank creates an instance and passes it to its pipeline:
`Pipeline(..., transport=MyEndpoint(...))`. If ranks are threads of one process, a complete transport takes about twenty lines:

    class ThreadEndpoint(Endpoint):
        def __init__(self, threads, rank):
            self.group = Group(rank, threads.size, threads.store)  # such as torch.distributed.HashStore()
            self.threads = threads

        def sender(self, line):
            queue = self.threads.queues[line]
            return lambda tensor: Sent(queue.put(tensor.clone()))

        def receiver(self, line):
            queue = self.threads.queues[line]
            return lambda tensor: Received(queue, tensor)  # its `wait` copies the queue's next tensor into `tensor`

        def close(self):
            self.threads.closed.add(self.group.rank)  # every `Received.wait` for this rank then raises PeerGoneError

The project's tests train with it (`tests/procs/endpoints.py`). An endpoint declares optional features in `Capabilities`.
"""

from __future__ import annotations

from zerobubble.listing import listing
from zerobubble.runtime.transport.control import Topic
from zerobubble.runtime.transport.endpoint import (
    Capabilities,
    Endpoint,
    Group,
    Line,
    MessageLane,
    PeerGoneError,
    Put,
    StoreTiming,
    Sums,
    Take,
    Traffic,
)
from zerobubble.runtime.transport.work import Work

__all__ = [
    "Capabilities",
    "Endpoint",
    "Group",
    "Line",
    "MessageLane",
    "PeerGoneError",
    "Put",
    "StoreTiming",
    "Sums",
    "Take",
    "Topic",
    "Traffic",
    "Work",
]

__dir__ = listing(__all__)
