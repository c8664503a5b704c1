"""Sums a tensor over ranks with a ring all-reduce over lines, in a thread, while the rank computes.

Each rank sends and receives every element about twice, for any number of ranks. A part of the tensor is summed on its first way around the
ring (reduce-scatter), and the sum is passed around on the second (all-gather). So all ranks get the same bits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerobubble.runtime.device import current_stream, set_stream, wait_for
from zerobubble.runtime.transport.work import Work

Start = Callable[[Tensor], Work]
"""Starts one exchange."""


class RingSums:
    """This rank's part in the sums over `size` ranks, of which it has index `rank`.

    `send` starts to send to the next rank of the ring. `receive` starts to receive from the previous one. A thread makes one sum after
    another. It starts with the first sum and ends with `close`, or when an exchange fails. It holds one tensor at a time.
    """

    def __init__(self, rank: int, size: int, send: Start, receive: Start) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ring = rank, size, send, receive

    def start(self, gather: Callable[[], Tensor], scatter: Callable[[Tensor], None]) -> _Sum:
        """Starts a sum; see `Sums.start`. Calls both functions in the thread of the sums."""
        if self._thread is None:
            self._thread = threading.Thread(target=_work, args=(self._jobs, *self._ring), name="zerobubble-sums", daemon=True)
            self._thread.start()
        future: Future[tuple[int, int]] = Future()
        self._jobs.put(_Job(future, gather, scatter, current_stream()))
        return _Sum(future)

    def close(self) -> None:
        """Starts no more sums. A running sum ends when the connections close."""
        self._jobs.put(None)


class _Job(NamedTuple):
    """A sum to make on the stream of the thread that started it. The future gets its begin and end, by the host's clock."""

    future: Future[tuple[int, int]]
    take: Callable[[], Tensor]
    put: Callable[[Tensor], None]
    stream: Any


class _Sum:
    """A sum that was started."""

    def __init__(self, future: Future[tuple[int, int]]) -> None:
        self._future = future

    @property
    def times(self) -> tuple[int, int]:
        """When the sum began and ended."""
        return self._future.result()

    def wait(self) -> None:
        """Waits for the sum. Raises `RuntimeError` if the connection is lost."""
        self._future.result()


@torch.no_grad()
def _work(jobs: SimpleQueue[_Job | None], rank: int, size: int, send: Start, receive: Start) -> None:
    failed: BaseException | None = None
    while (job := jobs.get()) is not None:
        try:
            if failed is not None:
                raise failed
            set_stream(job.stream)
            wait_for(job.stream)  # the host runs ahead of the device: the sum begins once its gradients are computed
            began = perf_counter_ns()
            tensor = job.take()
            _sum(tensor, rank, size, send, receive)
            job.put(tensor)
            wait_for(job.stream)
            del tensor
        except BaseException as error:  # noqa: BLE001 - `wait` raises it
            failed = error
            job.future.set_exception(error)
        else:
            job.future.set_result((began, perf_counter_ns()))
        del job


def _sum(tensor: Tensor, rank: int, size: int, send: Start, receive: Start) -> None:
    """Replaces `tensor` by the sum: its parts go around the ring, first adding each rank's own, then as results."""
    parts = tensor.tensor_split(size)
    for hop in range(size - 1):
        part = parts[(rank - hop - 1) % size]
        received = torch.empty_like(part)
        _exchange(parts[(rank - hop) % size], received, send, receive)
        part += received
    for hop in range(size - 1):
        _exchange(parts[(rank - hop + 1) % size], parts[(rank - hop) % size], send, receive)


def _exchange(out: Tensor, into: Tensor, send: Start, receive: Start) -> None:
    works = [start(tensor) for start, tensor in ((send, out), (receive, into)) if tensor.numel()]
    for work in works:
        work.wait()
