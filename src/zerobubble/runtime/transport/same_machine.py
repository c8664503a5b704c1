"""Whether ranks can share memory, which is found out by trying: every pair that exchanges messages connects, or none does.

Ranks on one machine may still be kept apart, by containers, namespaces or a sandbox, and none of this can be told from names. So each rank
listens on a socket, the others connect to it and hand over a piece of memory, and all hear of the outcome.

The sockets have abstract names, which need no folder and vanish with their process. Such a name has no permissions: anyone in the network
namespace may see it and connect. So each end looks for the user that the kernel says is at the other end, and for a secret that the ranks
have told each other over their own connections.
"""

from __future__ import annotations

import mmap
import os
import platform
import secrets
import socket
import struct
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from zerobubble.program import Channel
from zerobubble.runtime.transport.endpoint import Endpoint
from zerobubble.runtime.transport.gather import gather_objects
from zerobubble.runtime.transport.wake_up import Connection

_SECRET_BYTES = 16
_HELLO = struct.Struct(f"<{_SECRET_BYTES}sq")
"""How a sender begins: the secret of the receiver, and the channel by its place in the list."""
_STRANGERS = 16
"""Connections of others that may wait beside those of ranks."""
_CREDENTIALS = struct.Struct("3i")
"""What the kernel says of the process at the other end: its id, its user and its group."""


class _Address(NamedTuple):
    """Where a rank listens, and the secret by which it is known; `fault` says why it has none."""

    name: str
    secret: bytes
    fault: str


class NoSharedMemoryError(Exception):
    """Some pair of ranks cannot share memory; the text, the same on every rank, says which and why."""


def is_supported() -> bool:
    """Whether this machine can pass messages through shared memory, and its processors keep the order of stores that a ring needs."""
    return sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64")


def connect_all(topics: Endpoint, channels: Sequence[Channel], timeout: float) -> dict[Channel, Connection]:
    """This rank's connections for the channels that begin or end here; every rank of `topics` calls it with the same channels.

    Raises `NoSharedMemoryError` on every rank where one of them cannot be made, and `RuntimeError` when not all ranks come.
    """
    attempt = _Attempt(topics.group.rank, channels, timeout)
    try:
        attempt.addresses = gather_objects(topics, attempt.listen())
        _refuse([f"rank {rank} {address.fault}" for rank, address in enumerate(attempt.addresses) if address.fault])
        for act in (attempt.call, attempt.answer):  # all have called before anyone answers, so that nobody waits
            _refuse([fault for faults in gather_objects(topics, act()) for fault in faults])
    except BaseException:
        attempt.disconnect()
        raise
    finally:
        attempt.stop_listening()
    return attempt.connections


def _refuse(faults: list[str]) -> None:
    if faults:
        more = f", and {len(faults) - 1} more" if len(faults) > 1 else ""
        raise NoSharedMemoryError(f"{faults[0]}{more}")


class _Attempt:
    """What one rank does to connect. Nothing of it waits: who calls need not be answered, and who answers has been called."""

    def __init__(self, rank: int, channels: Sequence[Channel], timeout: float) -> None:
        self.connections: dict[Channel, Connection] = {}
        self.addresses: list[_Address] = []
        self._rank = rank
        self._channels = channels
        self._timeout = timeout
        self._listener: socket.socket | None = None

    def listen(self) -> _Address:
        """Be there for the senders of the channels that end here."""
        secret = secrets.token_bytes(_SECRET_BYTES)
        name = f"zerobubble-{os.getpid()}-{self._rank}-{secrets.token_hex(8)}"
        if not is_supported():
            return _Address("", secret, f"runs on {sys.platform} with {platform.machine()} processors, and needs Linux with x86-64")
        try:
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.setblocking(False)
            self._listener.bind(f"\0{name}")
            self._listener.listen(len(self._channels) + _STRANGERS)
        except OSError as error:
            return _Address("", secret, f"cannot listen on a socket ({error})")
        return _Address(name, secret, "")

    def call(self) -> list[str]:
        """Connect to the receivers of the channels that begin here; what went wrong."""
        faults = []
        for number, channel in enumerate(self._channels):
            if channel.source == self._rank:
                end = socket.socket(socket.AF_UNIX)
                try:
                    self._call(end, number, channel)
                except OSError as error:
                    end.close()
                    faults.append(f"rank {self._rank} cannot reach rank {channel.destination} ({error})")
        return faults

    def _call(self, end: socket.socket, number: int, channel: Channel) -> None:
        theirs = self.addresses[channel.destination]
        end.setblocking(False)
        end.connect(f"\0{theirs.name}")
        if not _is_same_user(end):
            raise OSError("another user listens there")
        page = os.memfd_create(f"zerobubble {os.getpid()} rank {self._rank}")
        wake_up = os.eventfd(0, os.EFD_CLOEXEC)
        try:
            os.write(page, self.addresses[self._rank].secret)
            socket.send_fds(end, [_HELLO.pack(theirs.secret, number)], [wake_up, page])
        except OSError:
            os.close(wake_up)
            raise
        finally:
            os.close(page)
        self.connections[channel] = Connection(end, wake_up, self._timeout, wakes=False)

    def answer(self) -> list[str]:
        """Take the connections of the channels that end here, all of which have been made; what is missing."""
        for end in self._callers():
            end.setblocking(False)
            if not self._is_taken(end):
                end.close()
        missing = [channel for channel in self._channels if channel.destination == self._rank and channel not in self.connections]
        return [f"rank {self._rank} shares no memory with rank {channel.source}, which has connected to it" for channel in missing]

    def _callers(self) -> Iterator[socket.socket]:
        """Whoever has connected so far, strangers too."""
        assert self._listener is not None
        while True:
            try:
                yield self._listener.accept()[0]
            except OSError:
                return

    def _is_taken(self, end: socket.socket) -> bool:
        """Whether this is a rank, whose memory can be read here."""
        try:
            hello, descriptors, _, _ = socket.recv_fds(end, _HELLO.size, 2)
        except OSError:
            return False
        channel = self._channel_of(end, hello, descriptors)
        for descriptor in descriptors[0 if channel is None else 1 :]:
            os.close(descriptor)
        if channel is not None:
            self.connections[channel] = Connection(end, descriptors[0], self._timeout, wakes=True)
        return channel is not None

    def _channel_of(self, end: socket.socket, hello: bytes, descriptors: list[int]) -> Channel | None:
        """The channel of a sender that proves to be one; None for anyone else."""
        if len(hello) != _HELLO.size or len(descriptors) != 2 or not _is_same_user(end):
            return None
        secret, number = _HELLO.unpack(hello)
        if not secrets.compare_digest(secret, self.addresses[self._rank].secret) or not 0 <= number < len(self._channels):
            return None
        channel = self._channels[number]
        read = _read_shared(descriptors[1])
        is_new = channel.destination == self._rank and channel not in self.connections
        return channel if is_new and read == self.addresses[channel.source].secret else None

    def stop_listening(self) -> None:
        """Close the socket to which the others connect."""
        if self._listener is not None:
            self._listener.close()

    def disconnect(self) -> None:
        """Close all connections."""
        for connection in self.connections.values():
            connection.close()


def _is_same_user(end: socket.socket) -> bool:
    """Whether the process at the other end of a socket is of this process's user."""
    told = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(told)[1] == os.geteuid())


def _read_shared(descriptor: int) -> bytes:
    """The secret that another rank has written into its memory; b"" where that cannot be seen."""
    try:
        with mmap.mmap(descriptor, _SECRET_BYTES, prot=mmap.PROT_READ) as page:
            return page[:]
    except (OSError, ValueError):
        return b""
