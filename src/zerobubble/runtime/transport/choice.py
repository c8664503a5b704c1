"""The one place where a transport is chosen. A further one is a file with its endpoint and a line in `MAKERS`."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from zerobubble.errors import InputError, near
from zerobubble.runtime.transport.endpoint import Endpoint, Group
from zerobubble.runtime.transport.gloo import GlooEndpoint
from zerobubble.runtime.transport.meeting import Arrival, meet
from zerobubble.runtime.transport.nccl import NcclEndpoint
from zerobubble.runtime.transport.shared_memory import SharedMemoryEndpoint, is_supported
from zerobubble.runtime.transport.terms import versions
from zerobubble.runtime.transport.transport import Transport

AUTO = "auto"
MAKERS: dict[str, Callable[[GlooEndpoint], Endpoint]] = {
    "gloo": lambda topics: topics,
    "nccl": lambda topics: NcclEndpoint(topics.group, topics.timeout),
    "shared-memory": SharedMemoryEndpoint,
}
"""By name, what carries tensors, made beside the endpoint that carries topics."""


def choose(name: str, topics: GlooEndpoint, device: torch.device) -> Endpoint:
    """What carries tensors on `device`: the transport of this name, or for "auto" the fastest there is. Every rank calls it.

    Raises `InputError`, the same on every rank, for shared memory among ranks that have none in common.
    """
    near_by = _share_memory(topics)
    if name == "shared-memory" and not near_by:
        raise InputError("transport 'shared-memory' needs all ranks on one machine, a Linux with x86-64 processors; leave transport out")
    if name == AUTO:
        on_host = "shared-memory" if near_by else "gloo"
        name = {"cuda": "nccl", "cpu": on_host}.get(device.type, "gloo")
    return MAKERS[name](topics)


def transport_for(given: str | Endpoint, group: dist.ProcessGroup | None, timeout: float, arrival: Arrival | None = None) -> Transport:
    """The transport of a pipeline that was given this one, by name or as this rank's endpoint; an unknown name counts as "auto".

    The ranks of a process group meet for it, and raise what `meet` raises. Those that bring an endpoint have met already.
    """
    if isinstance(given, Endpoint):
        return Transport(given)
    topics = over_torch(group, timeout, arrival)
    name = given if isinstance(given, str) and given in MAKERS else AUTO
    return Transport(topics, lambda device: choose(name, topics, device))


def refuse_unknown(name: str) -> None:
    """Raise `InputError` for a name that no transport has."""
    if name != AUTO and name not in MAKERS:
        known = ", ".join(map(repr, (AUTO, *MAKERS)))
        remedy = f"{near(name, MAKERS)}leave it out to have the fastest"
        raise InputError(f"transport must be an Endpoint or one of {known}, got {name!r}; {remedy}")


def _share_memory(topics: Endpoint) -> bool:
    """Whether all ranks run on one machine where messages can pass through memory."""
    place = f"{platform.node()} {_boot()}" if is_supported() else f"none for rank {topics.group.rank}"
    digest = int.from_bytes(hashlib.sha256(place.encode()).digest()[:7], "big")
    return len({int(place) for place in topics.gather(torch.tensor([digest]))}) == 1 and is_supported()


def _boot() -> str:
    """Which running machine this is: containers may share a host name."""
    identity = Path("/proc/sys/kernel/random/boot_id")
    return identity.read_text() if identity.exists() else ""


def over_torch(group: dist.ProcessGroup | None, timeout: float, arrival: Arrival | None = None) -> GlooEndpoint:
    """The endpoint for topics among the ranks of a process group, with a part of torch's store that belongs to it alone.

    All of them call it; it raises what `meet` raises.
    """
    world = group or dist.group.WORLD
    assert world is not None
    store = dist.distributed_c10d._get_default_store()
    ranks = dist.get_process_group_ranks(world)
    place = f"zerobubble/meeting/{world.group_name}/{'-'.join(map(str, ranks))}"
    meeting = Group(dist.get_rank(group), len(ranks), dist.distributed_c10d.PrefixStore(place, store), _store_host(group))
    name = meet(meeting, arrival or Arrival("", versions()), timeout)
    return GlooEndpoint(meeting._replace(store=dist.distributed_c10d.PrefixStore(f"zerobubble/{name}", store), name=name), timeout)


def _store_host(group: dist.ProcessGroup | None) -> int | None:
    """The rank of `group` whose process holds the store that all talk to, None when it is none of them."""
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.distributed_c10d.PrefixStore):
        store = store.underlying_store
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    hosted = isinstance(store, dist.TCPStore) and not by_launcher  # type: ignore[attr-defined]
    return ranks.index(0) if hosted and 0 in ranks else None
