"""The network between hosts: it takes packets from one host's interface and gives them to another's, later, or never.

Linux can do this by itself with `tc netem`, which few containers have. So each host has an interface (TUN) whose packets this program
reads: `python -m tests.procs.hosts.cable DELAY JITTER LOSS PID ...`, with milliseconds, a share of packets and a process in the network
namespace of each host. It says "ready", and then obeys lines such as `cut 1` and `mend 1` until its input ends.

Packets that are late by different times overtake each other, as on a network with several ways. The draws follow from one seed.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import sys
import time

INTERFACE = "eth0"
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
_LONGEST_PACKET = 1 << 16
_DESTINATION = slice(16, 20)
"""Where the address of the receiver stands in an IPv4 packet."""


def address_of(host: int) -> str:
    """The address of a host, by its number from 0."""
    return f"10.77.0.{host + 1}"


def enter(namespace: str, kind: int) -> None:
    """Go into the namespace that a file of /proc stands for, of this kind (CLONE_NEW...); raises `OSError` where that is not allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(namespace, os.O_RDONLY)
    try:
        if libc.setns(descriptor, kind):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    finally:
        os.close(descriptor)


def interface_in(pid: int, host: int) -> int:
    """A descriptor that gives what is sent over a new interface of the namespace of process `pid`, and takes what comes."""
    home = f"/proc/{os.getpid()}/ns/net"
    kept = os.open(home, os.O_RDONLY)
    enter(f"/proc/{pid}/ns/net", _CLONE_NEWNET)
    try:
        tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", INTERFACE.encode(), _IFF_TUN | _IFF_NO_PI))
        for words in (f"addr add {address_of(host)}/24 dev {INTERFACE}", f"link set {INTERFACE} up", "link set lo up"):
            subprocess.run(["ip", *words.split()], check=True)
    finally:
        enter(f"/proc/self/fd/{kept}", _CLONE_NEWNET)
        os.close(kept)
    return tun


class Cable:
    """Carries packets between hosts, each with a descriptor, `delay` to `delay + jitter` seconds late, but for the share `loss`."""

    def __init__(self, hosts: list[int], delay: float, jitter: float, loss: float) -> None:
        self._hosts = hosts
        self._delay, self._jitter, self._loss = delay, jitter, loss
        self._draw = random.Random(0)
        self._cut: set[int] = set()
        self._late: list[tuple[float, int, int, bytes]] = []
        self._taken = 0

    def carry(self) -> None:
        """Until the input ends."""
        while True:
            left = max(0.0, self._late[0][0] - time.monotonic()) if self._late else None
            ready, _, _ = select.select([0, *self._hosts], [], [], left)
            for descriptor in ready:
                if descriptor:
                    self._take(descriptor)
                elif not self._obeys(os.read(0, 100).decode()):
                    return
            self._give()

    def _obeys(self, lines: str) -> bool:
        for line in lines.splitlines():
            order, host = line.split()
            (self._cut.add if order == "cut" else self._cut.discard)(int(host))
            print(line, flush=True)
        return bool(lines)

    def _take(self, descriptor: int) -> None:
        packet = os.read(descriptor, _LONGEST_PACKET)
        source, target = self._hosts.index(descriptor), packet[_DESTINATION][-1] - 1
        is_ipv4 = packet[0] >> 4 == 4
        if not is_ipv4 or not 0 <= target < len(self._hosts) or self._cut & {source, target} or self._draw.random() < self._loss:
            return
        self._taken += 1
        heapq.heappush(self._late, (time.monotonic() + self._delay + self._jitter * self._draw.random(), self._taken, target, packet))

    def _give(self) -> None:
        while self._late and self._late[0][0] <= time.monotonic():
            _, _, target, packet = heapq.heappop(self._late)
            try:
                os.write(self._hosts[target], packet)
            except OSError:  # the interface is down, or its queue is full: the packet is lost, as on a network
                continue


def main() -> None:
    delay, jitter, loss = (float(word) for word in sys.argv[1:4])
    hosts = [interface_in(int(pid), host) for host, pid in enumerate(sys.argv[4:])]
    print("ready", flush=True)
    Cable(hosts, delay / 1e3, jitter / 1e3, loss).carry()


if __name__ == "__main__":
    main()
