"""Starts the reduction of an FSDP2 parameter group, and waits for it later.

FSDP2 reduces the gradients of a parameter group in `post_backward`: it copies them into one buffer, runs a reduce-scatter, and writes the
result into the `.grad` of the shards. On a GPU, all of this is enqueued on separate streams. On the CPU it blocks, so it runs in a thread.
The caller continues only when the thread has issued its collective. This order matters: collectives of one process group must be issued in
the same order on all ranks, and the calling order is the same on all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from time import perf_counter_ns
from typing import Any, Protocol

import torch

from zerobubble.runtime.device import interface, is_host
from zerobubble.runtime.measure.clock import Instant


class Reduction(Protocol):
    """A started reduction.

    `times` are its begin, after the end of the reduction before, and its end, on the clock of the group's device; None if they are unknown.
    They are set once it `is_over`.
    """

    times: tuple[Instant, Instant] | None

    @property
    def is_over(self) -> bool:
        """Whether `wait` would return immediately."""

    def wait(self) -> None:
        """Waits until it is over, and reraises its error."""


def start_reduction(group: Any, before: Reduction | None) -> Reduction:
    """Starts to reduce the gradients of `group`, an FSDP2 parameter group; it ends after `before`, an earlier reduction."""
    if not is_host(group.device):
        return _Enqueued(group)
    if not hasattr(group, "_reduce_scatter_comm"):
        # This version of torch has no hook at the collective, so the reduction blocks.
        return _WaitedFor(group)
    return _InThread(group, before)


class _Enqueued:
    """A reduction on a device stream, overlapped with passes. The device waits for it when FSDP2 ends the backward pass.

    Its times begin with the reduce-scatter. They end with it or, if weights are replicated as well as sharded, with the all-reduce that
    FSDP2 enqueues on another stream.
    """

    times: tuple[Instant, Instant] | None = None

    def __init__(self, group: Any) -> None:
        self._device = interface(group.device)
        with _sending_by(group, self._send):
            group.post_backward()
        if self.times is not None and hasattr(group.mesh_info, "replicate_process_group"):
            with self._device.on_stream(group.comm_ctx.all_reduce_stream):
                self.times[1].record()
        self._event: torch.Event | None = group._post_reduce_event

    def _send(self, send: Send) -> None:
        """Runs the reduce-scatter between two events on FSDP2's stream, which is the current one here."""
        begin, end = (self._device.new_event(timed=True) for _ in range(2))
        begin.record()
        send()
        end.record()
        self.times = begin, end

    @property
    def is_over(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """Returns immediately: the device waits, not the host."""


class _WaitedFor:
    """A blocking reduction, over when the constructor returns."""

    is_over = True

    def __init__(self, group: Any) -> None:
        began = perf_counter_ns()
        group.post_backward()
        self.times: tuple[Instant, Instant] | None = (began, perf_counter_ns())

    def wait(self) -> None:
        """Returns immediately."""


class _InThread:
    """A reduction in its own thread. The constructor returns when the collective is issued."""

    times: tuple[Instant, Instant] | None = None

    def __init__(self, group: Any, before: Reduction | None) -> None:
        self._on_its_way = threading.Event()
        self._over = threading.Event()
        self._before = before
        self._failed: BaseException | None = None
        # A daemon: if another rank has failed, the collective may never complete.
        threading.Thread(target=self._run, args=(group,), name="zerobubble-reduction", daemon=True).start()
        self._on_its_way.wait()

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    def wait(self) -> None:
        self._over.wait()
        if self._failed is not None:
            raise self._failed

    def _run(self, group: Any) -> None:
        self._began = perf_counter_ns()
        try:
            with _sending_by(group, self._send):
                group.post_backward()
                self._wait_for_turn()
        except BaseException as error:  # noqa: BLE001 - reraised in `wait`
            self._failed = error
        finally:
            self.times = (self._began, perf_counter_ns())
            self._over.set()
            self._on_its_way.set()

    def _send(self, send: Send) -> None:
        work = send(async_op=True)
        self._on_its_way.set()
        if work is not None:
            work.wait()
        self._wait_for_turn()

    def _wait_for_turn(self) -> None:
        """Waits for the reduction before: FSDP2 expects gradients to be written one after another, and follow-up messages in that order."""
        if self._before is not None:
            self._before.wait()
            if self._before.times is not None:
                self._began = max(self._began, self._before.times[1])
            self._before = None


Send = Callable[..., Any]
"""FSDP2's reduce-scatter with its arguments."""


class _Sending:
    """Replaces FSDP2's reduce-scatter `send`. `call` receives `send` and its arguments."""

    def __init__(self, send: Any, call: Callable[[Send], None]) -> None:
        self.allocate = send.allocate
        self._send = send
        self._call = call

    def __call__(self, **arguments: Any) -> None:
        self._call(partial(self._send, **arguments))


@contextmanager
def _sending_by(group: Any, call: Callable[[Send], None]) -> Iterator[None]:
    """A context in which `call` runs the reduce-scatter of a parameter group, if this version of torch has a hook for it."""
    send = getattr(group, "_reduce_scatter_comm", None)
    if send is None:
        yield
        return
    group._reduce_scatter_comm = _Sending(send, call)
    try:
        yield
    finally:
        group._reduce_scatter_comm = send
