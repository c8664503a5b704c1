"""Which processes are watched for their end, and which sockets are known as a transport's: never another's."""

from __future__ import annotations

import gc
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from zerobubble.errors import PipelineError
from zerobubble.runtime.failure import processes
from zerobubble.runtime.failure.processes import ProcessWatch
from zerobubble.runtime.transport.endpoint import Group
from zerobubble.runtime.transport.rank_process import RankProcess, has_ended, start_of, this_process
from zerobubble.runtime.transport.rendezvous import RendezvousRecord, rendezvous
from zerobubble.runtime.transport.sockets import NewConnections, PeerSockets
from zerobubble.runtime.transport.stalls import StallMonitor
from zerobubble.runtime.transport.terms import versions

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")

LONGEST_S = 60.0


class Report:
    """Hears which ranks' processes have ended."""

    def __init__(self) -> None:
        self.ranks: list[int] = []
        self.hears_of_failure = threading.Event()

    def ended(self, rank: int) -> None:
        self.ranks.append(rank)
        self.hears_of_failure.set()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(200)"])
    yield process
    process.kill()
    process.wait()


def process_of(number: int) -> RankProcess:
    return this_process()._replace(number=number, started=int(Path(f"/proc/{number}/stat").read_text().rsplit(")")[-1].split()[19]))


def test_the_end_of_a_process_is_heard_once(sleeper: subprocess.Popen[bytes]) -> None:
    found = Report()
    watch = ProcessWatch({0: this_process(), 1: process_of(sleeper.pid)}, found.ended)
    assert not found.hears_of_failure.wait(0.2)
    sleeper.kill()
    assert found.hears_of_failure.wait(LONGEST_S)
    watch.close()
    assert found.ranks == [1]


def test_a_later_process_with_the_same_number_is_not_taken_for_a_rank(sleeper: subprocess.Popen[bytes]) -> None:
    found = Report()
    earlier = process_of(sleeper.pid)._replace(started=1)
    watch = ProcessWatch({0: this_process(), 1: earlier}, found.ended)
    assert found.hears_of_failure.wait(LONGEST_S)
    watch.close()
    assert found.ranks == [1]


SHOWS_ITSELF = """
import json
from zerobubble.runtime.transport.rank_process import this_process
print(json.dumps(this_process()), flush=True)
input()
"""


