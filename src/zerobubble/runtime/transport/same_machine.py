"""Finds out by trying whether ranks can share memory: every pair that exchanges messages connects, or none does.

Containers, namespaces or a sandbox may separate ranks of one machine, and no name shows it. So each rank listens on a socket, the others
connect to it and pass a descriptor of shared memory, and all ranks exchange the results.

The sockets have abstract names, which need no directory and vanish with their process. Such a name has no permissions: any process in the
network namespace can see it and connect. So each end checks the user that the kernel reports for the other end, and a secret that the
ranks have exchanged over their own connections.
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
"""The first message of a sender: the secret of the receiver, and the index of the channel."""
_STRANGERS = 16
"""Connections of other processes that may be pending in addition to those of ranks."""
_CREDENTIALS = struct.Struct("3i")
"""The kernel's record of the process at the other end: its id, user and group."""


class _Address(NamedTuple):
    """Where a rank listens, and its secret; `fault` says why it does not listen."""

    name: str
    secret: bytes
    fault: str


class NoSharedMemoryError(Exception):
    """Two ranks cannot share memory. The text, the same on every rank, says which ranks and why."""


def is_supported() -> bool:
    """Returns whether this machine can pass messages through shared memory, with processors that keep the order of stores (see `ring`)."""
    return sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64")


def connect_all(control: Endpoint, channels: Sequence[Channel], timeout: float) -> dict[Channel, Connection]:
    """Returns this rank's connections for the channels that begin or end here; every rank of `control` calls it with the same channels.

    Raises `NoSharedMemoryError` on every rank if one connection fails, and `RuntimeError` if a rank is missing.
    """
    attempt = _Attempt(control.group.rank, channels, timeout)
    try:
        attempt.addresses = dict(zip(control.group.ranks, gather_objects(control, attempt.listen()), strict=True))
        _refuse([f"rank {rank} {address.fault}" for rank, address in attempt.addresses.items() if address.fault])
        for act in (attempt.call, attempt.answer):  # the gather between them is a barrier: all have called before any rank answers
            _refuse([fault for faults in gather_objects(control, act()) for fault in faults])
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
    """One rank's part in connecting. No step blocks: the kernel completes `connect` without `accept`, and `accept` follows all of them."""

    def __init__(self, rank: int, channels: Sequence[Channel], timeout: float) -> None:
        self.connections: dict[Channel, Connection] = {}
        self.addresses: dict[int, _Address] = {}
        self._rank = rank
        self._channels = channels
        self._timeout = timeout
        self._listener: socket.socket | None = None

    def listen(self) -> _Address:
        """Listens for the senders of the channels that end here."""
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
        """Connects to the receivers of the channels that begin here; returns the faults."""
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
        """Accepts the connections of the channels that end here, all of which exist by now; returns what is missing."""
        for end in self._callers():
            end.setblocking(False)
            if not self._is_taken(end):
                end.close()
        missing = [channel for channel in self._channels if channel.destination == self._rank and channel not in self.connections]
        return [f"rank {self._rank} shares no memory with rank {channel.source}, which has connected to it" for channel in missing]

    def _callers(self) -> Iterator[socket.socket]:
        """Yields all connections so far, also of other processes."""
        assert self._listener is not None
        while True:
            try:
                yield self._listener.accept()[0]
            except OSError:
                return

    def _is_taken(self, end: socket.socket) -> bool:
        """Returns whether a connection comes from a rank with memory that is readable here, and accepts it if so."""
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
        """Returns the channel of an authenticated sender; None for any other process."""
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
        """Closes the socket to which the others connect."""
        if self._listener is not None:
            self._listener.close()

    def disconnect(self) -> None:
        """Closes all connections."""
        for connection in self.connections.values():
            connection.close()


def _is_same_user(end: socket.socket) -> bool:
    """Returns whether the process at the other end of a socket belongs to this process's user."""
    credentials = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.geteuid())


def _read_shared(descriptor: int) -> bytes:
    """Returns the secret that another rank has written into its memory; b"" if that is not readable here."""
    try:
        with mmap.mmap(descriptor, _SECRET_BYTES, prot=mmap.PROT_READ) as page:
            return page[:]
    except (OSError, ValueError):
        return b""
