"""Sums of a tensor over ranks that each have one, over lines, beside what the rank computes.

Each rank sends and receives every number about twice, however many ranks there are: in a ring, a part of the tensor is summed up on its way
round, and goes round once more as the sum. So all ranks get the same bits.
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
    """This rank's part in the sums over `size` ranks of which it is number `rank`.

    `send` and `receive` start exchanges with the next rank of the ring and from the one before it. Sums are made one after another in a
    thread of their own, which starts with the first and ends with `close`, or when an exchange fails. It holds one tensor at a time.
    """

    def __init__(self, rank: int, size: int, send: Start, receive: Start) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ring = rank, size, send, receive

    def start(self, gather: Callable[[], Tensor], scatter: Callable[[Tensor], None]) -> _Sum:
        """Start a sum, as `Sums.start` says; both are called in the thread of the sums."""
        if self._thread is None:
            self._thread = threading.Thread(target=_work, args=(self._jobs, *self._ring), name="zerobubble-sums", daemon=True)
            self._thread.start()
        future: Future[tuple[int, int]] = Future()
        self._jobs.put(_Job(future, gather, scatter, current_stream()))
        return _Sum(future)

    def close(self) -> None:
        """Start no more. A sum under way ends when the connections close."""
        self._jobs.put(None)


class _Job(NamedTuple):
    """A sum to be made, on the stream of the thread that started it: its result is when it began and ended, by the host's clock."""

    future: Future[tuple[int, int]]
    take: Callable[[], Tensor]
    put: Callable[[Tensor], None]
    stream: Any


class _Sum:
    """A sum that has been started."""

    def __init__(self, future: Future[tuple[int, int]]) -> None:
        self._future = future

    @property
    def times(self) -> tuple[int, int]:
        """When it began and ended."""
        return self._future.result()

    def wait(self) -> None:
        """Return when the sum is there; raises `RuntimeError` when the connection is gone."""
        self._future.result()


@torch.no_grad()
def _work(jobs: SimpleQueue[_Job | None], rank: int, size: int, send: Start, receive: Start) -> None:
    failed: BaseException | None = None
    while (job := jobs.get()) is not None:
        try:
            if failed is not None:
                raise failed
            set_stream(job.stream)
            wait_for(job.stream)  # the host runs ahead of the device, and the sum begins when its gradients are there
            began = perf_counter_ns()
            tensor = job.take()
            _sum(tensor, rank, size, send, receive)
            job.put(tensor)
            wait_for(job.stream)
            del tensor
        except BaseException as error:  # noqa: BLE001 - it is raised where the sum is waited for
            failed = error
            job.future.set_exception(error)
        else:
            job.future.set_result((began, perf_counter_ns()))
        del job


def _sum(tensor: Tensor, rank: int, size: int, send: Start, receive: Start) -> None:
    """Turn `tensor` into the sum: its parts go round while every rank adds its own, and then as they are."""
    parts = tensor.tensor_split(size)
    for turn in range(size - 1):
        part = parts[(rank - turn - 1) % size]
        room = torch.empty_like(part)
        _exchange(parts[(rank - turn) % size], room, send, receive)
        part += room
    for turn in range(size - 1):
        _exchange(parts[(rank - turn + 1) % size], parts[(rank - turn) % size], send, receive)


def _exchange(out: Tensor, into: Tensor, send: Start, receive: Start) -> None:
    works = [start(tensor) for start, tensor in ((send, out), (receive, into)) if tensor.numel()]
    for work in works:
        work.wait()
