"""Everyone's value on every rank, over an endpoint that gathers tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zerobubble.runtime.transport.contact import exchanging
from zerobubble.runtime.transport.endpoint import Endpoint, exchange_all
from zerobubble.runtime.values.plain_values import read_plain, write_plain


def gather_objects(endpoint: Endpoint, value: Any, members: Sequence[int] | None = None) -> list[Any]:
    """The `value` of each of these ranks, by default of all, in order, on each of them, as `write_plain` takes it; all must call it.

    Raises `PeerGoneError` when not all come, and as `write_plain` does.
    """
    data = write_plain(value)
    sizes = gather(endpoint, torch.tensor([data.numel()], device="cpu"), members)
    room = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8, device="cpu")
    room[: data.numel()] = data
    parts = gather(endpoint, room, members)
    return [read_plain(part[: int(size)]) for part, size in zip(parts, sizes, strict=True)]


def gather(endpoint: Endpoint, tensor: Tensor, members: Sequence[int] | None = None) -> list[Tensor]:
    """As `Endpoint.gather`, among these ranks; raises `PeerGoneError` when not all come."""
    with exchanging():
        return endpoint.gather(tensor) if members is None else exchange_all(endpoint, tensor, members)
