"""Messages of one step: receives posted early where their shapes are known, sends kept until they have left."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

import torch

from zerobubble.errors import InputError
from zerobubble.ir import Kind, Op
from zerobubble.program import Program, Recv, Send
from zerobubble.rules import Stuff, Value, uses
from zerobubble.runtime.messages.rings import Rings
from zerobubble.runtime.messages.transport import Transport, lost_with, wait
from zerobubble.runtime.messages.wire import NOTE_LENGTH, Shapes, look_like, read_note, shapes_of, write_note
from zerobubble.runtime.skips import laden, names_of
from zerobubble.runtime.stage import Tensors


class Mailbox:
    """The messages of one rank's row. Call `begin` before each step."""

    def __init__(self, program: Program, transport: Transport) -> None:
        self._device = transport.device
        self._num_stages = program.num_stages
        self._rings = Rings(program, transport) if transport.wires else None
        self._peer: dict[Value, int] = {}
        self._send: dict[tuple[int, Stuff], Any] = {}
        self._receive: dict[tuple[int, Stuff], Any] = {}
        for action in program.rows[transport.rank]:
            if isinstance(action, Send):
                self._send[action.peer, action.value.stuff] = transport.sender(action.value.stuff, action.peer)
            elif isinstance(action, Recv):
                self._peer[action.value] = action.peer
                self._receive[action.peer, action.value.stuff] = transport.receiver(action.value.stuff, action.peer)
        self._known: dict[Value, Shapes] = {}
        self._announcing = False
        self._shared: Rings | None = None
        self._unread: dict[tuple[int, Stuff], deque[Value]] = defaultdict(deque)
        self._arriving: dict[Value, tuple[Tensors, list[Any]]] = {}
        self._leaving: dict[Value, tuple[Tensors, list[Any], int]] = {}

    def begin(self, known: dict[Value, Shapes], announcing: bool) -> None:
        """Start a step with the shapes `known` from an earlier one, or, `announcing`, learn them into `known`."""
        self._known = known
        self._announcing = announcing
        self._shared = None if announcing else self._rings
        if self._shared is not None:
            self._shared.begin(known, self._shapes)

    def post(self, value: Value, peer: int) -> None:
        """Post the receive of `value`; where it cannot be posted early it is read when first needed, in the channel's order."""
        if self._announcing or self._shared is not None:
            self._unread[peer, value.stuff].append(value)
        else:
            self._start(value, peer)

    def take(self, value: Value) -> Tensors:
        """The tensors of a received value, waiting for them; raises `LostContactError` when they cannot come."""
        if value not in self._arriving:
            self._read_up_to(value)
        tensors, works = self._arriving.pop(value)
        for work in works:
            wait(work, self._peer[value], f"waiting for {_describe(value)}")
        if value.stuff is Stuff.ACTIVATION:
            for tensor, shape in zip(tensors, self._known[value], strict=True):
                tensor.requires_grad_(shape.differentiable)
            return laden(tensors, self._known[value])
        return tensors

    def send(self, value: Value, peer: int, tensors: Tensors) -> None:
        """Start sending `tensors` as `value`. Raises `InputError` when an activation has not the shape it had for these inputs."""
        if value.stuff is Stuff.ACTIVATION:
            if self._announcing:
                self._known[value] = shapes_of(tensors)
            elif not look_like(tensors, self._known[value]):
                raise InputError(_changed(value, self._known[value], shapes_of(tensors)))
        if self._shared is not None:
            with lost_with(peer, f"sending {_describe(value)}"):
                self._shared.out(peer, value.stuff).put(tensors, self._shapes(value))
            return
        outgoing = [t.detach().contiguous() for t in tensors]
        if self._announcing and value.stuff is Stuff.ACTIVATION:
            outgoing.insert(0, write_note(self._known[value], self._device))
        start = self._send[peer, value.stuff]
        self._leaving[value] = (tuple(outgoing), [start(t) for t in outgoing], peer)

    def release(self, value: Value) -> None:
        """Wait until a sent value has left, then let it go."""
        if value in self._leaving:
            _, works, peer = self._leaving.pop(value)
            for work in works:
                wait(work, peer, f"sending {_describe(value)}")

    def clear(self) -> None:
        """Let go of everything in flight."""
        self._unread.clear()
        self._arriving.clear()
        self._leaving.clear()

    def _read_up_to(self, value: Value) -> None:
        peer = self._peer[value]
        unread = self._unread[peer, value.stuff]
        while value not in self._arriving:
            following = unread.popleft()
            if self._shared is not None:
                with lost_with(peer, f"waiting for {_describe(following)}"):
                    self._arriving[following] = (self._shared.into(peer, value.stuff).take(self._shapes(following)), [])
                continue
            if value.stuff is Stuff.ACTIVATION:
                note = torch.empty(NOTE_LENGTH, dtype=torch.int64, device=self._device)
                wait(self._receive[peer, value.stuff](note), peer, f"waiting for {_describe(following)}")
                self._known[following] = read_note(note)
            self._start(following, peer)

    def _start(self, value: Value, peer: int) -> None:
        receive = self._receive[peer, value.stuff]
        tensors = tuple(torch.empty(size, dtype=dtype, device=self._device) for size, dtype, _ in self._shapes(value))
        self._arriving[value] = (tensors, [receive(t) for t in tensors])

    def _shapes(self, value: Value) -> Shapes:
        """A gradient looks like the differentiable part of the activation it belongs to, which both ends have seen."""
        if value.stuff is Stuff.ACTIVATION:
            return self._known[value]
        (activation,) = uses(Op(Kind.F, value.stage, value.microbatch), self._num_stages)
        return tuple(shape for shape in self._known[activation] if shape.differentiable)


def _describe(value: Value) -> str:
    what = "activation" if value.stuff is Stuff.ACTIVATION else "gradient"
    return f"the {what} of stage {value.stage}, microbatch {value.microbatch}"


def _told(shapes: Shapes) -> str:
    names = ("",) * (len(shapes) - len(names_of(shapes))) + tuple(f"{name!r} " for name in names_of(shapes))
    return ", ".join(f"{name}{shape}" for name, shape in zip(names, shapes, strict=True))


def _changed(value: Value, before: Shapes, now: Shapes) -> str:
    was, got = _told(before), _told(now)
    return (
        f"{_describe(value)} is {got}, but was {was} in an earlier step with the same input shapes; "
        "pad it to one shape, or let it follow from the shape of the inputs"
    )
