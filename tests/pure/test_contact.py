"""Distinguishes lost connections from local errors in an exchange; backends raise `RuntimeError` for both."""

from __future__ import annotations

import pytest
import torch

from zerobubble.runtime.transport.contact import EVERYBODY, TIMED_OUT, LostContactError, Waiting, exchanging
from zerobubble.runtime.transport.endpoint import PeerGoneError

OWN = [
    RecursionError("maximum recursion depth exceeded"),
    NotImplementedError("no such layout"),
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("can't start new thread"),
    RuntimeError("[enforce fail at device.cc] Too many open files"),
]
OTHERS = [
    (RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:7"), "Connection closed by peer [::1]:7"),
    (RuntimeError("Timed out waiting 2000ms for recv operation to complete"), TIMED_OUT),
    (PeerGoneError("no answer within 2 s"), TIMED_OUT),
    (PeerGoneError("the other rank said: CUDA error"), "the other rank said: CUDA error"),
]


class Fails:
    """A work that ends in an error."""

    def __init__(self, error: RuntimeError) -> None:
        self.error = error

    def wait(self) -> object:
        raise self.error


@pytest.mark.parametrize("error", OWN, ids=str)
def test_an_error_of_this_rank_alone_is_no_loss_of_contact(error: RuntimeError) -> None:
    waiting = Waiting()
    with pytest.raises(type(error)) as in_wait:
        waiting.wait(Fails(error), 1, "waiting")
    with pytest.raises(type(error)) as in_collective, waiting.collective("meeting"), exchanging():
        raise error
    assert in_wait.value is in_collective.value is error


@pytest.mark.parametrize(("error", "reason"), OTHERS, ids=str)
def test_an_exchange_that_fails_is_a_loss_of_contact(error: RuntimeError, reason: str) -> None:
    waiting = Waiting()
    with pytest.raises(LostContactError) as in_wait:
        waiting.wait(Fails(error), 1, "waiting")
    assert (in_wait.value.peer, in_wait.value.reason) == (1, reason)
    with pytest.raises(LostContactError) as in_collective, waiting.collective("meeting"), exchanging():
        raise error
    assert (in_collective.value.peer, in_collective.value.what) == (EVERYBODY, "meeting")
    assert in_collective.value.reason == reason


def test_what_a_rank_does_between_the_exchanges_of_a_collective_is_its_own() -> None:
    with pytest.raises(RuntimeError, match="it cannot be pickled"), Waiting().collective("meeting"):
        raise RuntimeError("it cannot be pickled")
