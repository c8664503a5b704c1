"""Gathers the value of each rank on every rank, over an endpoint that gathers tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zerobubble.runtime.transport.contact import exchanging
from zerobubble.runtime.transport.endpoint import Endpoint, exchange_all
from zerobubble.runtime.values.plain_values import read_plain, write_plain

_SIZE_BYTES = 8
_FIRST_BYTES = 2048 - _SIZE_BYTES
"""The bytes of each value in the first exchange. The values of a step, such as the norms of a stage, are seldom larger."""


def gather_objects(endpoint: Endpoint, value: Any, members: Sequence[int] | None = None) -> list[Any]:
    """Returns the `value` of each of these ranks, by default of all, in order. All of them must call it.

    `write_plain` says which values it accepts. Raises `PeerGoneError` if a rank is missing, and what `write_plain` raises.
    """
    data = write_plain(value)
    # Gathered tensors must have one size. So the first exchange has a fixed size, and if a value is larger, a second one has the rest.
    first = torch.zeros(_SIZE_BYTES + _FIRST_BYTES, dtype=torch.uint8, device="cpu")
    first[:_SIZE_BYTES].view(torch.int64).fill_(data.numel())
    begin = data[:_FIRST_BYTES]
    first[_SIZE_BYTES : _SIZE_BYTES + begin.numel()] = begin
    parts = gather(endpoint, first, members)
    sizes = [int(part[:_SIZE_BYTES].view(torch.int64)) for part in parts]
    parts = [part[_SIZE_BYTES:] for part in parts]
    if max(sizes) > _FIRST_BYTES:
        rest = torch.zeros(max(sizes) - _FIRST_BYTES, dtype=torch.uint8, device="cpu")
        rest[: max(data.numel() - _FIRST_BYTES, 0)] = data[_FIRST_BYTES:]
        parts = [torch.cat(both) for both in zip(parts, gather(endpoint, rest, members), strict=True)]
    return [read_plain(part[:size]) for part, size in zip(parts, sizes, strict=True)]


def gather(endpoint: Endpoint, tensor: Tensor, members: Sequence[int] | None = None) -> list[Tensor]:
    """Like `Endpoint.gather`, among these ranks. Raises `PeerGoneError` if a rank is missing."""
    with exchanging():
        return endpoint.gather(tensor) if members is None else exchange_all(endpoint, tensor, members)
