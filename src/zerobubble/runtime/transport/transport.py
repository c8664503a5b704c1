"""Messages between ranks: FIFO channels on torch.distributed backends, and a control line for small host-side values.

Every (direction between two ranks, kind of stuff) has its own lane, so that no message ever waits behind one of another channel:
a tag on gloo, a communicator on NCCL (where operations of one communicator run in order). The backends belong to the pipeline alone,
so closing them wakes exactly the ranks of this pipeline.
"""

from __future__ import annotations

import os
import pickle
import platform
import re
import uuid
import weakref
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerobubble.program import Channel
from zerobubble.rules import Stuff
from zerobubble.runtime.failure.blame import COMING, IN_TIME
from zerobubble.runtime.transport.shared_memory import Connection, PeerGoneError, Rendezvous, is_supported

_CONTROL_TAG = 16
_BESIDE = 5040
"""The distance in tags to a line beside a channel's own. Gloo shares tags out to network interfaces by remainder; any number up to 10
divides this."""
_LANES = (Stuff.ACTIVATION, Stuff.GRADIENT, Stuff.WORK)


class LostContactError(Exception):
    """A message could not be exchanged with `peer`, for this `reason`, while this rank did `what`."""

    def __init__(self, peer: int, what: str, reason: str) -> None:
        super().__init__(f"lost contact while {what}: {reason}")
        self.peer = peer
        self.what = what
        self.reason = reason


class Transport:
    """The lanes of one pipeline. Ranks here are ranks in the pipeline's group. `posted` has, by peer, what stays posted between steps."""

    def __init__(self, group: dist.ProcessGroup | None, timeout: float) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.device = torch.device("cpu")
        self._timeout = timedelta(seconds=timeout)
        self.connections: dict[Channel, Connection] = {}
        self.posted: dict[int, Any] = {}
        name = [uuid.uuid4().hex]
        dist.broadcast_object_list(name, src=dist.get_process_group_ranks(group or dist.group.WORLD)[0], group=group)
        self._name = name[0]
        self.store: Any = self._prefix(dist.distributed_c10d._get_default_store(), f"zerobubble/{name[0]}")
        self.store_host = _store_host(group)
        self._controls: list[Any] = []
        self._lanes: list[Any] = []
        # A backend still open when the interpreter ends would abort the process.
        self._end = weakref.finalize(self, _let_go, self._controls, self._lanes, self.connections, self.posted)

    def meet(self) -> None:
        """Connect the control line. Every rank has it when it returns, so none can close it too early."""
        self._controls.append(self._backend("control", "cpu"))
        self._all_gather(torch.zeros(1))

    def open(self, device: torch.device, channels: Sequence[Channel]) -> None:
        """Open the lanes for tensors on `device`, and where all ranks share a machine and compute on CPUs, the connections of `channels`.

        Every rank has them when it returns, so none can close them too early.
        """
        self.device = device
        places = self.gather_objects((platform.node(), _boot(), device.type == "cpu" and is_supported()))
        self._lanes += [self._backend(f"lane{lane}", device.type) for lane in range(2 * len(_LANES) if device.type == "cuda" else 1)]
        if len(set(places)) == 1 and places[0][2] and channels:
            self._connect(channels)
        self._all_gather(torch.zeros(1))
        self.greet(channels)

    def greet(self, channels: Iterable[Channel]) -> None:
        """Connect these channels, which are the same on every rank, where a lane is a communicator.

        NCCL makes one with the first message between two ranks, and holds each until the other is there: in the order of a schedule, ranks
        would wait for each other in a circle.
        """
        if len(self._lanes) < 2:
            return
        greeting = torch.zeros(1, device=self.device)
        for source, destination, stuff in sorted(channels):
            if source == self.rank:
                wait(self.sender(stuff, destination)(greeting), destination, "connecting")
            elif destination == self.rank:
                wait(self.receiver(stuff, source)(greeting), source, "connecting")

    def _connect(self, channels: Sequence[Channel]) -> None:
        doors = Rendezvous(self._name, self.rank, self._timeout.total_seconds())
        doors.listen(channels)
        self._all_gather(torch.zeros(1))
        self.connections.update(doors.connect(channels))
        self._all_gather(torch.zeros(1))
        doors.remove()

    def _prefix(self, store: Any, prefix: str) -> Any:
        return dist.distributed_c10d.PrefixStore(prefix, store)

    def _backend(self, name: str, device_type: str) -> Any:
        store = self._prefix(self.store, name)
        if device_type != "cuda":
            return dist.distributed_c10d.ProcessGroupGloo(store, self.rank, self.size, timeout=self._timeout)
        options = dist.distributed_c10d.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        return dist.distributed_c10d.ProcessGroupNCCL(store, self.rank, self.size, options)

    def _lane(self, stuff: Stuff, source: int, destination: int) -> tuple[int, int]:
        """The backend and the tag of a channel."""
        lane = 2 * _LANES.index(stuff) + (source < destination)
        return (lane, 0) if len(self._lanes) > 1 else (0, lane)

    def sender(self, stuff: Stuff, peer: int, aside: int = 0) -> Any:
        """A function that starts sending one tensor to `peer` and returns the work to wait for.

        On CPUs a channel has lines beside its own, numbered from 1, over the same connection.
        """
        lanes, (lane, tag) = self._lanes, self._lane(stuff, self.rank, peer)
        return lambda tensor: _started(lanes[lane].send, tensor, peer, tag + aside * _BESIDE)

    def receiver(self, stuff: Stuff, peer: int, aside: int = 0) -> Any:
        """A function that posts the receive of one tensor from `peer` and returns the work to wait for; `aside` as for `sender`."""
        lanes, (lane, tag) = self._lanes, self._lane(stuff, peer, self.rank)
        return lambda tensor: _started(lanes[lane].recv, tensor, peer, tag + aside * _BESIDE)

    def tell(self, values: Sequence[float], peer: int, topic: int) -> tuple[Any, Tensor]:
        """Start sending a few numbers to `peer`; keep the result until the step is over."""
        tensor = torch.tensor(values, dtype=torch.float64)
        return _started(self._controls[0].send, tensor, peer, _CONTROL_TAG + topic), tensor

    def listen(self, count: int, peer: int, topic: int) -> tuple[Any, Tensor]:
        """Post the receive of `count` numbers from `peer`: (work, the tensor they will be in)."""
        tensor = torch.empty(count, dtype=torch.float64)
        return _started(self._controls[0].recv, tensor, peer, _CONTROL_TAG + topic), tensor

    def gather_objects(self, value: Any) -> list[Any]:
        """Everyone's `value`, in rank order, on every rank."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = self._all_gather(torch.tensor([data.numel()]))
        room = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8)
        room[: data.numel()] = data
        parts = self._all_gather(room)
        return [pickle.loads(bytes(part[: int(size)].tolist())) for part, size in zip(parts, sizes, strict=True)]

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        self._controls[0].allgather([gathered], [tensor]).wait()
        return gathered

    def close(self) -> None:
        """Drop every connection; a peer still waiting on one gets an error at once."""
        self._end()


def _let_go(controls: list[Any], lanes: list[Any], connections: dict[Channel, Connection], posted: dict[int, Any]) -> None:
    posted.clear()
    for connection in connections.values():
        connection.close()
    connections.clear()
    lanes.clear()
    controls.clear()


def reason_of(error: RuntimeError) -> str:
    """Why a message could not be exchanged, in a few words, without the backend's place in its sources and its general advice."""
    told = str(error).splitlines()[0]
    if "imed out" in told or "no answer within" in told:
        return IN_TIME
    return re.sub(r"^\[[^\]]*\] *", "", told).split(". This is typically")[0]


