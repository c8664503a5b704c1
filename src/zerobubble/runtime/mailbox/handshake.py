"""The handshake of a step: the rank with the first stage tells all others what is to be played and whether its messages are known.

What it tells travels along the stages of the first route: each rank hears it from the rank before its first stage there and passes it on. A
rank whose stages were frozen or unfrozen since adds that, from itself on, messages are to announce their shapes again. Ranks before it do
not hear of that, and need not where activations only go from one rank to ranks behind it.

Where microbatches are ordered by what they cost, the first rank sends the order after the start of the step. If it has planned the
passes for these microbatches ahead, it sends them with the order.

Where stages talk to those of other pipelines, the first ranks of these pipelines compare what they begin before they tell it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar, NamedTuple

from torch import Tensor

from zerobubble.errors import InputError
from zerobubble.ir import Schedule
from zerobubble.runtime.transport.control import Sending, Topic
from zerobubble.runtime.transport.peers import Peers
from zerobubble.runtime.values.payload import Payload, Structure, Tensors
from zerobubble.runtime.values.shapes import KnownMessages, Shapes, shapes_of

MOST_KEPT = 64
"""Kinds of inputs whose messages are remembered; the one not met for longest is forgotten, and announced again when it comes back."""


@dataclass(frozen=True, slots=True)
class StepStart:
    """What a step plays: inputs of the kind `key`, cut from `batch_size` samples. `call` numbers the calls of the rank that tells it.

    Messages between ranks from the place `announced_from` of the chain on announce their shapes: all with 0, none with the number of ranks.
    Then three say which schedule the step follows, `digest` by its text. Unless `more` is 0, a `StepOrder` of so many numbers comes next. A
    call that the first rank refuses has no microbatches.
    """

    topic: ClassVar[Topic] = Topic.STEP

    call: int
    key: int
    announced_from: int
    batch_size: int
    num_microbatches: int
    evaluating: bool
    digest: int
    more: int = 0

    def numbers(self) -> tuple[int, ...]:
        return (self.call, self.key, self.announced_from, self.batch_size, *self.schedule, self.more)

    @classmethod
    def read(cls, numbers: Tensor) -> StepStart:
        return cls.of_numbers(list(map(int, numbers.tolist())))

    @classmethod
    def of_numbers(cls, numbers: Sequence[int]) -> StepStart:
        """What `numbers` gave."""
        call, key, announced_from, batch_size, num_microbatches, evaluating, digest, more = numbers
        return cls(call, key, announced_from, batch_size, num_microbatches, bool(evaluating), digest, more)

    @property
    def schedule(self) -> tuple[int, bool, int]:
        """Which schedule the step follows."""
        return self.num_microbatches, self.evaluating, self.digest

    @property
    def is_refused(self) -> bool:
        """Whether there is no step, because something is wrong with the call."""
        return self.num_microbatches == 0

    def __str__(self) -> str:
        if self.is_refused:
            return "a call that it refuses"
        return f"{'an evaluation' if self.evaluating else 'a training step'} of {self.num_microbatches} microbatches"


_NUMBERS = len(fields(StepStart))


def _digest(text: str) -> int:
    """Six bytes of a digest, which float64 carries."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")


@dataclass(frozen=True, slots=True)
class StepOrder:
    """What a step plays, sent after its `StepStart`: the microbatch that takes each place of the schedule, and the passes.

    `passes` are as `write_passes` gives them, and empty for those of the schedule that all ranks know.
    """

    topic: ClassVar[Topic] = Topic.ORDER

    order: tuple[int, ...]
    passes: tuple[int, ...] = ()

    def numbers(self) -> tuple[int, ...]:
        return (len(self.order), *self.order, *self.passes)

    @property
    def digest(self) -> int:
        """A number that differs where what is played does."""
        return _digest(str(self.numbers()))

    @classmethod
    def read(cls, numbers: Tensor) -> StepOrder:
        count, *rest = map(int, numbers.tolist())
        return cls(tuple(rest[:count]), tuple(rest[count:]))


class MicrobatchCosts(NamedTuple):
    """What the microbatches of a step `cost`, relative to each other, and how to `choose` their order by that.

    `ahead` is what was planned for these costs before the step, None if nothing was.
    """

    costs: tuple[float, ...]
    choose: Callable[[tuple[float, ...]], tuple[int, ...]]
    ahead: StepOrder | None = None


