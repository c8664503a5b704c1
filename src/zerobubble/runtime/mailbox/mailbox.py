"""The messages of one step: receives are posted early if shapes are known, and sent tensors are kept until they have left.

Order. A message has no tag: both ends take the messages from one rank to another in the same order, which lowering writes into the rows of
the program. So a receive may be posted long before its value is needed, but never out of turn. In the first step with new inputs the shapes
are unknown, and nothing can be posted: `post` then only queues the value, and `take` reads the messages of the rank in order up to it,
announcement before tensors.

Lifetime. A transport reads a sent tensor until its work is done, so the tensor stays in `_leaving` until the program releases the value.
This also bounds memory: the program says when a rank waits for its sends.

A message travels in one of two ways, depending on the capabilities of the transport. If it carries whole messages and their shapes are
known, `WholeMessages` has a call for each. Otherwise a message goes over a line, tensor by tensor after an announcement, and later in one
buffer, at offsets that both ends compute from the shapes.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from zerobubble.errors import InputError, raise_faults
from zerobubble.ir import Kind, Op
from zerobubble.kinds import SENT_BETWEEN_RANKS
from zerobubble.program import Channel, Program, Recv, Send, channel_of
from zerobubble.rules import Value, ValueKind, uses
from zerobubble.runtime.mailbox.missing_gradients import MissingGradientsReceiver, MissingGradientsSender, expect_notices
from zerobubble.runtime.mailbox.whole_messages import WholeMessages
from zerobubble.runtime.transport.contact import Exchange
from zerobubble.runtime.transport.endpoint import Line
from zerobubble.runtime.transport.peers import Peers
from zerobubble.runtime.transport.work import Work
from zerobubble.runtime.values.memory import as_memory, is_plain, why_not_sent
from zerobubble.runtime.values.payload import Cotangents, Payload, Stashed, Structure, Tensors, changes, structure_of
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
                self._exchange[action] = peers.exchange(action.peer, f"sending {_describe(action.value)}")
                self._send[action.peer, action.value.value_kind] = peers.sender(action.value.value_kind, action.peer)
            elif isinstance(action, Recv):
                self._peer[action.value] = action.peer
                self._exchange[action] = peers.exchange(action.peer, f"waiting for {_describe(action.value)}")
                self._receive[action.peer, action.value.value_kind] = peers.receiver(action.value.value_kind, action.peer)
        can = peers.capabilities
        self._whole_messages = WholeMessages(program, peers) if can.carries_whole_messages else None
        self._missing_senders: dict[int, MissingGradientsSender] = {}
        # The transport's own dictionary: what is dropped there when connections close must not be kept alive here.
        self._missing_receivers: dict[Line, MissingGradientsReceiver] = peers.standing
        self._notices: dict[int, Line] = {}
        self._index: dict[Value, int] = {}
        if can.completes_in_order and not can.carries_whole_messages:
            self._watch_missing(program, peers)
        self._known = KnownMessages()
        # The ranks with which messages of this step begin with their shapes.
        self._announced: frozenset[int] = frozenset()
        # The lanes that carry the messages of this step; None if they go over lines.
        self._whole: WholeMessages | None = None
        # Queued receives in the order of the sends of each rank: they cannot be posted before their shapes are known. Whole messages have
        # a queue for each channel, since each has a lane of its own.
        self._unread: dict[tuple[int, ValueKind | None], deque[Value]] = defaultdict(deque)
        # Posted receives: their tensors, and the works to wait for before these are valid.
        self._arriving: dict[Value, tuple[Any, Sequence[Work]]] = {}
        # Sent values: for each destination the tensors, which must not change until the works are done, and the works.
        self._leaving: dict[Value, list[tuple[int, Tensors, list[Work]]]] = defaultdict(list)
        self._gradient_of = {self._activation_of(value): value for value, _ in self._exchange if value.value_kind is ValueKind.GRADIENT}
        # Gradients whose sender does not know that some tensors were frozen: which of them are still needed.
        self._frozen: dict[Value, list[bool]] = {}

    def _watch_missing(self, program: Program, peers: Peers) -> None:
        """Numbers the gradients of each channel, and prepares to send and receive notices that some are missing."""
        places: dict[Channel, int] = defaultdict(int)
        for action in program.rows[peers.rank]:
            if isinstance(action, (Send, Recv)) and action.value.value_kind is ValueKind.GRADIENT:
                channel = channel_of(peers.rank, action)
                self._index[action.value] = places[channel]
                places[channel] += 1
        for source, destination, _ in places:
            if source == peers.rank:
                self._missing_senders[destination] = MissingGradientsSender(peers, destination)
            else:
                self._notices[source] = expect_notices(peers, source)

    def begin(self, messages: KnownMessages, announced: frozenset[int]) -> None:
        """Begins a step with the `messages` of an earlier step, and adds the shapes of messages with the ranks `announced` to them."""
        self._known = messages
        self._announced = announced
        self._whole = None if announced else self._whole_messages
        if self._whole is not None:
            self._whole.begin(messages, self._shapes, self._largest_shapes)
        self._frozen.clear()
        for outgoing in self._missing_senders.values():
            outgoing.begin()
        for incoming in self._missing_receivers.values():
            incoming.begin()

    def post(self, value: Value, peer: int) -> None:
        """Posts the receive of `value`. If its shapes are unknown, it is queued, and read in order when it is needed."""
        if peer in self._announced or self._whole is not None:
            self._unread[peer, None if self._whole is None else value.value_kind].append(value)
        else:
            self._start(value, peer)

    def take(self, value: Value) -> Any:
        """Waits for `value` and returns its `Tensors` or `Cotangents`. Raises `LostContactError` if they cannot arrive."""
        if value not in self._arriving:
            self._read_up_to(value)
        tensors, works = self._arriving.pop(value)
        if self._whole is not None:
            return self._taken_whole(value, tensors)
        self._wait_for(value, works)
        if value.value_kind is not ValueKind.GRADIENT:
            for tensor, shape in zip(tensors, self._known[value], strict=True):
                tensor.requires_grad_(shape.differentiable)
            if self._known.structures:
                return self._as_payload(value, tensors)
            return tensors
        return self._without_frozen(value, self._without_missing(value, tensors))

    def send(self, value: Value, peer: int, tensors: Any) -> None:
        """Starts sending `value`, whose `Tensors` or `Cotangents` are given.

        Raises `InputError` if an activation has other shapes or constants than before with the same inputs, and, if messages cannot say so,
        if a gradient is missing that was present before.
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
            if peer in self._missing_senders and not self._may_lack(self._rank, peer):
                ahead = self._missing_senders[peer].send(self._index[value], tensors)
        else:
            outgoing = packed([as_memory(t) for t in tensors])
        if peer in self._announced and value.value_kind is not ValueKind.GRADIENT:
            announcement = write_announcement(self._known[value], self._known.structures.get(value), self._device)
            outgoing = [torch.tensor([announcement.numel()], device=self._device), announcement, *outgoing]
        start = self._send[peer, value.value_kind]
        leaving = [*ahead, *((t, start(t)) for t in outgoing)]
        self._leaving[value].append((peer, tuple(t for t, _ in leaving), [work for _, work in leaving]))

    def release(self, value: Value) -> None:
        """Waits until a sent value has left for all ranks, then drops it."""
        for peer, _, works in self._leaving.pop(value, ()):
            for work in works:
                self._wait(work, peer, f"sending {_describe(value)}")

    def drain(self, coming: Iterable[Value]) -> None:
        """Receives the values that are posted and still `coming`, and drops them; waits until everything sent has left."""
        for value in coming:
            self.take(value)
        for value in list(self._leaving):
            self.release(value)

    def close(self) -> None:
        """Drops everything in flight and all lanes: there are no more steps."""
        self._unread.clear()
        self._arriving.clear()
        self._leaving.clear()
        if self._whole_messages is not None:
            self._whole_messages.close()

    def _read_up_to(self, value: Value) -> None:
        """Receives the values that are queued before `value`, in order, and `value`."""
        peer = self._peer[value]
        unread = self._unread[peer, None if self._whole is None else value.value_kind]
        while value not in self._arriving:
            following = unread.popleft()
            if self._whole is not None:
                with self._exchange[following, peer]:
                    self._arriving[following] = self._whole.take[following](), ()
                continue
            if following.value_kind is not ValueKind.GRADIENT:
                self._read_announcement(following, peer)
            self._start(following, peer)
            if following != value:  # the next announcement is on the same line
                tensors, works = self._arriving[following]
                self._wait_for(following, works)
                self._arriving[following] = tensors, ()

    def _wait_for(self, value: Value, works: Sequence[Work]) -> None:
        for work in works:
            self._wait(work, self._peer[value], f"waiting for {_describe(value)}")

    def _read_announcement(self, value: Value, peer: int) -> None:
        """Reads the shapes of a message from the announcement before it, which begins with its length."""
        receive = self._receive[peer, value.value_kind]
        what = f"waiting for {_describe(value)}"
        length = torch.empty(1, dtype=torch.int64, device=self._device)
        self._wait(receive(length), peer, what)
        announcement = torch.empty(int(length.item()), dtype=torch.uint8, device=self._device)
        self._wait(receive(announcement), peer, what)
        self._known[value], structure = read_announcement(announcement)
        if structure is not None:
            self._known.structures[value] = structure

    def _start(self, value: Value, peer: int) -> None:
        """Posts the receive of a value with known shapes.

        If some gradients may be missing, a tensor that says which of them are present comes first.
        """
        receive = self._receive[peer, value.value_kind]
        forms: list[Form] = [(size, dtype) for size, dtype, _ in self._shapes(value)]
        coming, tensors = unpacked(forms, self._device)
        if value.value_kind is ValueKind.GRADIENT and forms and self._may_lack(peer, self._rank):
            present = torch.empty(len(forms), dtype=torch.uint8, device=self._device)
            coming, tensors = (present, *coming), (present, *tensors)
        self._arriving[value] = (tensors, [receive(t) for t in coming])

    def _check(self, value: Value, tensors: Tensors, *, is_announced: bool) -> None:
        """Compares the sent value with the value of earlier steps, or records its shapes."""
        messages = self._known
        structure = None if type(tensors) is tuple else structure_of(tensors)
        if is_announced or not all(map(is_plain, tensors)):
            self._refuse_what_cannot_be_sent(value, tensors)
        if is_announced:
            messages[value] = shapes_of(tensors)
            if structure is not None:
                messages.structures[value] = structure
        elif (messages.structures or structure is not None) and messages.structures.get(value) != structure:
            raise _changed_structure(value, messages.structures.get(value), structure)
        elif not have_shapes(tensors, messages[value]):
            self._change(value, tensors)

    def _refuse_what_cannot_be_sent(self, value: Value, tensors: Tensors) -> None:
        reasons = [(place, why_not_sent(tensor, self._device)) for place, tensor in enumerate(tensors)]
        raise_faults(f"tensor {place} of {_describe(value)} {reason}" for place, reason in reasons if reason is not None)

    def _change(self, value: Value, tensors: Tensors) -> None:
        """Handles an activation that differs from an earlier step, which is allowed if stages were only frozen or unfrozen.

        A whole message says for each tensor whether it requires a gradient. If messages cannot say so, the next stage continues as before:
        a gradient that returns for a tensor without need of one is dropped, and a tensor that newly requires one is refused.
        """
        self._refuse_what_cannot_be_sent(value, tensors)
        before, now = self._known[value], shapes_of(tensors)
        if not are_same_but_for_gradients(before, now):
            raise _changed_shapes(value, before, now)
        if self._whole is not None:
            self._learn(value, now)
            return
        needed = [(old.differentiable, new.differentiable) for old, new in zip(before, now, strict=True)]
        if (False, True) in needed:
            raise _unfrozen(value)
        if value in self._gradient_of:
            self._frozen[self._gradient_of[value]] = [is_needed for was_needed, is_needed in needed if was_needed]

    def _learn(self, activation: Value, shapes: Shapes) -> None:
        """Records that other tensors of `activation` require gradients than before: its message and its gradient's message change."""
        assert self._whole is not None
        self._known[activation] = shapes
        for value in (activation, self._gradient_of.get(activation)):
            if value is not None:
                self._whole.change(value, self._shapes(value))

    def _taken_whole(self, value: Value, tensors: Any) -> Any:
        """Returns what arrived as a whole message. If other tensors require gradients than before, stages were frozen or unfrozen."""
        if value.value_kind is not ValueKind.ACTIVATION:
            return tensors
        for tensor, shape in zip(tensors, self._known[value], strict=True):
            if tensor.requires_grad is not shape.differentiable:
                self._learn(value, shapes_of(tensors))
                break
        return self._as_payload(value, tensors) if self._known.structures else tensors

    def _as_payload(self, value: Value, tensors: Tensors) -> Tensors:
        """Returns the tensors of an activation in the structure that the sender had."""
        structure = self._known.structures.get(value)
        return tensors if structure is None else Payload.from_tensors(tensors, structure)

    def _may_lack(self, source: int, destination: int) -> bool:
        """Whether gradients from `source` that go over lines begin with a tensor that says which of them are present."""
        if not self._announced.isdisjoint((source, destination)):
            return True
        lacking = self._known.missing_gradients
        return bool(lacking) and Channel(source, destination, ValueKind.GRADIENT) in lacking

    def _filled(self, value: Value, peer: int, gradients: Cotangents) -> Sequence[Tensor]:
        """Returns what to send for these gradients, with zeros for missing ones; if some are expected, a presence tensor comes first."""
        present = [gradient is not None for gradient in gradients]
        if present and self._may_lack(self._rank, peer):
            if not all(present):
                self._known.missing_gradients.add(Channel(self._rank, peer, ValueKind.GRADIENT))
            return [torch.tensor(present, dtype=torch.uint8, device=self._device), *packed(self._with_zeros(value, gradients))]
        if not all(present) and peer not in self._missing_senders:
            raise _missing_gradient(value, present.index(False))
        return packed(self._with_zeros(value, gradients))

    def _with_zeros(self, value: Value, gradients: Cotangents) -> list[Tensor]:
        return [
            torch.zeros(shape.size, dtype=shape.dtype, device=self._device) if gradient is None else as_memory(gradient)
            for gradient, shape in zip(gradients, self._shapes(value), strict=True)
        ]

    def _without_missing(self, value: Value, tensors: Tensors) -> Cotangents:
        """Returns the gradients of a message, None for gradients that the message or a notice reports as missing."""
        peer = self._peer[value]
        if self._may_lack(peer, self._rank):
            if not tensors:
                return ()
            presence = tensors[0].tolist()
            if not all(presence):
                self._known.missing_gradients.add(Channel(peer, self._rank, ValueKind.GRADIENT))
            return _masked(tensors[1:], presence)
        if not self._notices:
            return tensors
        notices = self._missing_receivers[self._notices[peer]]
        present = notices.presence(self._index[value], len(tensors), f"waiting for {_describe(value)}")
        return tensors if present is None else _masked(tensors, present)

    def _without_frozen(self, value: Value, gradients: Cotangents) -> Cotangents:
        """Drops gradients of tensors that no longer require one, which the sender does not know."""
        if value not in self._frozen:
            return gradients
        return tuple(gradient for gradient, needed in zip(gradients, self._frozen[value], strict=True) if needed)

    def _shapes(self, value: Value) -> Shapes:
        """Returns the shapes of a message. Gradients have the shapes of the differentiable tensors of their activation."""
        if value.value_kind is not ValueKind.GRADIENT:
            return self._known[value]
        return tuple(shape for shape in self._known[self._activation_of(value)] if shape.differentiable)

    def _largest_shapes(self, value: Value) -> Shapes:
        """Returns the shapes of a message if every tensor that can have a gradient required one."""
        if value.value_kind is not ValueKind.GRADIENT:
            return self._known[value]
        return tuple(s for s in self._known[self._activation_of(value)] if s.dtype.is_floating_point or s.dtype.is_complex)

    def _activation_of(self, gradient: Value) -> Value:
        (activation,) = uses(Op(Kind.F, gradient.stage, gradient.microbatch), self._num_stages)
        return activation


