"""Chooses the transport; no other module does. To add one, write a file with its endpoint and add it to `MAKERS`.

All ranks must make the same choice: a rank with another endpoint would wait for messages that never arrive. So each choice depends only on
arguments that all ranks agree on, or on facts that they gather from all.

Only the transport of tensors is chosen. Control messages (see `control`) always use gloo.
"""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from zerobubble.arguments import wrong
from zerobubble.errors import InputError, near
from zerobubble.program import Channel
from zerobubble.runtime.device import backend_of, has_nccl, interface, is_host
from zerobubble.runtime.transport.endpoint import Endpoint, Group
from zerobubble.runtime.transport.gather import gather_objects
from zerobubble.runtime.transport.gloo import GlooEndpoint
from zerobubble.runtime.transport.mesh import Layout
from zerobubble.runtime.transport.nccl import NcclEndpoint
from zerobubble.runtime.transport.rank_process import this_process
from zerobubble.runtime.transport.rendezvous import RendezvousRecord, rendezvous
from zerobubble.runtime.transport.same_machine import NoSharedMemoryError
from zerobubble.runtime.transport.shared_memory import SharedMemoryEndpoint
from zerobubble.runtime.transport.staged import StagedEndpoint
from zerobubble.runtime.transport.stalls import StallMonitor
from zerobubble.runtime.transport.terms import versions
from zerobubble.runtime.transport.transport import Transport

AUTO = "auto"
NCCL = NcclEndpoint.name
SHARED_MEMORY = SharedMemoryEndpoint.name
STAGED = StagedEndpoint.name
MAKERS: dict[str, Callable[[GlooEndpoint], Endpoint]] = {
    "gloo": lambda control: control,
    NCCL: lambda control: NcclEndpoint(control.group, control.timeout),
    SHARED_MEMORY: SharedMemoryEndpoint,
    STAGED: StagedEndpoint,
}
"""By name, a function that makes the endpoint for tensors, given the endpoint for control messages."""
BY_BACKEND = {NCCL: NCCL}
"""The fastest transport by the backend that torch uses for an accelerator; `STAGED` for all others."""

_log = logging.getLogger("zerobubble")


def choose(name: str, control: GlooEndpoint, device: torch.device, channels: Sequence[Channel]) -> tuple[Endpoint, str]:
    """Returns the endpoint that carries tensors on `device` over `channels`, and why: the one named, or for "auto" the fastest.

    Every rank calls it and gets the same answer, which rank 0 logs. Raises the same `InputError` on every rank if they cannot use the
    transport of this name.
    """
    endpoint, why = _choice(name, control, device, channels)
    if control.group.is_first:
        _log.info("messages between stages go over %s: %s", endpoint.name, why)
    return endpoint, why


def _choice(name: str, control: GlooEndpoint, device: torch.device, channels: Sequence[Channel]) -> tuple[Endpoint, str]:
    if not is_host(device):
        return _choice_for_accelerators(name, control, device)
    if name not in (AUTO, SHARED_MEMORY):
        return MAKERS[name](control), "as requested"
    endpoint = SharedMemoryEndpoint(control)
    try:
        endpoint.connect_rings(channels)
    except NoSharedMemoryError as error:
        if name == SHARED_MEMORY:
            remedy = "leave transport out, or pass 'gloo'"
            raise InputError(
                "transport 'shared-memory' needs ranks that share memory, but {reason}; {remedy}", reason=str(error), remedy=remedy
            ) from None
        return control, f"not all ranks share memory: {error}"
    return endpoint, "all ranks that exchange messages share memory"