def test_a_process_in_another_time_namespace_has_not_ended() -> None:
    """It reads start times that its namespace shifts."""
    shifted = ["unshare", "--time", "--boottime", "100000"]
    if subprocess.run([*shifted, "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("needs time namespaces, and root")
    with subprocess.Popen(
        [*shifted, sys.executable, "-c", SHOWS_ITSELF], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        process = RankProcess(*json.loads(other.stdout.readline()))
        assert process.number == other.pid
        assert process.started != start_of(other.pid)
        assert not has_ended(process)
        found = Report()
        watch = ProcessWatch({0: this_process(), 1: process}, found.ended)
        watch.close()
        assert found.ranks == []
        other.communicate("")


def test_a_process_of_another_machine_is_not_watched(sleeper: subprocess.Popen[bytes]) -> None:
    found = Report()
    elsewhere = process_of(sleeper.pid)._replace(place="another machine", started=1)
    nowhere = RankProcess(sleeper.pid, 1, "")
    ProcessWatch({0: this_process(), 1: elsewhere, 2: nowhere}, found.ended).close()
    assert not found.ranks


def test_where_processes_cannot_be_watched_none_is_taken_for_dead(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbid(number: int) -> int:
        raise PermissionError("a sandbox")

    monkeypatch.setattr(processes.os, "pidfd_open", forbid)
    found = Report()
    ProcessWatch({0: this_process(), 1: process_of(sleeper.pid)}, found.ended).close()
    assert not found.ranks


def descriptors() -> set[tuple[str, str]]:
    """What this process has open: numbers, and what they stand for."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the folder itself, and what another thread has closed since
            found.add((name, os.readlink(f"/proc/self/fd/{name}")))
    return found


@pytest.mark.long
def test_a_watch_leaves_nothing_behind(sleeper: subprocess.Popen[bytes]) -> None:
    """Threads and files of tests before this one may end meanwhile."""
    gc.collect()
    files, threads = descriptors(), set(threading.enumerate())
    for _ in range(3):
        ProcessWatch({0: this_process(), 1: process_of(sleeper.pid)}, Report().ended).close()
    end = time.monotonic() + LONGEST_S
    while set(threading.enumerate()) - threads and time.monotonic() < end:  # closing waits for a thread, but not for long
        time.sleep(0.02)
    assert not set(threading.enumerate()) - threads
    assert not {file for file in descriptors() - files if not file[1].startswith("/proc/")}


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket, NewConnections]]:
    """A connection of which this process has both ends, and what found it."""
    with socket.create_server(("127.0.0.1", 0)) as server, NewConnections() as new:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    with one, other:
        yield one, other, new


def test_a_connection_is_known_by_what_both_ends_report(ends: tuple[socket.socket, socket.socket, NewConnections]) -> None:
    one, other, new = ends
    assert set(new.found.values()) <= {one.fileno(), other.fileno()}
    assert len(new.found) == 1  # both ends name it alike
    sockets = PeerSockets()
    sockets.claim(new.found, {1: ["0100007F:0001 0100007F:0002"]})
    sockets.disconnect()  # no connection is known: rank 1 has reported another one
    one.sendall(b"x")
    assert other.recv(1) == b"x"
    sockets.claim(new.found, {1: list(new.found)})
    sockets.disconnect(0)
    one.sendall(b"y")
    assert other.recv(1) == b"y"
    sockets.disconnect(1)
    assert other.recv(1) == b""


def test_whose_connections_are_whose_is_not_guessed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, NewConnections() as first, NewConnections() as second:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    with one, other:
        assert not first.found
        assert not second.found


def test_a_peer_may_write_until_it_has_heard_that_no_more_comes() -> None:
    ours, theirs = socket.socketpair()
    sockets = PeerSockets()
    sockets.add(1, ours.fileno())
    came: list[bytes] = []

    def hear_and_close() -> None:
        """What gloo's own threads do at both ends."""
        came.append(theirs.recv(1))
        theirs.sendall(b"a last word")
        came.append(ours.recv(100))
        ours.close()

    with theirs:
        thread = threading.Thread(target=hear_and_close)
        thread.start()
        sockets.end()
        thread.join()
    assert came == [b"", b"a last word"]


def test_a_peer_that_stands_still_is_not_waited_for_long() -> None:
    ours, theirs = socket.socketpair()
    sockets = PeerSockets()
    sockets.add(1, ours.fileno())
    with ours, theirs:
        sockets.end()
        assert theirs.recv(1) == b""


def test_a_descriptor_that_was_given_to_another_file_is_left_alone() -> None:
    one, other = socket.socketpair()
    sockets = PeerSockets()
    sockets.add(1, one.fileno())
    number = one.fileno()
    new, far = socket.socketpair()
    os.dup2(new.fileno(), number)  # the number now is that of another socket
    sockets.disconnect(1)
    sockets.close_in_child()
    with one, other, new, far:
        one.sendall(b"x")
        assert far.recv(1) == b"x"


class StoreOfOne:
    """A store that one rank alone uses."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.kept[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.kept[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.kept for key in keys)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        if self.kept.get(key, b"").decode() == expected:
            self.kept[key] = value.encode()
        return self.kept[key]


def test_a_process_that_has_ended_is_not_waited_for_when_survivors_meet(sleeper: subprocess.Popen[bytes]) -> None:
    process = this_process()._replace(number=sleeper.pid, started=start_of(sleeper.pid))
    assert not has_ended(process)
    assert has_ended(process._replace(started=process.started + 1))
    assert not has_ended(process._replace(place="another machine"))
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and no one has waited for it
    assert has_ended(process)
    group = Group(1, 2, StoreOfOne(), processes=(process, this_process()))
    with pytest.raises(PipelineError) as caught:
        rendezvous(group, RendezvousRecord("", versions(), this_process()), 600.0)
    assert caught.value.rank == 0


@pytest.mark.parametrize("is_alive", [False, True])
def test_a_host_that_stalled_names_itself_only_if_no_rank_that_arrived_is_left(sleeper: subprocess.Popen[bytes], is_alive: bool) -> None:
    """Rank 1 arrives before the process with the store stalls, and rank 2 finds it stalled."""
    arrived = RendezvousRecord("", versions(), this_process()._replace(number=sleeper.pid, started=start_of(sleeper.pid)))
    if not is_alive:
        sleeper.kill()
        sleeper.wait()
    store, stalls = StoreOfOne(), StallMonitor()
    store.kept = {"round": b"now", "now/1": json.dumps(arrived).encode()}
    with stalls.waiting(-60.0):
        pass
    with pytest.raises(PipelineError) as caught:
        rendezvous(Group(0, 3, store, store_host=0, stalls=stalls), RendezvousRecord("", versions(), this_process()), 0.3)
    assert caught.value.rank == (2 if is_alive else 0)
