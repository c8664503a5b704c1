"""The one place where a transport is chosen. A further one is a file with its endpoint and a line in `MAKERS`."""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from zerobubble.errors import InputError, near
from zerobubble.program import Channel
from zerobubble.runtime.transport.endpoint import Endpoint, Group
from zerobubble.runtime.transport.gather import gather_objects
from zerobubble.runtime.transport.gloo import GlooEndpoint
from zerobubble.runtime.transport.meeting import Arrival, meet
from zerobubble.runtime.transport.mesh import Layout
from zerobubble.runtime.transport.nccl import NcclEndpoint
from zerobubble.runtime.transport.rank_process import this_process
from zerobubble.runtime.transport.same_machine import NoSharedMemoryError
from zerobubble.runtime.transport.shared_memory import SharedMemoryEndpoint
from zerobubble.runtime.transport.staged import StagedEndpoint
from zerobubble.runtime.transport.terms import versions
from zerobubble.runtime.transport.transport import Transport

AUTO = "auto"
NCCL = NcclEndpoint.name
SHARED_MEMORY = SharedMemoryEndpoint.name
STAGED = StagedEndpoint.name
MAKERS: dict[str, Callable[[GlooEndpoint], Endpoint]] = {
    "gloo": lambda topics: topics,
    NCCL: lambda topics: NcclEndpoint(topics.group, topics.timeout),
    SHARED_MEMORY: SharedMemoryEndpoint,
    STAGED: StagedEndpoint,
}
"""By name, what carries tensors, made beside the endpoint that carries topics."""
BY_DEVICE = {"cuda": NCCL}
"""What is fastest for tensors on other devices than CPUs, if it is not staged."""

_log = logging.getLogger("zerobubble")


def choose(name: str, topics: GlooEndpoint, device: torch.device, channels: Sequence[Channel]) -> tuple[Endpoint, str]:
    """What carries tensors on `device` over `channels`, and why: the transport of this name, or for "auto" the fastest there is.

    Every rank calls it, and has the same answer, which rank 0 logs. Raises `InputError`, the same on every rank, for shared memory among
    ranks that have none in common.
    """
    endpoint, why = _choice(name, topics, device, channels)
    if topics.group.rank == 0:
        _log.info("messages between stages go over %s: %s", endpoint.name, why)
    return endpoint, why


def _choice(name: str, topics: GlooEndpoint, device: torch.device, channels: Sequence[Channel]) -> tuple[Endpoint, str]:
    if device.type != "cpu":
        return _choice_for_accelerators(name, topics, device)
    if name not in (AUTO, SHARED_MEMORY):
        return MAKERS[name](topics), "it was asked for"
    endpoint = SharedMemoryEndpoint(topics)
    try:
        endpoint.meet(channels)
    except NoSharedMemoryError as error:
        if name == SHARED_MEMORY:
            remedy = "leave transport out, or give 'gloo'"
            raise InputError(f"transport 'shared-memory' needs ranks that share memory, but {error}; {remedy}") from None
        return topics, f"not all ranks share memory, for {error}"
    return endpoint, "every rank shares memory with those it exchanges messages with"


def _choice_for_accelerators(name: str, topics: GlooEndpoint, device: torch.device) -> tuple[Endpoint, str]:
    fastest = BY_DEVICE.get(device.type, STAGED)
    shared = _shared_device(topics, device) if NCCL in (name, fastest) else ""
    if shared and name == NCCL:
        raise InputError(f"transport 'nccl' needs a GPU for each rank, but {shared}; leave transport out, or give 'staged'")
    if name != AUTO:
        return MAKERS[name](topics), "it was asked for"
    if shared:
        return MAKERS[STAGED](topics), f"{shared}, which NCCL refuses"
    return MAKERS[fastest](topics), f"the stages are on {device.type}"


def _shared_device(topics: GlooEndpoint, device: torch.device) -> str:
    """Which ranks share a GPU, "" if none do; every rank calls it."""
    uuid = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    ranks_of: dict[str, list[int]] = defaultdict(list)
    for rank, each in enumerate(gather_objects(topics, uuid)):
        ranks_of[each].append(rank)
    shared = [f"ranks {', '.join(map(str, ranks))} share GPU {each}" for each, ranks in ranks_of.items() if each and len(ranks) > 1]
    return " and ".join(shared)


def transport_for(given: str | Endpoint, layout: Layout, timeout: float, arrival: Arrival | None = None) -> Transport:
    """The transport among the ranks of `layout`, by name or as this rank's endpoint; an unknown name counts as "auto".

    Ranks of torch.distributed meet for it, and raise what `meet` raises. Those that bring an endpoint have met already.
    """
    if isinstance(given, Endpoint):
        return Transport(given)
    topics = over_torch(layout, timeout, arrival)
    name = given if isinstance(given, str) and given in MAKERS else AUTO
    return Transport(topics, lambda device, channels: choose(name, topics, device, channels))


def refuse_unknown(name: str) -> None:
    """Raise `InputError` for a name that no transport has."""
    if name != AUTO and name not in MAKERS:
        known = ", ".join(map(repr, (AUTO, *MAKERS)))
        remedy = f"{near(name, MAKERS)}leave it out to have the fastest"
        raise InputError(f"transport must be an Endpoint or one of {known}, got {name!r}; {remedy}")


def over_torch(layout: Layout, timeout: float, arrival: Arrival | None = None) -> GlooEndpoint:
    """The endpoint for topics among the ranks of `layout`, with a part of torch's store that belongs to it alone.

    All of them call it; it raises what `meet` raises.
    """
    store = dist.distributed_c10d._get_default_store()
    ranks = layout.ranks
    place = f"zerobubble/meeting/{layout.name}/{'-'.join(map(str, ranks))}"
    own_part = dist.distributed_c10d.PrefixStore(place, store)
    meeting = Group(ranks.index(dist.get_rank()), len(ranks), own_part, _store_host(ranks), processes=layout.processes)
    met = meet(meeting, arrival or Arrival("", versions(), this_process()), timeout)
    together = dist.distributed_c10d.PrefixStore(f"zerobubble/{met.session}", store)
    return GlooEndpoint(meeting._replace(store=together, name=met.session, processes=met.processes), timeout)


def _store_host(ranks: Sequence[int]) -> int | None:
    """Which of these ranks is the process that holds the store that all talk to, None when it is none of them."""
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.distributed_c10d.PrefixStore):
        store = store.underlying_store
    by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    hosted = isinstance(store, dist.TCPStore) and not by_launcher  # type: ignore[attr-defined]
    return ranks.index(0) if hosted and 0 in ranks else None
