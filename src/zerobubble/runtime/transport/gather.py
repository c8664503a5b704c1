"""Gathers the value of each rank on every rank, over an endpoint that gathers tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zerobubble.runtime.transport.contact import exchanging
from zerobubble.runtime.transport.endpoint import Endpoint, exchange_all
from zerobubble.runtime.values.plain_values import read_plain, write_plain


def gather_objects(endpoint: Endpoint, value: Any, members: Sequence[int] | None = None) -> list[Any]:
    """Returns the `value` of each of these ranks, by default of all, in order. All of them must call it.

    `write_plain` says which values it accepts. Raises `PeerGoneError` if a rank is missing, and what `write_plain` raises.
    """
    data = write_plain(value)
    # Two exchanges: gathered tensors must have one size, so the ranks agree on the largest first.
    sizes = gather(endpoint, torch.tensor([data.numel()], device="cpu"), members)
    padded = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8, device="cpu")
    padded[: data.numel()] = data
    parts = gather(endpoint, padded, members)
    return [read_plain(part[: int(size)]) for part, size in zip(parts, sizes, strict=True)]


def gather(endpoint: Endpoint, tensor: Tensor, members: Sequence[int] | None = None) -> list[Tensor]:
    """Like `Endpoint.gather`, among these ranks. Raises `PeerGoneError` if a rank is missing."""
    with exchanging():
        return endpoint.gather(tensor) if members is None else exchange_all(endpoint, tensor, members)
