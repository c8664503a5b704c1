"""Reports missing gradients on channels that had all before: a notice says from which message on each has a list of those present.

Receives are posted early, with known shapes, so a missing gradient travels as zeros. The receive of a notice is posted before all others of
its channel, and the transport completes messages between two ranks in order. So once a gradient has arrived, a notice sent before it has
arrived too, and checking for one costs a look at one byte. Messages after a notice, until the end of the step, have a list of what is
present.

A transport that carries whole messages marks missing tensors itself and needs no notices. A transport that does not complete in order, such
as NCCL, cannot have them: its host would have to wait for each message. There, a gradient that is suddenly missing is an error.
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
"""Numbers of the lines next to the channel: one for the notice, and one per list, by the index of its message on the channel."""
_NOTICE_FORM = struct.Struct("<q?")
"""A notice: the index of the first message with a list, and a byte that is not 0 once the notice has arrived."""


class MissingGradientsSender:
    """The sender's end. Call `begin` before each step."""

    def __init__(self, peers: Peers, peer: int) -> None:
        self._peers = peers
        self._peer = peer
        self._has_notified = False

    def begin(self) -> None:
        """Begins a step: nothing is missing so far."""
        self._has_notified = False

    def send(self, index: int, gradients: Sequence[Tensor | None]) -> list[tuple[Tensor, Work]]:
        """Starts sending, before message `index`, the list of which gradients it has, if any gradient was missing in this step so far.

        Returns tensors and works; keep the tensors until their works are done.
        """
        present = [gradient is not None for gradient in gradients]
        if not self._has_notified and all(present):
            return []
        sent = []
        if not self._has_notified:
            sent.append(self._send(_NOTICE, torch.frombuffer(bytearray(_NOTICE_FORM.pack(index, True)), dtype=torch.uint8)))
            self._has_notified = True
        sent.append(self._send(_FIRST_LIST + index, torch.tensor(present, dtype=torch.uint8, device="cpu")))
        return sent

    def _send(self, number: int, tensor: Tensor) -> tuple[Tensor, Work]:
        return tensor, self._peers.sender(ValueKind.GRADIENT, self._peer, number)(tensor)


def expect_notices(peers: Peers, peer: int) -> Line:
    """Adds a `MissingGradientsReceiver` for `peer` to the standing receives of the transport, unless there is one; returns its key.

    All programs of a pipeline share one, because its receive stays posted from step to step. A second receive on the same line would take
    the notice away from the first.
    """
    line = peers.line_from(peer, ValueKind.GRADIENT, _NOTICE)
    if line not in peers.standing:
        peers.standing[line] = MissingGradientsReceiver(peers, peer)
    return line


class MissingGradientsReceiver:
    """The receiver's end. Call `begin` before each step."""

    def __init__(self, peers: Peers, peer: int) -> None:
        self._peers = peers
        self._peer = peer
        self._notice = bytearray(_NOTICE_FORM.size)
        self._post()

    def _post(self) -> None:
        self._notice[:] = bytes(_NOTICE_FORM.size)
        self._first: int | None = None
        self._work = self._peers.receiver(ValueKind.GRADIENT, self._peer, _NOTICE)(torch.frombuffer(self._notice, dtype=torch.uint8))

    def begin(self) -> None:
        """Begins a step: gets ready for its notice."""
        if self._notice[-1]:
            self._post()

    def presence(self, index: int, count: int, what: str) -> list[bool] | None:
        """Returns which of the `count` gradients of message `index`, which has arrived, are present; None if it has no list."""
        if not self._notice[-1]:
            return None
        if self._first is None:
            self._peers.wait(self._work, self._peer, what)
            self._first = _NOTICE_FORM.unpack(self._notice)[0]
        if index < self._first:
            return None
        present = torch.empty(count, dtype=torch.uint8, device="cpu")
        work = self._peers.receiver(ValueKind.GRADIENT, self._peer, _FIRST_LIST + index)(present)
        self._peers.wait(work, self._peer, what)
        return [bool(flag) for flag in present.tolist()]
