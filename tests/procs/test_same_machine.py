"""Ranks test whether they share memory: if any two do not, all use gloo, and every rank reports it.

All ranks get the same answer.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import zerobubble as zb
from tests.device import cpu_only
from tests.procs.models import batch, build, loss_fn
from tests.procs.ranks import Ranks
from tests.refusals import Stated, states
from tests.thinned import every
from zerobubble.runtime.transport import same_machine
from zerobubble.runtime.transport.same_machine import _Attempt

pytestmark = cpu_only("only messages between CPUs go through shared memory")
M = 4
LONGEST_S = 60.0
CLONE_NEWNET = 0x40000000


def train(group: Any, transport: str, around: Callable[[int], AbstractContextManager[object]]) -> tuple[float, str, str]:
    """The loss of the second step, and which transport the messages took and why."""
    with around(torch.distributed.get_rank(group)), zb.Pipeline(build, "zb-h1", M, loss_fn, group=group, transport=transport) as pipe:
        pipe.step(*batch(M))
        return pipe.step(*batch(M)).item(), pipe.transport.name, pipe.transport.why


@contextmanager
def folder_of_its_own(rank: int) -> Iterator[None]:
    """A temporary folder that no other rank has, of more than 100 characters on odd ranks, and that is not there on rank 0."""
    kept = tempfile.tempdir
    with tempfile.TemporaryDirectory(suffix="x" * 100 * (rank % 2)) as folder:
        tempfile.tempdir = os.path.join(folder, "missing") if rank == 0 else folder
        try:
            yield
        finally:
            tempfile.tempdir = kept


@pytest.mark.long
def test_temporary_folders_do_not_matter(world: Ranks) -> None:
    losses = set()
    for loss, name, why in world.run(train, "auto", folder_of_its_own, ranks=4):
        assert (name, why) == ("shared-memory", "all ranks that exchange messages share memory")
        losses.add(loss)
    for loss, name, why in world.run(train, "gloo", folder_of_its_own, ranks=4):
        assert (name, why) == ("gloo", "as requested")
        losses.add(loss)
    assert len(losses) == 1


@contextmanager
def on_rank(rank: int, wanted: int, patch: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    with ExitStack() as stack:
        if rank == wanted:
            stack.enter_context(patch())
        yield


def unsupported(rank: int) -> AbstractContextManager[object]:
    return on_rank(rank, 2, lambda: mock.patch.object(same_machine, "is_supported", return_value=False))


def no_memory(rank: int) -> AbstractContextManager[object]:
    return on_rank(rank, 1, lambda: mock.patch.object(os, "memfd_create", side_effect=PermissionError(1, "Operation not permitted")))


def no_descriptors(rank: int) -> AbstractContextManager[object]:
    """Rank 1 is given no descriptors, as by a sandbox that lets none through."""

    def without(end: socket.socket, size: int, count: int) -> Any:
        return end.recv(size), [], 0, None

    return on_rank(rank, 1, lambda: mock.patch.object(socket, "recv_fds", without))


def another_user(rank: int) -> AbstractContextManager[object]:
    return on_rank(rank, 3, lambda: mock.patch.object(os, "geteuid", return_value=12345))


def other_network(rank: int) -> AbstractContextManager[object]:
    """Rank 1 listens and calls in a network namespace of its own; its other connections stay where they are."""
    libc = ctypes.CDLL(None, use_errno=True)
    listen, stop = _Attempt.listen, _Attempt.stop_listening

    def listen_elsewhere(attempt: _Attempt) -> Any:
        attempt.home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)  # type: ignore[attr-defined]
        assert libc.unshare(CLONE_NEWNET) == 0
        return listen(attempt)

    def come_back(attempt: _Attempt) -> None:
        stop(attempt)
        assert libc.setns(attempt.home, CLONE_NEWNET) == 0  # type: ignore[attr-defined]
        os.close(attempt.home)  # type: ignore[attr-defined]

    @contextmanager
    def patched() -> Iterator[None]:
        with mock.patch.object(_Attempt, "listen", listen_elsewhere), mock.patch.object(_Attempt, "stop_listening", come_back):
            yield

    return on_rank(rank, 1, patched)


APART = [
    (unsupported, ("rank 2", "linux")),
    (no_memory, ("rank 1", "rank 0", "[Errno 1]", "1 more")),
    (no_descriptors, ("rank 1", "rank 0", "connected", "1 more")),
    (another_user, ("rank 3", "rank 2", "user")),
    pytest.param(
        other_network,
        ("rank 0", "rank 1", "[Errno 111]", "3 more"),
        marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a network namespace in a process with threads"),
    ),
]


@pytest.mark.sweep
@pytest.mark.parametrize(("around", "stated"), APART)
def test_ranks_that_share_no_memory_go_over_gloo_together(world: Ranks, around: Any, stated: Stated) -> None:
    (results,) = set(world.run(train, "auto", around, ranks=4))
    loss, name, why = results
    assert loss > 0
    assert name == "gloo"
    states(why, "memory", *stated)


def refused(group: Any, around: Callable[[int], AbstractContextManager[object]]) -> tuple[str, bool]:
    """The error, and whether it leaves descriptors, for longer than a backend's thread takes to close them."""
    gc.collect()  # pipelines of tests before this one
    torch.distributed.barrier(group)
    before = len(os.listdir("/proc/self/fd"))
    with around(torch.distributed.get_rank(group)), pytest.raises(zb.InputError) as caught:
        zb.Pipeline(build, "zb-h1", M, loss_fn, group=group, transport="shared-memory")
    end = time.monotonic() + LONGEST_S
    while (leaves_some := len(os.listdir("/proc/self/fd")) > before) and time.monotonic() < end:
        time.sleep(0.02)
    torch.distributed.barrier(group)
    return str(caught.value), leaves_some