def _started(exchange: Any, tensor: Tensor, peer: int, tag: int) -> Any:
    """The work of a send or receive; a connection that is known to be gone is told at once."""
    try:
        return exchange([tensor], peer, tag)
    except RuntimeError as error:
        raise LostContactError(peer, COMING, reason_of(error)) from error


_waiting: tuple[int, str] | None = None
"""The peer that this process waits for, and what it waits for; a wait that failed stays."""


def waiting() -> tuple[int, str] | None:
    """Whom this process waits for now, as (peer, what)."""
    return _waiting


def stop_waiting() -> None:
    """A wait that failed has been told of."""
    global _waiting
    _waiting = None


def wait(work: Any, peer: int, what: str) -> None:
    """Wait for a message; raises `LostContactError` when the connection is gone or the timeout has passed."""
    global _waiting
    _waiting = peer, what
    try:
        work.wait()
    except RuntimeError as error:
        raise LostContactError(peer, what, reason_of(error)) from error
    _waiting = None


class Contact:
    """Turns the failure of a shared-memory channel inside into `LostContactError`."""

    __slots__ = ("_peer", "_what")

    def __init__(self, peer: int, what: str) -> None:
        self._peer = peer
        self._what = what

    def __enter__(self) -> None:
        global _waiting
        _waiting = self._peer, self._what

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        global _waiting
        if kind is None:
            _waiting = None
        elif isinstance(error, PeerGoneError):
            raise LostContactError(self._peer, self._what, reason_of(error)) from error


def _store_host(group: dist.ProcessGroup | None) -> int | None:
    """The rank of `group` whose process holds the store that all talk to, None when it is none of them."""
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.distributed_c10d.PrefixStore):
        store = store.underlying_store
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    hosted = isinstance(store, dist.TCPStore) and not by_launcher  # type: ignore[attr-defined]
    return ranks.index(0) if hosted and 0 in ranks else None


def _boot() -> str:
    """Which running machine this is: containers may share a host name."""
    identity = Path("/proc/sys/kernel/random/boot_id")
    return identity.read_text() if identity.exists() else ""