def _masked(gradients: Tensors, present: list[bool]) -> Cotangents:
    return tuple(gradient if flag else None for flag, gradient in zip(present, gradients, strict=True))


def _describe(value: Value) -> str:
    """Returns what errors call a message."""
    return f"the {SENT_BETWEEN_RANKS[value.value_kind][0]} of stage {value.stage}, microbatch {value.microbatch}"


def _changed_shapes(value: Value, before: Shapes, now: Shapes) -> InputError:
    """Returns the error for an activation with changed shapes."""
    return InputError(
        "{value} is {got}, but was {expected} in an earlier step with the same input shapes",
        value=_describe(value),
        got=", ".join(map(str, now)),
        expected=", ".join(map(str, before)),
        remedy="pad it to one shape, or make its shape depend only on the shapes of the inputs",
    )


def _unfrozen(value: Value) -> InputError:
    """Returns the error for an activation that newly requires a gradient."""
    return InputError(
        "{value} requires a gradient, but required none in an earlier step with the same inputs, and the next stage cannot be notified",
        value=_describe(value),
        remedy="create a new Pipeline after stages are unfrozen, or unfreeze them before the first step",
    )


def _changed_structure(value: Value, before: Structure, now: Structure) -> InputError:
    """Returns the error for an activation with other constants, another structure, or other losses that stages added."""
    earlier, later = (structure.losses if isinstance(structure, Stashed) else () for structure in (before, now))
    if earlier != later:
        return InputError(
            "{value} comes with {later} added to the loss, but came with {earlier} in an earlier step with the same inputs",
            value=_describe(value),
            later=_named(later),
            earlier=_named(earlier),
            remedy="add the same in every step, zeros if need be, as zb.nn.add_loss(name, 0 * x.sum())",
        )
    if before is None or now is None:
        what = f"is {'a tuple of tensors' if now is None else now}, but was {'a tuple of tensors' if before is None else before}"
    else:
        what = f"has changed: {'; '.join(changes(before, now))}"
    message = "{value} {change} in an earlier step with the same inputs, and values other than tensors are sent only once"
    return InputError(
        message, value=_describe(value), change=what, remedy="pass values that change as tensors, or make them depend only on the inputs"
    )