class RefusedError(Exception):
    """The first rank refuses the call that this rank has begun, too."""


class StepMessages(NamedTuple):
    """What is `known` of a step's messages, the ranks with which they are `announced` instead, and the size of the first rank's batch.

    `order` has the microbatch that takes each place of the schedule, whose `passes` are others unless they are empty: see `StepOrder`.
    """

    known: KnownMessages
    announced: frozenset[int]
    batch_size: int
    order: tuple[int, ...]
    passes: tuple[int, ...]


class StepHandshake:
    """Keeps what was learnt of the messages of `schedule` for each kind of inputs, under a number that all ranks share."""

    def __init__(self, schedule: Schedule, peers: Peers) -> None:
        placement = schedule.placement
        route = placement.routes[min(schedule.microbatch_routes, default=0)]  # the first that any microbatch takes: its rank has inputs
        parents = {rank: route[0] for rank in range(placement.num_ranks) if rank != route[0]}
        parents |= {rank: route[route.index(rank) - 1] for rank in set(route) if route.index(rank) > 0}
        self._peers = peers
        # The pipeline's ranks as errors name them.
        self._members, self._me = peers.members, peers.members[peers.rank]
        self._parent = parents.get(peers.rank)
        self._children = [rank for rank, parent in parents.items() if parent == peers.rank]
        self._chain = list(dict.fromkeys(route))
        self._num_ranks = placement.num_ranks
        self._trained: dict[int, tuple[bool, ...]] = {}
        self._played = (schedule.num_microbatches, schedule.is_forward_only, _digest(schedule.to_text()))
        self._keys: dict[tuple[tuple[int, ...], tuple[tuple[Shapes, Structure], ...]], int] = {}
        self._known: dict[int, KnownMessages] = {}
        self._telling: list[Sending] = []
        self._as_it_is = StepOrder(tuple(range(schedule.num_microbatches)))

    def open(
        self,
        call: int,
        inputs: list[Tensors],
        batch_size: int,
        trained: tuple[bool, ...] = (),
        costs: MicrobatchCosts | None = None,
    ) -> StepMessages:
        """Start a step with these `inputs`, which the first rank has, where `trained` says which parameters of this rank train.

        It belongs to the `call` of this number. Where messages tell by themselves whether a gradient flows back, `trained` is left out.
        With `costs`, which the first rank has, microbatches take the places that these choose, in the passes that were planned ahead if
        any were, and otherwise the places of the data.
        Raises `InputError` when this rank is at another call, or is to play something else, than the one that tells it, and `RefusedError`
        when the first rank refuses the call.
        """
        if self._parent is None:
            plays = self._compare_lockstep(StepStart(call, 0, 0, batch_size, *self._played), costs)
            start = self._begin(call, [inputs[microbatch] for microbatch in plays.order] if inputs else [], batch_size, plays)
        else:
            start = self._receive(self._parent, call)
            self._compare(start, self._parent)
            plays = self._as_it_is
            if start.more:
                plays = self._peers.expect_control(StepOrder, start.more, self._parent).wait("waiting for the order of the microbatches")
        if self._trained.get(start.key, trained) != trained and self._peers.rank in self._chain:
            start = replace(start, announced_from=min(start.announced_from, self._chain.index(self._peers.rank)))
        self._trained[start.key] = trained
        self._tell(start)
        if start.more:
            self._telling += [self._peers.send_control(plays, rank) for rank in self._children]
        if start.announced_from == 0:
            self._known[start.key] = KnownMessages()
        return StepMessages(self._known[start.key], self._announced(start.announced_from), start.batch_size, plays.order, plays.passes)

    def refuse(self, call: int) -> StepStart | None:
        """Tell the ranks behind that the `call` is refused; where this rank is not the first, what it was told to play, None if nothing.

        Raises `InputError` when this rank is at another call than the one that tells it.
        """
        if self._parent is None:
            start = StepStart(call, 0, 0, 0, 0, evaluating=False, digest=0)
            self._compare_lockstep(start, None)
            self._tell(start)
            return None
        start = self._receive(self._parent, call)
        if not start.is_refused:
            return start
        self._tell(start)
        return None

    def _tell(self, start: StepStart) -> None:
        self._telling = [self._peers.send_control(start, rank) for rank in self._children]

    def _announced(self, first: int) -> frozenset[int]:
        """The other ranks whose messages with this one announce their shapes: those that know it as this one does."""
        if first == 0:
            return frozenset(range(self._num_ranks)) - {self._peers.rank}
        knowing = self._chain[first:]
        return frozenset(knowing) - {self._peers.rank} if self._peers.rank in knowing else frozenset()

    def clear(self) -> None:
        """Let go of messages: one that was sent keeps its connection open."""
        self._telling = []

    def _begin(self, call: int, inputs: list[Tensors], batch_size: int, plays: StepOrder) -> StepStart:
        parts = tuple((shapes_of(part), part.structure if isinstance(part, Payload) else None) for part in inputs)
        signature = plays.passes, parts
        key = self._keys.pop(signature, None)
        announced_from = 0 if key is None else self._num_ranks
        if key is None:
            key = len(self._keys) if len(self._keys) < MOST_KEPT else self._keys.pop(next(iter(self._keys)))
        self._keys[signature] = key
        more = 0 if plays == self._as_it_is else len(plays.numbers())
        return StepStart(call, key, announced_from, batch_size, *self._played, more)

    def _receive(self, parent: int, call: int) -> StepStart:
        """What `parent` tells of this call."""
        start = self._peers.expect_control(StepStart, _NUMBERS, parent).wait("waiting for the step to begin")
        if start.call != call:
            raise InputError(
                f"rank {self._members[parent]} is at call {start.call} of step, eval_step, profile or describe, and rank {self._me} at "
                f"call {call}: one of them has left a call out, or has caught an error that the other did not have; "
                "make the same calls on every rank, and a new Pipeline after an error"
            )
        return start

    def _compare_lockstep(self, start: StepStart, costs: MicrobatchCosts | None) -> StepOrder:
        """What the step plays, the same in all pipelines whose stages talk to each other.

        They play the passes planned ahead if all have planned the same. Otherwise a microbatch costs as much as the longest with which it
        talks, and they play the order that these costs choose. Raises where they begin different passes, which would wait for each other
        for ever.
        """
        mine, ahead = ((), None) if costs is None else (costs.costs, costs.ahead)
        others = self._peers.lockstep
        if others is None:
            return ahead or self._ordered(costs, mine)
        with others.collective("comparing what pipelines begin whose stages talk to each other"):
            gathered = others.gather_objects((start.numbers(), mine, None if ahead is None else ahead.digest))
        told = [StepStart.of_numbers(numbers) for numbers, _, _ in gathered]
        if len({(one.call, one.schedule) for one in told}) > 1:
            begun = ", ".join(f"rank {rank} {one} in call {one.call}" for rank, one in zip(others.members, told, strict=True))
            differs = "" if len({(one.call, one.schedule[:2]) for one in told}) > 1 else " in another order"
            raise InputError(
                f"the stages of ranks {', '.join(map(str, others.members))} talk to each other in every pass, and these ranks begin other "
                f"steps{differs}: {begun}; call the same methods with the same num_microbatches and schedule on each"
            )
        if ahead is not None and all(digest == ahead.digest for _, _, digest in gathered):
            return ahead
        return self._ordered(costs, tuple(map(max, zip(*(theirs for _, theirs, _ in gathered), strict=True))))

    def _ordered(self, costs: MicrobatchCosts | None, longest: tuple[float, ...]) -> StepOrder:
        return self._as_it_is if costs is None else StepOrder(costs.choose(longest))

    def _compare(self, start: StepStart, parent: int) -> None:
        """Raise where this rank is not to play what `parent` has told it."""
        if start.is_refused:
            self._tell(start)
            raise RefusedError
        if start.schedule != self._played:
            mine = StepStart(start.call, start.key, start.announced_from, start.batch_size, *self._played)
            differs = " in another order" if start.schedule[:2] == self._played[:2] else ""
            raise InputError(
                f"rank {self._members[parent]} begins {start}, rank {self._me} {mine}{differs}; "
                "every rank must call the same method with the same num_microbatches, and have the same schedule for it"
            )
