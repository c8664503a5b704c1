"""The sockets between this rank and others, by the rank at the other end, so that they can be ended from outside of who uses them.

A backend of torch shows its sockets to nobody. They are among those that this process has open after the backend was made and had not
before, and they are the backend's where another rank of the pipeline names the same two ends: what another thread opens meanwhile leads
elsewhere. Where that cannot be told, as without Linux's /proc, nothing is known, and connections end when the last process that holds them
does.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import ClassVar, NamedTuple

_OPEN, _TABLES = "/proc/self/fd", ("/proc/self/net/tcp", "/proc/self/net/tcp6")
_LOCAL, _REMOTE, _INODE = 1, 2, 9
"""Columns of Linux's tables of TCP connections."""
_HEARD_S, _POLL_S = 0.5, 0.001
"""How long those at the other ends may take to hear that no more comes, and how often this rank looks."""


class HeldSocket(NamedTuple):
    """A socket of this process. Its inode tells whether the descriptor is still this socket's, or was closed and given to another file."""

    descriptor: int
    inode: int


class NewConnections:
    """A context that finds the TCP connections which this process opens inside; afterwards `found` has their descriptors by their ends.

    Where two such contexts overlap in time, nobody knows whose connections are whose, and both find none.
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
        """Know this socket as one that leads to `peer`. A program that this process starts does not inherit it."""
        os.set_inheritable(descriptor, False)
        self._held.setdefault(peer, []).append(HeldSocket(descriptor, os.fstat(descriptor).st_ino))

    def claim(self, found: Mapping[str, int], told: Sequence[Collection[str]], rank: int) -> None:
        """Know those of the connections `found` on this `rank` that another rank has `told` of, too."""
        for peer, theirs in enumerate(told):
            for ends in set(theirs) & set(found) if peer != rank else ():
                self.add(peer, found[ends])

    def disconnect(self, peer: int | None = None) -> None:
        """End the connections to `peer`, or to all, as if the other ends were closed: whoever waits at either end gets an error at once.

        Other processes may hold the sockets, too; their connections end as well. May be called from any thread.
        """
        held = list(self._held.values()) if peer is None else [self._held.get(peer, [])]  # another thread may add some
        for each in [one for some in held for one in some]:
            with suppress(OSError):
                _shut_down(each)

    def end(self) -> None:
        """Tell every peer that no more comes, and wait a moment until its backend has closed its ends of the connections.

        Until then what peers write still arrives. Where a write fails instead, gloo's `Pair::sendAsyncMode` queues that message only after
        all others were told of the error, and whoever waits for that message to leave waits until the timeout.
        """
        for each in [one for some in list(self._held.values()) for one in some]:
            with suppress(OSError):
                _shut_down(each, socket.SHUT_WR)
        until = time.monotonic() + _HEARD_S
        while any(map(_is_open, [one for some in list(self._held.values()) for one in some])) and time.monotonic() < until:
            time.sleep(_POLL_S)

    def close_in_child(self) -> None:
        """Close this process's descriptors after it was forked; the connections themselves stay as they are."""
        for each in [one for some in self._held.values() for one in some]:
            with suppress(OSError):
                if os.fstat(each.descriptor).st_ino == each.inode:
                    os.close(each.descriptor)
        self._held.clear()

    def clear(self) -> None:
        """Forget all of them."""
        self._held.clear()


def _is_open(held: HeldSocket) -> bool:
    """Whether the backend has a socket open still: it closes those of which it has heard that no more comes."""
    try:
        return os.fstat(held.descriptor).st_ino == held.inode
    except OSError:
        return False


def _shut_down(held: HeldSocket, how: int = socket.SHUT_RDWR) -> None:
    """Shut a socket down if it still is what it was. The copy keeps others from closing it and taking its number meanwhile."""
    descriptor = os.dup(held.descriptor)
    if os.fstat(descriptor).st_ino != held.inode:
        os.close(descriptor)
        return
    with socket.socket(fileno=descriptor) as copy:
        copy.shutdown(how)


def _open_sockets() -> dict[int, int]:
    """The descriptors of this process's sockets by their inodes."""
    found = {}
    with suppress(OSError):
        for name in os.listdir(_OPEN):
            with suppress(OSError):
                target = os.readlink(os.path.join(_OPEN, name))
                if target.startswith("socket:["):
                    found[int(target[len("socket:[") : -1])] = int(name)
    return found


def _connections() -> dict[int, str]:
    """The two ends of every TCP connection of this machine by its inode, in a form that is the same seen from either end."""
    found = {}
    for table in _TABLES:
        with suppress(OSError), open(table) as rows:
            next(rows, "")
            for row in rows:
                columns = row.split()
                found[int(columns[_INODE])] = " ".join(sorted((columns[_LOCAL], columns[_REMOTE])))
    return found
