"""The handshake of a step: the rank with the first stage tells all others what is to be played and whether its messages are known.

What it tells travels along the stages of the first route: each rank hears it from the rank before its first stage there and passes it on. A
rank whose stages were frozen or unfrozen since adds that, from itself on, messages are to announce their shapes again. Ranks before it do
not hear of that, and need not where activations only go from one rank to ranks behind it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields, replace
from typing import ClassVar, NamedTuple

from torch import Tensor

from zerobubble.errors import InputError
from zerobubble.ir import Schedule
from zerobubble.runtime.transport.control import Sending, Topic
from zerobubble.runtime.transport.transport import Transport
from zerobubble.runtime.values.payload import Payload, Structure, Tensors
from zerobubble.runtime.values.shapes import KnownMessages, Shapes, shapes_of

MOST_KEPT = 64
"""Kinds of inputs whose messages are remembered; the one not met for longest is forgotten, and announced again when it comes back."""


@dataclass(frozen=True, slots=True)
class StepStart:
    """What a step plays: inputs of the kind `key`, cut from `batch_size` samples. `call` numbers the calls of the rank that tells it.

    Messages between ranks from the place `announced_from` of the chain on announce their shapes: all with 0, none with the number of ranks.
    The last three say which schedule the step follows, `digest` by its text. A call that the first rank refuses has no microbatches.
    """

    topic: ClassVar[Topic] = Topic.STEP

    call: int
    key: int
    announced_from: int
    batch_size: int
    num_microbatches: int
    evaluating: bool
    digest: int

    def numbers(self) -> tuple[float, ...]:
        return (self.call, self.key, self.announced_from, self.batch_size, *self.schedule)

    @classmethod
    def read(cls, numbers: Tensor) -> StepStart:
        call, key, announced_from, batch_size, num_microbatches, evaluating, digest = map(int, numbers.tolist())
        return cls(call, key, announced_from, batch_size, num_microbatches, bool(evaluating), digest)

    @property
    def schedule(self) -> tuple[int, bool, int]:
        """Which schedule the step follows."""
        return self.num_microbatches, self.evaluating, self.digest

    @property
    def is_refused(self) -> bool:
        """Whether there is no step, because something is wrong with the call."""
        return self.num_microbatches == 0

    def __str__(self) -> str:
        return f"{'an evaluation' if self.evaluating else 'a training step'} of {self.num_microbatches} microbatches"


_NUMBERS = len(fields(StepStart))


class RefusedError(Exception):
    """The first rank refuses the call that this rank has begun, too."""


class StepMessages(NamedTuple):
    """What is `known` of a step's messages, the ranks with which they are `announced` instead, and the size of the first rank's batch."""

    known: KnownMessages
    announced: frozenset[int]
    batch_size: int


class StepHandshake:
    """Keeps what was learnt of the messages of `schedule` for each kind of inputs, under a number that all ranks share."""

    def __init__(self, schedule: Schedule, transport: Transport) -> None:
        placement, route = schedule.placement, schedule.placement.routes[0]
        parents = {rank: route[0] for rank in range(placement.num_ranks) if rank != route[0]}
        parents |= {rank: route[route.index(rank) - 1] for rank in set(route) if route.index(rank) > 0}
        self._transport = transport
        self._parent = parents.get(transport.rank)
        self._children = [rank for rank, parent in parents.items() if parent == transport.rank]
        self._chain = list(dict.fromkeys(route))
        self._num_ranks = placement.num_ranks
        self._trained: dict[int, tuple[bool, ...]] = {}
        digest = hashlib.sha256(schedule.to_text().encode()).digest()
        self._played = (schedule.num_microbatches, schedule.is_forward_only, int.from_bytes(digest[:6], "big"))
        self._keys: dict[tuple[tuple[Shapes, Structure], ...], int] = {}
        self._known: dict[int, KnownMessages] = {}
        self._telling: list[Sending] = []

    def open(self, call: int, inputs: list[Tensors], batch_size: int, trained: tuple[bool, ...] = ()) -> StepMessages:
        """Start a step with these `inputs`, which the first rank has, where `trained` says which parameters of this rank train.

        It belongs to the `call` of this number. Where messages tell by themselves whether a gradient flows back, `trained` is left out.
        Raises `InputError` when this rank is at another call, or is to play something else, than the one that tells it, and `RefusedError`
        when the first rank refuses the call.
        """
        if self._parent is None:
            start = self._begin(call, inputs, batch_size)
        else:
            start = self._receive(self._parent, call)
            self._compare(start, self._parent)
        if self._trained.get(start.key, trained) != trained and self._transport.rank in self._chain:
            start = replace(start, announced_from=min(start.announced_from, self._chain.index(self._transport.rank)))
        self._trained[start.key] = trained
        self._tell(start)
        if start.announced_from == 0:
            self._known[start.key] = KnownMessages()
        return StepMessages(self._known[start.key], self._announced(start.announced_from), start.batch_size)

    def refuse(self, call: int) -> StepStart | None:
        """Tell the ranks behind that the `call` is refused; where this rank is not the first, what it was told to play, None if nothing.

        Raises `InputError` when this rank is at another call than the one that tells it.
        """
        if self._parent is None:
            self._tell(StepStart(call, 0, 0, 0, 0, evaluating=False, digest=0))
            return None
        start = self._receive(self._parent, call)
        if not start.is_refused:
            return start
        self._tell(start)
        return None

    def _tell(self, start: StepStart) -> None:
        self._telling = [self._transport.tell(start, rank) for rank in self._children]

    def _announced(self, first: int) -> frozenset[int]:
        """The other ranks whose messages with this one announce their shapes: those that know it as this one does."""
        if first == 0:
            return frozenset(range(self._num_ranks)) - {self._transport.rank}
        knowing = self._chain[first:]
        return frozenset(knowing) - {self._transport.rank} if self._transport.rank in knowing else frozenset()

    def clear(self) -> None:
        """Let go of messages: one that was sent keeps its connection open."""
        self._telling = []

    def _begin(self, call: int, inputs: list[Tensors], batch_size: int) -> StepStart:
        signature = tuple((shapes_of(part), part.structure if isinstance(part, Payload) else None) for part in inputs)
        key = self._keys.pop(signature, None)
        announced_from = 0 if key is None else self._num_ranks
        if key is None:
            key = len(self._keys) if len(self._keys) < MOST_KEPT else self._keys.pop(next(iter(self._keys)))
        self._keys[signature] = key
        return StepStart(call, key, announced_from, batch_size, *self._played)

    def _receive(self, parent: int, call: int) -> StepStart:
        """What `parent` tells of this call."""
        start = self._transport.listen(StepStart, _NUMBERS, parent).wait("waiting for the step to begin")
        if start.call != call:
            raise InputError(
                f"rank {parent} is at call {start.call} of step, eval_step, profile or describe, and rank {self._transport.rank} at call "
                f"{call}: one of them has left a call out, or has caught an error that the other did not have; "
                "make the same calls on every rank, and a new Pipeline after an error"
            )
        return start

    def _compare(self, start: StepStart, parent: int) -> None:
        """Raise where this rank is not to play what `parent` has told it."""
        if start.is_refused:
            self._tell(start)
            raise RefusedError
        if start.schedule != self._played:
            mine = StepStart(start.call, start.key, start.announced_from, start.batch_size, *self._played)
            differs = " in another order" if start.schedule[:2] == self._played[:2] else ""
            raise InputError(
                f"rank {parent} begins {start}, rank {self._transport.rank} {mine}{differs}; "
                "every rank must call the same method with the same num_microbatches, and have the same schedule for it"
            )
