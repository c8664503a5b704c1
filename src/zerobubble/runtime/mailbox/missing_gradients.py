"""Gradients that come to be missing on a channel where none ever was: a notice says from which message on to expect lists of what is there.

Receives are posted early in shapes that are known, so a missing gradient travels as zeros. The receive of a notice is posted before all
others of its channel, and the transport completes messages between two ranks in order: where a gradient has come, so has a notice that
concerns it, and to see that there is none costs a look at one byte. Only the messages behind a notice, until the step is over, have lists.
A transport that carries whole messages tells by itself what is missing in them. One that does not complete in order, such as NCCL, whose
host would have to wait for each message to know, has no notices: there a gradient that comes to be missing is an error.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from zerobubble.rules import ValueKind
from zerobubble.runtime.transport.endpoint import Line
from zerobubble.runtime.transport.peers import Peers
from zerobubble.runtime.transport.work import Work

_NOTICE, _FIRST_LIST = 1, 2
"""Numbers of the lines beside the channel: one for the notice, and one for the list of each message by its place on the channel."""
_NOTICE_FORM = struct.Struct("<q?")
"""A notice: the place of the first message that has a list, and a byte that is not 0 once the notice has come."""


class MissingGradientsOut:
    """The sender's end. Call `begin` before each step."""

    def __init__(self, peers: Peers, peer: int) -> None:
        self._peers = peers
        self._peer = peer
        self._has_told = False

    def begin(self) -> None:
        """A step begins: nothing is missing so far."""
        self._has_told = False

    def tell(self, place: int, gradients: Sequence[Tensor | None]) -> list[tuple[Tensor, Work]]:
        """Start telling, before message `place` is sent, which of its gradients are there, if any was missing in this step.

        Keep the tensors until the works beside them are done.
        """
        there = [gradient is not None for gradient in gradients]
        if not self._has_told and all(there):
            return []
        sent = []
        if not self._has_told:
            sent.append(self._send(_NOTICE, torch.frombuffer(bytearray(_NOTICE_FORM.pack(place, True)), dtype=torch.uint8)))
            self._has_told = True
        sent.append(self._send(_FIRST_LIST + place, torch.tensor(there, dtype=torch.uint8, device="cpu")))
        return sent

    def _send(self, number: int, tensor: Tensor) -> tuple[Tensor, Work]:
        return tensor, self._peers.sender(ValueKind.GRADIENT, self._peer, number)(tensor)


def expect_notices(peers: Peers, peer: int) -> Line:
    """Have a `MissingGradientsIn` for the notices of `peer` among the transport's standing receives; gives the line it is found by.

    There is one for all programs of a pipeline: its receive stays posted from step to step, and another one posted on the same line would
    get the notice in its place.
    """
    line = peers.line_from(peer, ValueKind.GRADIENT, _NOTICE)
    if line not in peers.standing:
        peers.standing[line] = MissingGradientsIn(peers, peer)
    return line


class MissingGradientsIn:
    """The receiver's end. Call `begin` before each step."""

    def __init__(self, peers: Peers, peer: int) -> None:
        self._peers = peers
        self._peer = peer
        self._room = bytearray(_NOTICE_FORM.size)
        self._post()

    def _post(self) -> None:
        self._room[:] = bytes(_NOTICE_FORM.size)
        self._first: int | None = None
        self._work = self._peers.receiver(ValueKind.GRADIENT, self._peer, _NOTICE)(torch.frombuffer(self._room, dtype=torch.uint8))

    def begin(self) -> None:
        """A step begins: be ready for its notice."""
        if self._room[-1]:
            self._post()

    def told(self, place: int, count: int, what: str) -> list[bool] | None:
        """Which of the `count` gradients of message `place`, which has come, are there; None where it has no list."""
        if not self._room[-1]:
            return None
        if self._first is None:
            self._peers.wait(self._work, self._peer, what)
            self._first = _NOTICE_FORM.unpack(self._room)[0]
        if place < self._first:
            return None
        there = torch.empty(count, dtype=torch.uint8, device="cpu")
        work = self._peers.receiver(ValueKind.GRADIENT, self._peer, _FIRST_LIST + place)(there)
        self._peers.wait(work, self._peer, what)
        return [bool(flag) for flag in there.tolist()]
