"""Hosts as namespaces: each has a network, processes, a host name, and a /dev/shm of its own, and lives as long as the test holds it."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from tests.procs.hosts.cable import INTERFACE, address_of, enter

ROOT = Path(__file__).parents[3]
PORT = 29500
"""A host's ports are its own."""
_SPACES = {"net": 0x40000000, "uts": 0x04000000, "ipc": 0x08000000, "pid_for_children": 0x20000000, "mnt": 0x00020000}
"""The namespaces of a host, with their kinds. In the last one, /proc has the host's processes alone."""
_BE_HOST = "mount -t tmpfs none /dev/shm && hostname {name} && echo ready && exec cat"
_PR_SET_PDEATHSIG = 1


class Quality(NamedTuple):
    """What a cable does to packets: each comes `delay_ms` to `delay_ms + jitter_ms` late, but for the share `loss`, which is lost."""

    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    loss: float = 0.0


@cache
def why_not() -> str:
    """Why there can be no hosts here, empty where there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "only root on Linux can make hosts from namespaces"
    try:
        with Hosts(["host"], Quality()):
            return ""
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        return f"no hosts can be made from namespaces here: {error}"


class Hosts:
    """Hosts with these names, connected by a cable of this quality, for as long as the context lasts.

    Everything ends with this process, whatever ends it: a host lives while its input is open, its processes and interfaces live with it,
    and the cable ends with its input, too.
    """

    def __init__(self, names: Sequence[str], quality: Quality) -> None:
        self._names = names
        self._quality = quality
        self._stack = ExitStack()
        self._cable: Any = None
        self.pids: list[int] = []

    def __enter__(self) -> Hosts:
        with self._stack:
            self.pids = [self._start(["unshare", "--net", *_apart(name)]).pid for name in self._names]
            numbers = [*self._quality, *self.pids]
            self._cable = self._start([sys.executable, "-S", "-m", "tests.procs.hosts.cable", *map(str, numbers)])
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def _start(self, command: list[str]) -> subprocess.Popen[str]:
        """A process that says "ready" and ends with its input."""
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=os.environ
        )
        self._stack.callback(_end, process)
        assert process.stdout is not None
        assert process.stderr is not None
        if process.stdout.readline() != "ready\n":
            raise RuntimeError(f"{command[0]} failed: {process.stderr.read().strip()}")
        return process

    def container(self, host: int) -> int:
        """The process of a container on this host, as in a pod of Kubernetes: it has the host's network and name, all else is its own."""
        return self._start(["nsenter", "-t", str(self.pids[host]), "--net", "unshare", *_apart(self._names[host])]).pid

    def cut(self, host: int) -> None:
        """From now on, nothing reaches or leaves this host, and no connection reports it."""
        self._order(f"cut {host}\n")

    def mend(self, host: int) -> None:
        """Undo `cut`."""
        self._order(f"mend {host}\n")

    def _order(self, line: str) -> None:
        self._cable.stdin.write(line)
        self._cable.stdin.flush()
        assert self._cable.stdout.readline() == line

    def take_down(self, host: int) -> None:
        """Switch off the host's own interface."""
        subprocess.run(["nsenter", "-t", str(self.pids[host]), "-n", "ip", "link", "set", INTERFACE, "down"], check=True)

    def command(self, host: int, *words: str) -> list[str]:
        """The command that runs `words` on a host, in the folder of the project."""
        pid = self.pids[host]
        spaces = ("--net", "--uts", "--ipc", f"--pid=/proc/{pid}/ns/pid_for_children", "--mount")
        return ["nsenter", "-t", str(pid), *spaces, f"--wd={ROOT}", *words]


def _apart(name: str) -> list[str]:
    """The words for `unshare` that run something with all but its network apart from this machine, until its input ends."""
    return ["--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc", "sh", "-c", _BE_HOST.format(name=name)]


def _end(process: subprocess.Popen[str]) -> None:
    for end in (process.stdin, process.stdout, process.stderr):
        assert end is not None
        end.close()
    process.wait(60)


def live_on(pid: int, live: Callable[..., object], *arguments: Any) -> None:
    """Run `live(*arguments)` on the host of process `pid`, in a child, for this process itself keeps its namespace of processes.

    It ends as the child does, and the child with it.
    """
    for name, kind in _SPACES.items():
        enter(f"/proc/{pid}/ns/{name}", kind)
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    child = os.fork()
    if not child:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        live(*arguments)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


def child_of(pid: int) -> int:
    """The only child of process `pid`, for which this waits: a rank's own process, where `live_on` has started it."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    while not (found := children.read_text().split()):
        time.sleep(0.005)
    return int(found[0])


def store_on(host: int) -> str:
    """Where a process group meets whose rank 0 runs on `host`."""
    return f"tcp://{address_of(host)}:{PORT}"
