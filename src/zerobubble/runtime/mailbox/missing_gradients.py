"""Gradients that come to be missing on a channel where none ever was: a notice says from which message on to expect lists of what is there.

Receives are posted early in shapes that are known, so a missing gradient travels as zeros. The receive of a notice is posted before all
others of its channel and both go over one connection in order: where a gradient has come, so has a notice that concerns it, and to see
that there is none costs a look at one byte. Only the messages behind a notice, until the step is over, have lists. This is for lanes on
CPUs: rings tell what is missing in their slots, and a GPU's host would have to wait for each message to know.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zerobubble.rules import Stuff
from zerobubble.runtime.transport.transport import Transport, wait

_NOTICE, _FIRST_LIST = 1, 2
"""Lines beside the channel's own: for the notice, and one for the list of each message by its place on the channel."""
_FORM = struct.Struct("<q?")


class MissingGradientsOut:
    """The sender's end. Call `begin` before each step."""

    def __init__(self, transport: Transport, peer: int) -> None:
        self._line = partial(transport.sender, Stuff.GRADIENT, peer)
        self._has_told = False

    def begin(self) -> None:
        """A step begins: nothing is missing so far."""
        self._has_told = False

    def tell(self, place: int, gradients: Sequence[Tensor | None]) -> list[tuple[Tensor, Any]]:
        """Start telling, before message `place` is sent, which of its gradients are there, if any was missing in this step.

        Keep the tensors until the works beside them are done.
        """
        there = [gradient is not None for gradient in gradients]
        if not self._has_told and all(there):
            return []
        notes = [] if self._has_told else [(_NOTICE, torch.frombuffer(bytearray(_FORM.pack(place, True)), dtype=torch.uint8))]
        notes.append((_FIRST_LIST + place, torch.tensor(there, dtype=torch.uint8)))
        self._has_told = True
        return [(tensor, self._line(aside)(tensor)) for aside, tensor in notes]


class MissingGradientsIn:
    """The receiver's end, one for all programs that use the channel. Call `begin` before each step."""

    def __init__(self, transport: Transport, peer: int) -> None:
        self._peer = peer
        self._line = partial(transport.receiver, Stuff.GRADIENT, peer)
        self._room = bytearray(_FORM.size)
        self._post()

    def _post(self) -> None:
        self._room[:] = bytes(_FORM.size)
        self._first: int | None = None
        self._work = self._line(_NOTICE)(torch.frombuffer(self._room, dtype=torch.uint8))

    def begin(self) -> None:
        """A step begins: be ready for its notice."""
        if self._room[-1]:
            self._post()

    def told(self, place: int, count: int, what: str) -> list[bool] | None:
        """Which of the `count` gradients of message `place`, which has come, are there; None where it has no list."""
        if not self._room[-1]:
            return None
        if self._first is None:
            wait(self._work, self._peer, what)
            self._first = _FORM.unpack(self._room)[0]
        if place < self._first:
            return None
        there = torch.empty(count, dtype=torch.uint8)
        wait(self._line(_FIRST_LIST + place)(there), self._peer, what)
        return [bool(flag) for flag in there.tolist()]
