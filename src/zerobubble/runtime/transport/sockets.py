"""Finds the sockets between this rank and others, so that they can be shut down from outside the backend that uses them.

A backend of torch does not expose its sockets. They are among those that this process has opened while the backend was constructed. Of
these, a socket belongs to the backend if another rank of the pipeline reports the same two ends: a socket that another thread opened
meanwhile leads elsewhere. Without Linux's /proc no sockets are known. Connections then end with the last process that holds them.

Shutting a socket down, unlike closing its descriptor, ends the connection for every process that holds it, and wakes gloo's thread.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from itertools import chain
from typing import ClassVar, NamedTuple

_OPEN, _TABLES = "/proc/self/fd", ("/proc/self/net/tcp", "/proc/self/net/tcp6")
_LOCAL, _REMOTE, _INODE = 1, 2, 9
"""Columns of Linux's tables of TCP connections."""
_FLUSH_S, _POLL_S = 0.5, 0.001
"""How long peers may take to close their ends after a half-close, and how often this rank polls."""


class HeldSocket(NamedTuple):
    """A socket of this process. Its inode shows whether the descriptor is still this socket's, or was closed and reused."""

    descriptor: int
    inode: int


class NewConnections:
    """A context that finds the TCP connections that this process opens in it; `found` then has their descriptors by their ends.

    If two such contexts overlap in time, their connections cannot be distinguished, and both find none.
    """

    _running: ClassVar[list[NewConnections]] = []

    def __init__(self) -> None:
        self.found: dict[str, int] = {}
        self._before: dict[int, int] = {}
        self._is_alone = True

    def __enter__(self) -> NewConnections:
        self._running.append(self)
        if len(self._running) > 1:
            for running in list(self._running):
                running._is_alone = False
        self._before = _open_sockets()
        return self

    def __exit__(self, *_: object) -> None:
        self._running.remove(self)
        if self._is_alone:
            opened = {inode: descriptor for inode, descriptor in _open_sockets().items() if inode not in self._before}
            self.found = {ends: opened[inode] for inode, ends in _connections().items() if inode in opened}


class PeerSockets:
    """The sockets of a transport, by the rank at their other end."""

    def __init__(self) -> None:
        self._held: dict[int, list[HeldSocket]] = {}

    def add(self, peer: int, descriptor: int) -> None:
        """Adds a socket that leads to `peer`. Programs that this process starts do not inherit it."""
        os.set_inheritable(descriptor, False)
        self._held.setdefault(peer, []).append(HeldSocket(descriptor, os.fstat(descriptor).st_ino))

    def claim(self, connections: Mapping[str, int], reported: Mapping[int, Collection[str]]) -> None:
        """Adds the `connections` of this rank that another rank has `reported`, too."""
        for peer, theirs in reported.items():
            for ends in set(theirs) & set(connections):
                self.add(peer, connections[ends])

    def disconnect(self, peer: int | None = None) -> None:
        """Shuts down the connections to `peer`, or to all, as if the other ends had closed: waits at either end raise at once.

        This also ends them for other processes that hold the sockets. May be called from any thread.
        """
        of_peers = list(self._held.values()) if peer is None else [self._held.get(peer, [])]  # a copy: another thread may add some
        for connection in list(chain.from_iterable(of_peers)):
            with suppress(OSError):
                _shut_down(connection)

    def end(self) -> None:
        """Half-closes every connection, and waits a moment until the backends of the peers have closed their ends.

        Until then, writes of the peers still succeed. They must: if a write fails, gloo's `Pair::sendAsyncMode` queues that message only
        after it has passed the error to all others, and a wait for that message lasts until the timeout.
        """
        connections = list(chain.from_iterable(list(self._held.values())))
        for connection in connections:
            with suppress(OSError):
                _shut_down(connection, socket.SHUT_WR)
        until = time.monotonic() + _FLUSH_S
        while any(map(_is_open, connections)) and time.monotonic() < until:
            time.sleep(_POLL_S)

    def close_in_child(self) -> None:
        """Closes this process's descriptors after a fork; the connections themselves stay open."""
        for connection in chain.from_iterable(self._held.values()):
            with suppress(OSError):
                if os.fstat(connection.descriptor).st_ino == connection.inode:
                    os.close(connection.descriptor)
        self._held.clear()

    def clear(self) -> None:
        """Forgets all sockets."""
        self._held.clear()


def _is_open(held: HeldSocket) -> bool:
    """Returns whether the backend still has a socket open: it closes a socket once the peer has half-closed it."""
    try:
        return os.fstat(held.descriptor).st_ino == held.inode
    except OSError:
        return False


def _shut_down(held: HeldSocket, how: int = socket.SHUT_RDWR) -> None:
    """Shuts a socket down, unless its descriptor was reused."""
    # Work on a duplicate: another thread may close the descriptor between the check and the shutdown, and its number may be reused.
    descriptor = os.dup(held.descriptor)
    if os.fstat(descriptor).st_ino != held.inode:
        os.close(descriptor)
        return
    with socket.socket(fileno=descriptor) as copy:
        copy.shutdown(how)


def _open_sockets() -> dict[int, int]:
    """Returns the descriptors of this process's sockets by their inodes."""
    descriptors = {}
    with suppress(OSError):
        for name in os.listdir(_OPEN):
            with suppress(OSError):
                target = os.readlink(os.path.join(_OPEN, name))
                if target.startswith("socket:["):
                    descriptors[int(target[len("socket:[") : -1])] = int(name)
    return descriptors


def _connections() -> dict[int, str]:
    """Returns the two ends of every TCP connection of this machine by its inode, in a form that is the same seen from either end."""
    ends = {}
    for table in _TABLES:
        with suppress(OSError), open(table) as rows:
            next(rows, "")
            for row in rows:
                columns = row.split()
                ends[int(columns[_INODE])] = " ".join(sorted((columns[_LOCAL], columns[_REMOTE])))
    return ends