def _named(losses: Sequence[str]) -> str:
    return ", ".join(map(repr, losses)) or "nothing"


def _missing_gradient(value: Value, place: int) -> InputError:
    """Returns the error for a message without the gradient of tensor number `place`."""
    message = (
        "stage {stage} has no gradient for tensor {tensor} of its inputs in microbatch {microbatch}, but used its inputs in every "
        "microbatch of an earlier step with the same input shapes"
    )
    return InputError(
        message, stage=value.stage, tensor=place, microbatch=value.microbatch, remedy="use it in all microbatches, as in y + 0 * x.sum()"
    )


Form = tuple[tuple[int, ...], torch.dtype]
"""The size and dtype of a tensor."""
_ALIGN = 64
"""Tensors begin at multiples of this many bytes: it suits vector instructions and is a multiple of the size of any dtype."""


def packed(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Returns what to send for contiguous `tensors`: a single one as it is, several in one buffer of bytes on their device."""
    if len(tensors) < 2:
        return tensors
    buffer, places = _buffer([(t.shape, t.dtype) for t in tensors], tensors[0].device)
    for tensor, place in zip(tensors, places, strict=True):
        place.copy_(tensor)
    return (buffer,)


def unpacked(forms: Sequence[Form], device: torch.device) -> tuple[Sequence[Tensor], tuple[Tensor, ...]]:
    """Returns what to receive for tensors of these forms, and the tensors; they are valid once everything is received."""
    if len(forms) < 2:
        alone = tuple(torch.empty(size, dtype=dtype, device=device) for size, dtype in forms)
        return alone, alone
    buffer, tensors = _buffer(forms, device)
    return (buffer,), tensors


def _buffer(forms: Iterable[Form], device: torch.device) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Returns an empty buffer for tensors of these forms, and the tensors in it."""
    places, end = [], 0
    for size, dtype in forms:
        places.append((end, tuple(size), dtype))
        end += -(-math.prod(size) * dtype.itemsize // _ALIGN) * _ALIGN
    buffer = torch.empty(end, dtype=torch.uint8, device=device)
    return buffer, tuple(_inside(buffer, *place) for place in places)


def _inside(buffer: Tensor, start: int, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns a tensor over bytes of the buffer, with its own version counter; views would all share one."""
    empty = torch.empty(0, dtype=dtype, device=buffer.device)
    return empty.set_(buffer.untyped_storage(), start // dtype.itemsize, size)  # type: ignore[call-overload, no-any-return]