@pytest.mark.parametrize(("around", "stated"), every(5, APART))
def test_requiring_shared_memory_names_the_pair_without_it(world: Ranks, around: Any, stated: Stated) -> None:
    ((text, leaves_some),) = set(world.run(refused, around, ranks=4))
    states(text, "shared-memory", *stated)
    assert text.endswith("; leave transport out, or pass 'gloo'")
    assert not leaves_some


def with_strangers(rank: int) -> AbstractContextManager[object]:
    """Strangers connect to rank 1 before its neighbors: one sends the wrong bytes, one sends nothing, and one disconnects."""
    listen = _Attempt.listen

    def overheard(attempt: _Attempt) -> Any:
        address = listen(attempt)
        for words in (b"x" * 24, b"", None):
            stranger = socket.socket(socket.AF_UNIX)
            stranger.connect(f"\0{address.name}")
            if words:
                stranger.sendall(words)
            if words is None:
                stranger.close()
            STRANGERS.append(stranger)
        return address

    return on_rank(rank, 1, lambda: mock.patch.object(_Attempt, "listen", overheard))


STRANGERS: list[socket.socket] = []


def test_strangers_are_turned_away(world: Ranks) -> None:
    for _, name, why in world.run(train, "auto", with_strangers, ranks=4):
        assert name == "shared-memory", why
    world.run(forget_strangers, ranks=4)


def forget_strangers(group: Any) -> None:
    for stranger in STRANGERS:
        stranger.close()
    STRANGERS.clear()


def listening(group: Any) -> tuple[bool, bool, list[str]]:
    """Whether a name shows its owner while ranks connect, whether it is there afterwards, and what was logged."""
    own = f"@zerobubble-{os.getpid()}-{torch.distributed.get_rank(group)}-"
    during = []
    call = _Attempt.call

    def look(attempt: _Attempt) -> list[str]:
        during.append(own in Path("/proc/net/unix").read_text())
        return call(attempt)

    lines: list[str] = []
    handler, log = logging.Handler(), logging.getLogger("zerobubble")
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    with mock.patch.object(_Attempt, "call", look):
        zb.Pipeline(build, "zb-h1", M, loss_fn, group=group).close()
    log.setLevel(logging.NOTSET)
    log.removeHandler(handler)
    return all(during), own in Path("/proc/net/unix").read_text(), lines


def test_nothing_with_a_name_is_left(world: Ranks) -> None:
    line = "messages between stages go over shared-memory: all ranks that exchange messages share memory"
    for rank, (was_there, is_there, lines) in enumerate(world.run(listening, ranks=4)):
        assert was_there
        assert not is_there
        assert lines == ([line] if rank == 0 else [])