def _choice_for_accelerators(name: str, control: GlooEndpoint, device: torch.device) -> tuple[Endpoint, str]:
    fastest = fastest_for(device)
    shared = _shared_device(control, device) if NCCL in (name, fastest) else ""
    if shared and name == NCCL:
        message = "transport 'nccl' needs a GPU for each rank, but {shared}; {remedy}"
        raise InputError(message, shared=shared, remedy="leave transport out, or pass 'staged'")
    if name != AUTO:
        return MAKERS[name](control), "as requested"
    if shared:
        return MAKERS[STAGED](control), f"{shared}, which NCCL does not support"
    return MAKERS[fastest](control), f"the stages are on {device.type}"


def fastest_for(device: torch.device) -> str:
    """Returns the fastest transport for an accelerator that no ranks share."""
    fastest = BY_BACKEND.get(backend_of(device), STAGED)
    return STAGED if fastest == NCCL and not has_nccl() else fastest


def _shared_device(control: GlooEndpoint, device: torch.device) -> str:
    """Describes which ranks share a GPU; empty if none do. It gathers from all ranks, so every rank must call it."""
    uuid = interface(device).uuid()
    ranks_of: dict[str, list[int]] = defaultdict(list)
    for rank, gpu in zip(control.group.ranks, gather_objects(control, uuid), strict=True):
        ranks_of[gpu].append(rank)
    shared = [f"ranks {', '.join(map(str, ranks))} share GPU {gpu}" for gpu, ranks in ranks_of.items() if gpu and len(ranks) > 1]
    return " and ".join(shared)


def transport_for(transport: str | Endpoint, layout: Layout, timeout: float, record: RendezvousRecord | None = None) -> Transport:
    """Returns the transport among the ranks of `layout`, for a name or for this rank's endpoint; an unknown name counts as "auto".

    Given a name, the ranks meet through the store of torch.distributed, and raise what `rendezvous` raises. A given endpoint has its own
    group and store.
    """
    if isinstance(transport, Endpoint):
        return Transport(transport)
    control = gloo_endpoint(layout, timeout, record)
    name = transport if isinstance(transport, str) and transport in MAKERS else AUTO
    return Transport(control, lambda device, channels: choose(name, control, device, channels))


def refuse_unknown(name: str) -> None:
    """Raises `InputError` for a name that no transport has."""
    if name != AUTO and name not in MAKERS:
        names = ", ".join(map(repr, (AUTO, *MAKERS)))
        raise wrong("transport", name, f"an Endpoint or one of {names}", f"{near(name, MAKERS)}leave it out to use the fastest")


def gloo_endpoint(layout: Layout, timeout: float, record: RendezvousRecord | None = None) -> GlooEndpoint:
    """Returns the endpoint for control messages among the ranks of `layout`, with a prefix of torch's store that no other pipeline uses.

    All of these ranks call it. Raises what `rendezvous` raises.
    """
    store = dist.distributed_c10d._get_default_store()
    ranks = layout.ranks
    place = f"zerobubble/rendezvous/{layout.name}/{'-'.join(map(str, ranks))}"
    own_part = dist.distributed_c10d.PrefixStore(place, store)
    here, size, host = ranks.index(dist.get_rank()), len(layout.members), _store_host(layout)
    group = Group(here, size, own_part, host, processes=layout.processes, survivors=layout.survivors, stalls=StallMonitor())
    outcome = rendezvous(group, record or RendezvousRecord("", versions(), this_process()), timeout)
    # A prefix of this session: keys of an earlier pipeline of the same ranks, such as its failure report, must not be read here.
    session_store = dist.distributed_c10d.PrefixStore(f"zerobubble/{outcome.session}", store)
    return GlooEndpoint(group._replace(store=session_store, name=outcome.session, processes=outcome.processes), timeout)


def _store_host(layout: Layout) -> int | None:
    """Returns which of these ranks hosts the store in its process; None if none of them does."""
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.distributed_c10d.PrefixStore):
        store = store.underlying_store
    by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    hosted = isinstance(store, dist.TCPStore) and not by_launcher  # type: ignore[attr-defined]
    host = layout.ranks.index(0) if hosted and 0 in layout.ranks else None
    return host if host in layout.members else None
