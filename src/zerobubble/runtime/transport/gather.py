"""Everyone's value on every rank, over an endpoint that gathers tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zerobubble.runtime.transport.contact import exchanging
from zerobubble.runtime.transport.endpoint import Endpoint
from zerobubble.runtime.values.plain_values import read_plain, write_plain


def gather_objects(endpoint: Endpoint, value: Any) -> list[Any]:
    """Everyone's `value`, in rank order, on every rank, as `write_plain` takes it; all must call it.

    Raises `PeerGoneError` when not all ranks come, and as `write_plain` does.
    """
    data = write_plain(value)
    sizes = gather(endpoint, torch.tensor([data.numel()]))
    room = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8)
    room[: data.numel()] = data
    parts = gather(endpoint, room)
    return [read_plain(part[: int(size)]) for part, size in zip(parts, sizes, strict=True)]


def gather(endpoint: Endpoint, tensor: Tensor) -> list[Tensor]:
    """As `Endpoint.gather`; raises `PeerGoneError` when not all ranks come."""
    with exchanging():
        return endpoint.gather(tensor)
