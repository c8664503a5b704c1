"""A rank that fails aborts its communicators and has the others abort theirs: they end in bounded time, not at NCCL's timeout.

The communicators here emulate NCCL's: a rank that waits for a message keeps waiting, even if the sender dies, until its own communicators
are aborted. Then it continues with an undefined tensor.

An aborted step raises an error.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zerobubble as zb
from tests.device import cpu_only
from tests.procs.models import InBackward, batch, build, loss_fn
from tests.procs.ranks import Ranks
from zerobubble.runtime.transport import choice
from zerobubble.runtime.transport.abort import Abort
from zerobubble.runtime.transport.endpoint import Capabilities
from zerobubble.runtime.transport.nccl import NcclEndpoint

pytestmark = [pytest.mark.ranks_wait, pytest.mark.long]

NCCL_TIMEOUT_S = 200.0
REPORTED_S = 100.0
M = 4
KEPT: list[Any] = []
"""Connections that stay open though their communicators were aborted: in NCCL, too, nobody at the other end hears of an abort."""


class _Kernel:
    """A message in flight: a wait for it ends when it arrives or when its communicator is aborted."""

    def __init__(self, communicator: Communicator, work: Any) -> None:
        self._communicator, self._has_come = communicator, threading.Event()
        threading.Thread(target=self._receive, args=(work,), daemon=True).start()

    def _receive(self, work: Any) -> None:
        with suppress(RuntimeError):  # the process ends
            work.wait()
            self._has_come.set()

    def wait(self) -> None:
        end = time.monotonic() + NCCL_TIMEOUT_S
        while not self._communicator.is_aborted and not self._has_come.wait(0.001):
            if time.monotonic() > end:
                raise RuntimeError("timed out")


class Communicator:
    """The part of ProcessGroupNCCL that an endpoint uses, over a gloo backend whose connections outlive it."""

    log: tuple[list[str], ...] = ([],)

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._gloo = dist.distributed_c10d.ProcessGroupGloo(store, rank, size, timeout=timedelta(seconds=NCCL_TIMEOUT_S))
        KEPT.append(self._gloo)
        self.is_aborted = False

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> _Kernel:
        return _Kernel(self, self._gloo.send(tensors, peer, tag))

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> _Kernel:
        tensors[0].zero_()
        return _Kernel(self, self._gloo.recv(tensors, peer, tag))

    def abort(self) -> None:
        self.is_aborted = True
        self.log[0].append("abort")

    def _group_start(self) -> None:
        self.log[0].append("start")

    def _group_end(self) -> None:
        self.log[0].append("end")


class Rehearsed(NcclEndpoint):
    """The endpoint for CUDA devices, with communicators that need no device."""

    name = "rehearsed"
    capabilities = Capabilities()

    def backend(self, name: str, members: Any = None, most: int | None = None) -> Communicator:
        rank, size, store, *_ = self.group
        return Communicator(dist.distributed_c10d.PrefixStore(name, store), rank, size)


class Failing(torch.nn.Module):
    """A stage whose backward pass raises at call number `at`."""

    def __init__(self, inner: torch.nn.Module, at: int) -> None:
        super().__init__()
        self.inner, self.left = inner, at

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = InBackward.apply(self.inner(x), self.count)
        return y

    def count(self, dy: Tensor) -> Tensor:
        self.left -= 1
        if not self.left:
            raise ValueError("boom")
        return dy


class Report(NamedTuple):
    """The error that a rank raised, the seconds since the step began, and the state of its communicators."""

    kind: str
    text: str
    rank: int | None
    seconds: float
    log: list[str]


def fail(group: Any, culprit: int) -> Report:
    """Train two steps; in the second, the stage of rank `culprit` fails in its second backward pass."""
    choice.MAKERS["rehearsed"] = lambda topics: Rehearsed(topics.group, topics.timeout)
    Communicator.log[0].clear()
    rank = dist.get_rank(group)

    def made(stage: int, num_stages: int) -> torch.nn.Module:
        inner = build(stage, num_stages)
        return Failing(inner, M + 2) if rank == culprit else inner

    pipe = zb.Pipeline(made, "1f1b", M, loss_fn, group=group, transport="rehearsed", timeout=NCCL_TIMEOUT_S)
    pipe.step(*batch(M))
    began = time.monotonic()
    try:
        pipe.step(*batch(M))
    except zb.PipelineError as error:
        return Report(type(error).__name__, str(error), error.rank, time.monotonic() - began, list(Communicator.log[0]))
    return Report("", "", None, time.monotonic() - began, list(Communicator.log[0]))


@cpu_only("the transport is a stand-in for NCCL with tensors on CPUs")
def test_ranks_that_wait_for_a_device_end_soon_after_another_fails(world: Ranks) -> None:
    """Rank 2 fails; 0, 1 and 3 wait for messages that never come, and learn of it through the store, so they abort."""
    found = world.run(fail, 2, ranks=4)
    for message in found:
        assert (message.kind, message.rank) == ("PipelineError", 2), found
        assert "ValueError: boom" in message.text
        assert message.seconds < REPORTED_S, found
        assert message.log == ["start", *["abort"] * 4, "end"], "all are aborted, as one group of calls, and once"
    assert len({message.text for message in found}) == 1


def close_in_order(group: Any) -> list[str]:
    choice.MAKERS["rehearsed"] = lambda topics: Rehearsed(topics.group, topics.timeout)
    Communicator.log[0].clear()
    with zb.Pipeline(build, "zb-h1", M, loss_fn, group=group, transport="rehearsed") as pipe:
        pipe.step(*batch(M))
    return list(Communicator.log[0])


@cpu_only("the transport is a stand-in for NCCL with tensors on CPUs")
def test_who_closes_in_order_aborts_nothing(world: Ranks) -> None:
    assert world.run(close_in_order, ranks=4) == [[]] * 4


class _Stuck(Communicator):
    """A communicator whose abort waits for ranks that never come."""

    def __init__(self) -> None:
        self.is_aborted = False

    def abort(self) -> None:
        time.sleep(60)


def test_an_abort_that_hangs_does_not_delay_the_error_for_long() -> None:
    abort = Abort()
    abort.add(_Stuck())
    abort.start()
    began = time.monotonic()
    abort.close()
    assert 2 < time.monotonic() - began < 30
