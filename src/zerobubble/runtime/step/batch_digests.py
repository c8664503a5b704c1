"""Numbers that stand for the batches that a rank is given, by which ranks notice that theirs differ.

The first stage reads the inputs of its rank, and `loss_fn` the targets of the last stage's. Ranks whose data loaders shuffle in different
orders would train inputs with the targets of other samples. The first rank sends the number of its batch when a call begins. On an
accelerator, whose elements the host could read only by waiting for them, it sends in each call the number of the batch before.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from zerobubble.error_reports.user_code import warn_user
from zerobubble.runtime.device import Event, interface, is_host
from zerobubble.runtime.values.memory import is_plain, spaced_elements

_TENSORS = 8
"""The most tensors of a batch that are read."""


class _Copied(NamedTuple):
    """Elements of the batch of the `call` with this number, in host memory once the device is past `end`."""

    call: int
    elements: list[Tensor]
    end: Event


class BatchDigests:
    """Numbers of the batches of consecutive calls on `device`. Warns once if another rank has other ones."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._has_warned = False
        self._copied: _Copied | None = None

    def of(self, call: int, batch: Any, *, waits: bool) -> int:
        """Returns a number for a pytree, which a float64 represents exactly; 0 if nothing is known.

        It is the number of the batch of this `call` on a host, or if the host `waits`, otherwise of the call before.
        """
        copied, self._copied = self._copied, None
        if self._has_warned:
            return 0
        elements = _elements(batch)
        if waits or is_host(self._device):
            return _number([element.cpu() for element in elements])
        if elements:
            self._copied = self._copy(call, elements)
        return _number(copied.elements) if copied is not None and copied.call == call - 1 and copied.end.query() else 0

    def _copy(self, call: int, elements: Sequence[Tensor]) -> _Copied:
        device = interface(self._device)
        copies = [device.copy_on_host(element) for element in elements]
        end = device.new_event()
        end.record(device.current_stream())
        return _Copied(call, copies, end)

    def compare(self, theirs: int, mine: int, ranks: tuple[int, int]) -> None:
        """Warns if the first of two `ranks` has sent another number than this rank, the second, has. 0 is not known."""
        if 0 in (theirs, mine) or theirs == mine:
            return
        self._has_warned = True
        first, last = ranks
        warn_user(
            f"ranks {first} and {last} were given different batches: inputs of rank {first} train with targets of rank {last}; give both "
            "the same batch, with one seed for shuffling, no DistributedSampler, and no draws of random numbers on one rank alone, or give "
            "None for what a rank does not need"
        )


def _elements(batch: Any) -> list[Tensor]:
    """Returns some elements of some tensors of a batch, on their devices."""
    tensors = [leaf for leaf in tree_leaves(batch) if type(leaf) is Tensor and _has_elements(leaf)]
    chosen = tensors[:: -(-len(tensors) // _TENSORS)] if tensors else []
    return [spaced_elements(tensor) for tensor in chosen]


def _has_elements(tensor: Tensor) -> bool:
    """Returns whether elements of a tensor can be taken: those of floats of 8 bits cannot."""
    is_small_float = tensor.is_floating_point() and tensor.dtype.itemsize == 1
    return is_plain(tensor) and tensor.numel() > 0 and not tensor.is_quantized and not is_small_float


def _number(elements: Sequence[Tensor]) -> int:
    if not elements:
        return 0
    content = b"".join(element.view(torch.uint8).numpy().tobytes() for element in elements)
    return int.from_bytes(blake2b(content, digest_size=6).digest(), "big")
