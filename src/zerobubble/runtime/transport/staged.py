"""Carries messages between accelerators through host memory: for ranks that share a GPU, which NCCL rejects, and for devices without NCCL.

A message is copied into pinned host memory on a stream of its own, sent over gloo, and copied to the receiver's device. The host waits for
incoming messages, so it cannot run ahead of the device as far as with NCCL; nothing else differs.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerobubble.program import Channel
from zerobubble.runtime.device import accelerator, interface, is_host
from zerobubble.runtime.transport.endpoint import Capabilities, Endpoint, Line
from zerobubble.runtime.transport.gloo import GlooEndpoint
from zerobubble.runtime.transport.work import Work


class StagedEndpoint(Endpoint):
    """Carries tensors of any device over the lines of `gloo`, through host memory.

    Copies to the host run on one stream in the order of the sends. A thread waits for each copy and then starts its send, so the rank's own
    thread does not wait for the device. On CPUs the copies are plain copies; tests use this without an accelerator.
    """

    name = "staged"

    def __init__(self, gloo: GlooEndpoint) -> None:
        self.group = gloo.group
        device = accelerator()
        self.capabilities = Capabilities(device_types=frozenset({"cpu"} if device is None else {"cpu", device.type}))
        self._gloo = gloo
        self._to_host: Callable[[Tensor], _Staged] = _on_host
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._failures: list[BaseException] = []
        self._end = weakref.finalize(self, self._jobs.put, None)

    def open(self, device: torch.device, channels: Sequence[Channel]) -> None:
        self._gloo.open(device, channels)
        if not is_host(device):
            self._to_host = _CopyStream(device)
        # The thread must not refer to this endpoint: it ends when the endpoint is dropped.
        failed = partial(_fail, self._failures, self._gloo)
        threading.Thread(target=_send, args=(self._jobs, failed), name="zerobubble-staged", daemon=True).start()

    def sender(self, line: Line) -> Callable[[Tensor], Work]:
        start = self._gloo.sender(line)

        def send(tensor: Tensor) -> Work:
            future: Future[Work] = Future()
            staged = self._to_host(tensor)
            self._jobs.put(_Job(future, start, staged))
            return _Sent(future, staged.host)

        return send

    def receiver(self, line: Line) -> Callable[[Tensor], Work]:
        start = self._gloo.receiver(line)

        def receive(tensor: Tensor) -> Work:
            host = interface(tensor.device).host_memory(tensor.shape, tensor.dtype)
            with _naming(self._failures):
                return _Received(start(host), host, tensor, self._failures)

        return receive

    def disconnect(self, rank: int) -> None:
        self._gloo.disconnect(rank)

    def detach(self) -> None:
        self._end.detach()
        self._gloo.detach()

    def close(self) -> None:
        self._end()
        self._gloo.close()


class _Staged(NamedTuple):
    """A copy in host memory, and the event that completes it, None if it is complete."""

    host: Tensor
    ready: Any


class _Job(NamedTuple):
    """A send that starts once its copy is complete; `future` gets the work."""

    future: Future[Work]
    start: Callable[[Tensor], Work]
    staged: _Staged


def _fail(failures: list[BaseException], gloo: GlooEndpoint, error: BaseException) -> None:
    """Ends the waits of this rank: the ranks that it waits for may in turn wait for the message that cannot be sent."""
    failures.append(error)
    for rank in gloo.group.ranks:
        if rank != gloo.group.rank:
            gloo.disconnect(rank)


@contextmanager
def _naming(failures: Sequence[BaseException]) -> Iterator[None]:
    """Raises the first of `failures` instead of the lost connection that it caused."""
    try:
        yield
    except RuntimeError:
        if failures:
            raise failures[0] from None
        raise


def _send(jobs: SimpleQueue[_Job | None], failed: Callable[[BaseException], None]) -> None:
    while (job := jobs.get()) is not None:
        try:
            if job.staged.ready is not None:
                job.staged.ready.synchronize()
            job.future.set_result(job.start(job.staged.host))
        except BaseException as error:  # noqa: BLE001 - `wait` raises it
            job.future.set_exception(error)
            failed(error)
        del job


def _on_host(tensor: Tensor) -> _Staged:
    return _Staged(tensor.detach().clone(), None)


class _CopyStream:
    """Copies a device's tensors to pinned memory, after the work that is on the current stream so far."""

    def __init__(self, device: torch.device) -> None:
        self._device = interface(device)
        self._stream = self._device.new_stream()

    def __call__(self, tensor: Tensor) -> _Staged:
        self._stream.wait_stream(self._device.current_stream())
        with torch.no_grad(), self._device.on_stream(self._stream):
            host = self._device.copy_on_host(tensor)
            ready = self._device.new_event()
            ready.record(self._stream)
        # The sender keeps `tensor` until the work is done. If the step fails first, its memory must still outlive the copy.
        self._device.keep_for(tensor, self._stream)
        return _Staged(host, ready)


class _Sent:
    """A send: complete once gloo has sent the copy, which stays alive until then."""

    def __init__(self, future: Future[Work], host: Tensor) -> None:
        self._future, self._host = future, host

    def wait(self) -> None:
        self._future.result().wait()


class _Received:
    """A receive into host memory; `wait` then copies it to the device on the current stream."""

    def __init__(self, work: Work, host: Tensor, tensor: Tensor, failures: Sequence[BaseException]) -> None:
        self._work, self._host, self._tensor, self._failures = work, host, tensor, failures

    def wait(self) -> None:
        with _naming(self._failures):
            self._work.wait()
        with torch.no_grad():
            self._tensor.copy_(self._host, non_blocking=True)
