"""Connects all ranks of a pipeline and of its replicas over any endpoint: opens lines, reports lost contact, and closes.

Two barriers protect the opening. After `connect` and `open`, all ranks have their lines: so no rank can close one that another is still
opening, and an error while opening always means a failure.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from zerobubble.errors import InputError
from zerobubble.program import Channel
from zerobubble.runtime.transport.contact import STARTING, LostContactError, Waiting, exchanging, is_own, reason_of
from zerobubble.runtime.transport.control import Topic
from zerobubble.runtime.transport.endpoint import Capabilities, Endpoint, Line
from zerobubble.runtime.transport.gather import gather, gather_objects
from zerobubble.runtime.transport.work import Work


class Carrier(NamedTuple):
    """The transport that carries tensors: its `name`, and `why` it was chosen, the same on every rank.

    `held_bytes` are the bytes of this rank's memory that it holds for messages to others, such as rings in shared memory.
    """

    name: str
    why: str
    held_bytes: int

    def __str__(self) -> str:
        return f"{self.name} ({self.why}), {self.held_bytes} bytes held for messages"


Choose = Callable[[torch.device, Sequence[Channel]], tuple[Endpoint, str]]
"""Chooses the endpoint for tensors on a device over these channels, and says why; every rank calls it."""


class Transport:
    """The lines of one rank to all others of the endpoint's group. A pipeline uses them through its `Peers`.

    Topics go over `endpoint`. Tensors do, too, unless `choose_for_tensors` returns another endpoint for their device: they go over
    `for_tensors`, which `carrier` describes.
    `standing` holds receives that stay posted from one step to the next. They must be kept there, because closing drops them before the
    connections. After an abort (`is_aborted`), received tensors on the device may hold data that no rank sent.
    """

    def __init__(self, endpoint: Endpoint, choose_for_tensors: Choose | None = None) -> None:
        self.group = endpoint.group
        self.rank, self.ranks = endpoint.group.rank, endpoint.group.ranks
        self.device = torch.device("cpu")
        self.waiting = Waiting()
        self.is_aborted = False
        self.standing: dict[Line, Any] = {}
        self._for_control = endpoint
        self.for_tensors = endpoint
        self._choose_for_tensors = choose_for_tensors
        self._why = "passed by the user"
        # At exit, finalizers run in the reverse order of their creation: this one before those of the endpoints.
        self._end = weakref.finalize(self, self.standing.clear)

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the endpoint that carries tensors."""
        return self.for_tensors.capabilities

    @property
    def carrier(self) -> Carrier:
        """The transport that carries tensors, and why it was chosen."""
        return Carrier(self.for_tensors.name, self._why, self.for_tensors.held_bytes())

    def connect(self) -> None:
        """Connects to the other ranks. Afterwards control messages work on all of them."""
        with exchanging():
            self._for_control.connect()
        self._barrier()
        if self.group.stalls is not None:
            self.group.stalls.forget()

    def open(self, device: torch.device, channels: Sequence[Channel]) -> None:
        """Opens the lines for tensors on `device`, and `channels`. When it returns, all ranks have them.

        Raises `InputError` if the endpoint does not carry tensors of this device.
        """
        self.device = device
        if self._choose_for_tensors is not None:
            with exchanging():
                self.for_tensors, self._why = self._choose_for_tensors(device, channels)
        if device.type not in self.capabilities.device_types:
            carried = ", ".join(sorted(self.capabilities.device_types))
            raise InputError(
                "transport {for_tensors!r} carries tensors on {carried}, and the stages are on {device}; {remedy}",
                for_tensors=self.for_tensors.name,
                carried=carried,
                device=str(device),
                remedy="move them, or choose another transport",
            )
        try:
            with exchanging():
                self.for_tensors.open(device, channels)
        except BaseException:
            self.for_tensors.close()  # the pipeline may have closed before this endpoint was chosen, and will not close it
            raise
        self._barrier()
        self.open_channels(channels)

    def open_channels(self, channels: Iterable[Channel]) -> None:
        """Connects channels before their first use; every rank calls it with the same channels."""
        with exchanging():
            self.for_tensors.open_channels(channels)

    def _barrier(self) -> None:
        gather(self._for_control, torch.zeros(1, dtype=torch.uint8, device="cpu"))

    def sender(self, line: Line) -> Callable[[Tensor], Work]:
        """Returns a function that starts sending one tensor along a line that begins here, and returns the work to wait for.

        The function raises `LostContactError` if the connection is known to be lost.
        """
        return _with_lost_contact(self._carries(line).sender(line), line.destination, _raise)

    def receiver(self, line: Line) -> Callable[[Tensor], Work]:
        """Returns a function that starts receiving one tensor from a line that ends here, and returns the work to wait for.

        If the connection is known to be lost, only that wait raises: many receives are posted ahead, and the peer may have closed the
        pipeline after its last message.
        """
        return _with_lost_contact(self._carries(line).receiver(line), line.source, _LostReceive)

    def _carries(self, line: Line) -> Endpoint:
        return self._for_control if isinstance(line.carries, Topic) else self.for_tensors

    def gather_objects(self, value: Any, members: Sequence[int] | None = None) -> list[Any]:
        """Returns the `value` of each of these ranks, by default of all, in order. Call it in a `collective`.

        `write_plain` says which values it accepts.
        """
        return gather_objects(self._for_control, value, members)

    def collective(self, doing: str, members: Sequence[int] = ()) -> AbstractContextManager[None]:
        """Returns a context for a collective of all ranks, or of `members`: a failed exchange in it becomes a `LostContactError`."""
        return self.waiting.collective(doing, members)

    def disconnect(self, rank: int) -> None:
        """Ends the lines to a `rank` that has ended. May be called from any thread."""
        self.abort()  # first: kernels that wait for this rank would keep the host from noticing the lines
        self.for_tensors.disconnect(rank)
        self._for_control.disconnect(rank)

    def abort(self) -> None:
        """Ends the work of the device after a failure; see `Endpoint.abort`. May be called from any thread."""
        if self.for_tensors.abort():
            self.is_aborted = True

    def detach(self) -> None:
        """Closes this process's descriptors after a fork; see `Endpoint.detach`."""
        self._end.detach()
        self.for_tensors.detach()
        self._for_control.detach()

    def close(self) -> None:
        """Drops every connection; a peer that still waits on one gets an error at once."""
        with ExitStack() as rest:  # an endpoint may be the user's, and raise
            rest.callback(self._for_control.close)
            rest.callback(self.for_tensors.close)
            self._end()  # standing receives first: they hold references that keep a backend open


def _with_lost_contact(start: Callable[[Tensor], Work], peer: int, then: Callable[[LostContactError], Work]) -> Callable[[Tensor], Work]:
    """Wraps `start` so that it returns `then(error)` if the connection is lost."""

    def started(tensor: Tensor) -> Work:
        try:
            return start(tensor)
        except RuntimeError as error:
            if is_own(error):
                raise
            lost = LostContactError(peer, STARTING, reason_of(error))
        return then(lost)

    return started


def _raise(error: LostContactError) -> NoReturn:
    raise error


class _LostReceive:
    """A receive that could not start because the connection is lost."""

    def __init__(self, error: LostContactError) -> None:
        self._error = error

    def wait(self) -> NoReturn:
        """Raises that the connection is lost."""
        raise self._error
