"""The process group of all of Lightning's ranks. An error ends it, since other ranks may wait in its collectives; a retry makes another.

A Trainer or an error that the user keeps holds the groups of torch, whose connections are open until they are freed. So they are shut down.
The next process group shares the store, whose server ends with its last holder, under another prefix: the store has the old addresses.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from zerobubble.runtime.frameworks import NewConnections, PeerSockets

_stores: list[Any] = []
"""The store of each process group that an error has ended, in this process."""
_sockets = PeerSockets()


def store_of_retry() -> dict[str, Any]:
    """Returns the options of `init_process_group` after an error; empty before."""
    if not _stores:
        return {}
    return {"store": dist.distributed_c10d.PrefixStore(f"zerobubble/retries/{len(_stores)}", _stores[0])}


@contextmanager
def connecting() -> Iterator[None]:
    """A context in which all ranks make process groups, whose connections `end_world` shuts down."""
    with NewConnections() as new:
        yield
    of_store = f":{int(os.environ.get('MASTER_PORT', 0)):04X}"  # in Linux's form of an address
    opened = {ends: descriptor for ends, descriptor in new.found.items() if of_store not in ends}
    reported: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reported, list(opened))
    rank = dist.get_rank()
    _sockets.claim(opened, {peer: ends for peer, ends in enumerate(reported) if peer != rank})


def end_world() -> None:
    """Ends the process group of all ranks, which wakes those that wait in its collectives. Each rank calls it after an error."""
    if dist.is_initialized():
        _stores.append(dist.distributed_c10d._get_default_store())
        dist.destroy_process_group()
        _sockets.end()
        _sockets.disconnect()
        _sockets.clear()
