"""The messages of one step: receives are posted early where their shapes are known, and what was sent is kept until it has left.

A message travels in one of two ways, which the transport's capabilities decide. Where it carries whole messages and their shapes are known,
`WholeMessages` has a call for each. Else a message goes tensor by tensor over a line: in the first step with new inputs behind an
announcement of its shapes, later in one buffer whose receive is posted early.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from zerobubble.errors import InputError
from zerobubble.ir import Kind, Op
from zerobubble.program import Channel, Program, Recv, Send, channel_of
from zerobubble.rules import Value, ValueKind, uses
from zerobubble.runtime.mailbox.missing_gradients import MissingGradientsIn, MissingGradientsOut, expect_notices
from zerobubble.runtime.mailbox.packing import Form, packed, unpacked
from zerobubble.runtime.mailbox.refusals import changed_shapes, changed_structure, describe, lacking_gradient, unfrozen
from zerobubble.runtime.mailbox.whole_messages import WholeMessages
from zerobubble.runtime.transport.contact import Exchange
from zerobubble.runtime.transport.endpoint import Line
from zerobubble.runtime.transport.peers import Peers
from zerobubble.runtime.transport.work import Work
from zerobubble.runtime.values.memory import as_memory, is_plain, why_not_sent
from zerobubble.runtime.values.payload import Cotangents, Payload, Tensors, structure_of
from zerobubble.runtime.values.shapes import (
    KnownMessages,
    Shapes,
    are_same_but_for_gradients,
    have_shapes,
    read_announcement,
    shapes_of,
    write_announcement,
)


class Mailbox:
    """The messages of one rank's row. Call `begin` before each step."""

    def __init__(self, program: Program, peers: Peers) -> None:
        self._device = peers.device
        self._rank = peers.rank
        self._num_stages = program.num_stages
        self._wait = peers.wait
        self._peer: dict[Value, int] = {}
        self._exchange: dict[tuple[Value, int], Exchange] = {}
        self._send: dict[tuple[int, ValueKind], Callable[[Tensor], Work]] = {}
        self._receive: dict[tuple[int, ValueKind], Callable[[Tensor], Work]] = {}
        for action in program.rows[peers.rank]:
            if isinstance(action, Send):
                self._exchange[action] = peers.exchange(action.peer, f"sending {describe(action.value)}")
                self._send[action.peer, action.value.value_kind] = peers.sender(action.value.value_kind, action.peer)
            elif isinstance(action, Recv):
                self._peer[action.value] = action.peer
                self._exchange[action] = peers.exchange(action.peer, f"waiting for {describe(action.value)}")
                self._receive[action.peer, action.value.value_kind] = peers.receiver(action.value.value_kind, action.peer)
        can = peers.capabilities
        self._whole_messages = WholeMessages(program, peers) if can.carries_whole_messages else None
        self._missing_out: dict[int, MissingGradientsOut] = {}
        # The transport's own dictionary: what is dropped there when connections close must not be kept here.
        self._missing_in: dict[Line, MissingGradientsIn] = peers.standing
        self._notices: dict[int, Line] = {}
        self._place: dict[Value, int] = {}
        if can.completes_in_order and not can.carries_whole_messages:
            self._watch_missing(program, peers)
        self._known = KnownMessages()
        # The ranks with which messages announce their shapes in this step.
        self._announced: frozenset[int] = frozenset()
        # What this step's messages go by, None where they go over lines.
        self._whole: WholeMessages | None = None
        # Receives that were asked for, in the order of each channel, and could not be posted yet.
        self._unread: dict[tuple[int, ValueKind], deque[Value]] = defaultdict(deque)
        # Received values: their tensors, and the works to wait for before they are there.
        self._arriving: dict[Value, tuple[Any, Sequence[Work]]] = {}
        # Sent values: for each rank they go to the tensors, which stay unchanged until the works are done, and these.
        self._leaving: dict[Value, list[tuple[int, Tensors, list[Work]]]] = defaultdict(list)
        self._gradient_of = {self._activation_of(value): value for value, _ in self._exchange if value.value_kind is ValueKind.GRADIENT}
        # For gradients whose sender does not know that some of their tensors need none any more: which of them are still needed.
        self._frozen: dict[Value, list[bool]] = {}

    def _watch_missing(self, program: Program, peers: Peers) -> None:
        """Number the gradients of each channel, and be ready to tell and to be told that some are missing."""
        places: dict[Channel, int] = defaultdict(int)
        for action in program.rows[peers.rank]:
            if isinstance(action, (Send, Recv)) and action.value.value_kind is ValueKind.GRADIENT:
                channel = channel_of(peers.rank, action)
                self._place[action.value] = places[channel]
                places[channel] += 1
        for source, destination, _ in places:
            if source == peers.rank:
                self._missing_out[destination] = MissingGradientsOut(peers, destination)
            else:
                self._notices[source] = expect_notices(peers, source)

    def begin(self, known: KnownMessages, announced: frozenset[int]) -> None:
        """Start a step with the shapes `known` from an earlier one, and learn into `known` those of messages with the ranks `announced`."""
        self._known = known
        self._announced = announced
        self._whole = None if announced else self._whole_messages
        if self._whole is not None:
            self._whole.begin(known, self._shapes, self._largest_shapes)
        self._frozen.clear()
        for outgoing in self._missing_out.values():
            outgoing.begin()
        for incoming in self._missing_in.values():
            incoming.begin()

    def post(self, value: Value, peer: int) -> None:
        """Post the receive of `value`; where it cannot be posted early it is read when first needed, in the channel's order."""
        if peer in self._announced or self._whole is not None:
            self._unread[peer, value.value_kind].append(value)
        else:
            self._start(value, peer)

    def take(self, value: Value) -> Any:
        """The `Tensors` or `Cotangents` received as `value`, waiting for them; raises `LostContactError` when they cannot come."""
        if value not in self._arriving:
            self._read_up_to(value)
        tensors, works = self._arriving.pop(value)
        if self._whole is not None:
            return self._taken_whole(value, tensors)
        for work in works:
            self._wait(work, self._peer[value], f"waiting for {describe(value)}")
        if value.value_kind is not ValueKind.GRADIENT:
            for tensor, shape in zip(tensors, self._known[value], strict=True):
                tensor.requires_grad_(shape.differentiable)
            if self._known.structures:
                return self._as_payload(value, tensors)
            return tensors
        return self._without_frozen(value, self._without_missing(value, tensors))

    def send(self, value: Value, peer: int, tensors: Any) -> None:
        """Start sending the `Tensors` or `Cotangents` that are `value`.

        Raises `InputError` when an activation is not what it was with the same inputs, in shapes or constants, and, where messages
        cannot tell it, when a gradient is missing that was there.
        """
        if value.value_kind is not ValueKind.GRADIENT:
            self._check(value, tensors, is_announced=peer in self._announced)
        if self._whole is not None:
            with self._exchange[value, peer]:
                self._whole.put[value, peer](tensors)
            return
        ahead: list[tuple[Tensor, Any]] = []
        outgoing: Sequence[Tensor]
        if value.value_kind is ValueKind.GRADIENT:
            outgoing = self._filled(value, peer, tensors)
            if peer in self._missing_out and not self._may_lack(self._rank, peer):
                ahead = self._missing_out[peer].tell(self._place[value], tensors)
        else:
            outgoing = packed([as_memory(t) for t in tensors])
        if peer in self._announced and value.value_kind is not ValueKind.GRADIENT:
            announcement = write_announcement(self._known[value], self._known.structures.get(value), self._device)
            outgoing = [torch.tensor([announcement.numel()], device=self._device), announcement, *outgoing]
        start = self._send[peer, value.value_kind]
        leaving = [*ahead, *((t, start(t)) for t in outgoing)]
        self._leaving[value].append((peer, tuple(t for t, _ in leaving), [work for _, work in leaving]))

    def release(self, value: Value) -> None:
        """Wait until a sent value has left, to all ranks that it goes to, then let it go."""
        for peer, _, works in self._leaving.pop(value, ()):
            for work in works:
                self._wait(work, peer, f"sending {describe(value)}")

    def drain(self, coming: Iterable[Value]) -> None:
        """Receive the values posted and still `coming`, and drop them; wait until all that was sent has left."""
        for value in coming:
            self.take(value)
        for value in list(self._leaving):
            self.release(value)

    def close(self) -> None:
        """Let go of everything in flight, and of all lanes: there are no more steps."""
        self._unread.clear()
        self._arriving.clear()
        self._leaving.clear()
        if self._whole_messages is not None:
            self._whole_messages.close()

    def _read_up_to(self, value: Value) -> None:
        """Receive what was asked for on the channel of `value`, in order, up to it."""
        peer = self._peer[value]
        unread = self._unread[peer, value.value_kind]
        while value not in self._arriving:
            following = unread.popleft()
            if self._whole is not None:
                with self._exchange[following, peer]:
                    self._arriving[following] = self._whole.take[following](), ()
                continue
            if value.value_kind is not ValueKind.GRADIENT:
                self._read_announcement(following, peer)
            self._start(following, peer)

    def _read_announcement(self, value: Value, peer: int) -> None:
        """Learn from the announcement before a message what shapes it has; its length comes first."""
        receive = self._receive[peer, value.value_kind]
        what = f"waiting for {describe(value)}"
        length = torch.empty(1, dtype=torch.int64, device=self._device)
        self._wait(receive(length), peer, what)
        announcement = torch.empty(int(length.item()), dtype=torch.uint8, device=self._device)
        self._wait(receive(announcement), peer, what)
        self._known[value], structure = read_announcement(announcement)
        if structure is not None:
            self._known.structures[value] = structure

    def _start(self, value: Value, peer: int) -> None:
        """Post the receive of a value whose shapes are known, behind a tensor that tells which gradients are there, where some may lack."""
        receive = self._receive[peer, value.value_kind]
        forms: list[Form] = [(size, dtype) for size, dtype, _ in self._shapes(value)]
        coming, tensors = unpacked(forms, self._device)
        if value.value_kind is ValueKind.GRADIENT and forms and self._may_lack(peer, self._rank):
            there = torch.empty(len(forms), dtype=torch.uint8, device=self._device)
            coming, tensors = (there, *coming), (there, *tensors)
        self._arriving[value] = (tensors, [receive(t) for t in coming])

    def _check(self, value: Value, tensors: Tensors, *, is_announced: bool) -> None:
        """See that what is sent is what it was, or learn what it is."""
        known = self._known
        structure = None if type(tensors) is tuple else structure_of(tensors)
        if is_announced or not all(map(is_plain, tensors)):
            self._refuse_what_cannot_be_sent(value, tensors)
        if is_announced:
            known[value] = shapes_of(tensors)
            if structure is not None:
                known.structures[value] = structure
        elif (known.structures or structure is not None) and known.structures.get(value) != structure:
            raise InputError(changed_structure(value, known.structures.get(value), structure))
        elif not have_shapes(tensors, known[value]):
            self._change(value, tensors)

    def _refuse_what_cannot_be_sent(self, value: Value, tensors: Tensors) -> None:
        reasons = [(place, why_not_sent(tensor, self._device)) for place, tensor in enumerate(tensors)]
        faults = [f"tensor {place} of {describe(value)} {reason}" for place, reason in reasons if reason is not None]
        if faults:
            raise InputError("; ".join(faults))

    def _change(self, value: Value, tensors: Tensors) -> None:
        """An activation to be sent looks otherwise than in an earlier step: that may be only because stages were frozen or unfrozen.

        A whole message tells with each tensor whether a gradient flows back. Where messages cannot tell it, the next stage goes on as
        before: what comes back for a tensor that needs no gradient any more is dropped, and a tensor that needs one only now is refused.
        """
        self._refuse_what_cannot_be_sent(value, tensors)
        before, now = self._known[value], shapes_of(tensors)
        if not are_same_but_for_gradients(before, now):
            raise InputError(changed_shapes(value, before, now))
        if self._whole is not None:
            self._learn(value, now)
            return
        needed = [(old.differentiable, new.differentiable) for old, new in zip(before, now, strict=True)]
        if (False, True) in needed:
            raise InputError(unfrozen(value))
        if value in self._gradient_of:
            self._frozen[self._gradient_of[value]] = [is_needed for was_needed, is_needed in needed if was_needed]

    def _learn(self, activation: Value, shapes: Shapes) -> None:
        """A gradient flows back for other tensors of `activation` than before: its message and that of its gradient change."""
        assert self._whole is not None
        self._known[activation] = shapes
        for value in (activation, self._gradient_of.get(activation)):
            if value is not None:
                self._whole.change(value, self._shapes(value))

    def _taken_whole(self, value: Value, tensors: Any) -> Any:
        """What came as a whole message. Where it needs gradients for other tensors than before, stages were frozen or unfrozen."""
        if value.value_kind is not ValueKind.ACTIVATION:
            return tensors
        for tensor, shape in zip(tensors, self._known[value], strict=True):
            if tensor.requires_grad is not shape.differentiable:
                self._learn(value, shapes_of(tensors))
                break
        return self._as_payload(value, tensors) if self._known.structures else tensors

    def _as_payload(self, value: Value, tensors: Tensors) -> Tensors:
        """The tensors of an activation put together as the sender had them."""
        structure = self._known.structures.get(value)
        return tensors if structure is None else Payload.of(tensors, structure)

    def _may_lack(self, source: int, destination: int) -> bool:
        """Whether gradients from `source` that go over lines are led by a tensor that tells which of them are there."""
        if not self._announced.isdisjoint((source, destination)):
            return True
        lacking = self._known.missing_gradients
        return bool(lacking) and Channel(source, destination, ValueKind.GRADIENT) in lacking

    def _filled(self, value: Value, peer: int, gradients: Cotangents) -> Sequence[Tensor]:
        """What goes on the channel for these gradients: zeros for missing ones, and where some are expected, first which are there."""
        there = [gradient is not None for gradient in gradients]
        if there and self._may_lack(self._rank, peer):
            if not all(there):
                self._known.missing_gradients.add(Channel(self._rank, peer, ValueKind.GRADIENT))
            return [torch.tensor(there, dtype=torch.uint8, device=self._device), *packed(self._with_zeros(value, gradients))]
        if not all(there) and peer not in self._missing_out:
            raise InputError(lacking_gradient(value, there.index(False)))
        return packed(self._with_zeros(value, gradients))

    def _with_zeros(self, value: Value, gradients: Cotangents) -> list[Tensor]:
        return [
            torch.zeros(shape.size, dtype=shape.dtype, device=self._device) if gradient is None else as_memory(gradient)
            for gradient, shape in zip(gradients, self._shapes(value), strict=True)
        ]

    def _without_missing(self, value: Value, tensors: Tensors) -> Cotangents:
        """The gradients of a message, None for those of which it, or a notice beside it, says that they are missing."""
        peer = self._peer[value]
        if self._may_lack(peer, self._rank):
            if not tensors:
                return ()
            told = tensors[0].tolist()
            if not all(told):
                self._known.missing_gradients.add(Channel(peer, self._rank, ValueKind.GRADIENT))
            return _masked(tensors[1:], told)
        if not self._notices:
            return tensors
        notices = self._missing_in[self._notices[peer]]
        there = notices.told(self._place[value], len(tensors), f"waiting for {describe(value)}")
        return tensors if there is None else _masked(tensors, there)

    def _without_frozen(self, value: Value, gradients: Cotangents) -> Cotangents:
        """The gradients without those of tensors that need none any more, of which the sender does not know."""
        if value not in self._frozen:
            return gradients
        return tuple(gradient for gradient, needed in zip(gradients, self._frozen[value], strict=True) if needed)

    def _shapes(self, value: Value) -> Shapes:
        """A gradient looks like the differentiable part of the activation it belongs to, which both ends have seen."""
        if value.value_kind is not ValueKind.GRADIENT:
            return self._known[value]
        return tuple(shape for shape in self._known[self._activation_of(value)] if shape.differentiable)

    def _largest_shapes(self, value: Value) -> Shapes:
        """What a message would be if a gradient flowed back for every tensor that can have one."""
        if value.value_kind is not ValueKind.GRADIENT:
            return self._known[value]
        return tuple(s for s in self._known[self._activation_of(value)] if s.dtype.is_floating_point or s.dtype.is_complex)

    def _activation_of(self, gradient: Value) -> Value:
        (activation,) = uses(Op(Kind.F, gradient.stage, gradient.microbatch), self._num_stages)
        return activation


def _masked(gradients: Tensors, there: list[bool]) -> Cotangents:
    return tuple(gradient if flag else None for flag, gradient in zip(there, gradients, strict=True))
