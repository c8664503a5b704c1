"""The handshake of a step: the rank with the first stage sends all others what to play, and whether shapes of messages are known.

The start of a step travels along the stages of the first route. Each rank receives it from the rank before its first stage there, compares
it with its own call, and forwards it. No pass of a step runs before its start has arrived, so a rank that is called differently from the
others raises an error instead of waiting for a message that never arrives.

If stages of a rank were frozen or unfrozen since, or its model was changed, this rank changes the start before it forwards it: from this
rank on, messages announce their shapes again. Ranks before it do not learn this, and need not, because activations only go from one rank to
ranks behind it.

If microbatches are ordered by cost, the first rank sends the order after the start, together with the passes if it planned them ahead.

If stages communicate with stages of other pipelines, the first ranks of these pipelines compare their starts before they send them.
"""

from __future__ import annotations

import hashlib
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from typing import ClassVar, NamedTuple

from torch import Tensor

from zerobubble.errors import InputError
from zerobubble.ir import Op, Schedule
from zerobubble.kinds import KINDS
from zerobubble.runtime.device import Autocast, autocast_of
from zerobubble.runtime.transport.control import Sending, Topic
from zerobubble.runtime.transport.peers import Peers
from zerobubble.runtime.values.payload import Payload, Structure, Tensors
from zerobubble.runtime.values.shapes import KnownMessages, Shapes, shapes_of

MOST_KEPT = 64
"""The number of kinds of inputs whose message shapes are cached. The least recently used one is dropped."""


class Stepped(IntEnum):
    """Whether an optimizer of a rank has stepped since the last training step."""

    NO = 0
    YES = 1
    UNKNOWN = 2


@dataclass(frozen=True, slots=True)
class StepStart:
    """What a step plays: inputs of the kind `key`, split from `batch_size` samples. `call` is the number of the call on the sending rank.

    Messages between ranks from position `announced_from` of the chain on announce their shapes: 0 means all of them, the number of ranks
    means none. `num_microbatches`, `evaluating` and `digest`, of its text, identify the schedule. Unless `more` is 0, a `StepOrder` of so
    many numbers follows. `stepped` says whether an optimizer of the sending rank has stepped since the last training step. `data` is the
    number of the batch that the first rank was given (see `batch_digests`), 0 if it is not known. A call that the first rank refuses has no
    microbatches.
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
    stepped: Stepped = Stepped.UNKNOWN
    data: int = 0

    def numbers(self) -> tuple[int, ...]:
        return (self.call, self.key, self.announced_from, self.batch_size, *self.schedule, self.more, self.stepped, self.data)

    @classmethod
    def read(cls, numbers: Tensor) -> StepStart:
        return cls.of_numbers(list(map(int, numbers.tolist())))

    @classmethod
    def of_numbers(cls, numbers: Sequence[int]) -> StepStart:
        """Returns the start that was written as these `numbers`."""
        call, key, announced_from, batch_size, num_microbatches, evaluating, digest, more, stepped, data = numbers
        return cls(call, key, announced_from, batch_size, num_microbatches, bool(evaluating), digest, more, Stepped(stepped), data)

    @property
    def schedule(self) -> tuple[int, bool, int]:
        """Identifies the schedule of the step."""
        return self.num_microbatches, self.evaluating, self.digest

    @property
    def is_refused(self) -> bool:
        """Whether there is no step, because the call is wrong."""
        return self.num_microbatches == 0

    def __str__(self) -> str:
        if self.is_refused:
            return "a call that it refuses"
        return f"{'an evaluation' if self.evaluating else 'a training step'} of {self.num_microbatches} microbatches"


_NUMBERS = len(fields(StepStart))


def _digest(text: str) -> int:
    """Returns six bytes of a digest, which a float64 represents exactly."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")


@dataclass(frozen=True, slots=True)
class StepOrder:
    """What a step plays, sent after its `StepStart`: the microbatch at each place of the schedule, and the passes.

    `passes` are in the form of `write_passes`; empty for the passes of the schedule that all ranks know.
    """

    topic: ClassVar[Topic] = Topic.ORDER

    order: tuple[int, ...]
    passes: tuple[int, ...] = ()

    def numbers(self) -> tuple[int, ...]:
        return (len(self.order), *self.order, *self.passes)

    @property
    def digest(self) -> int:
        """A number that differs between steps that play different orders or passes."""
        return _digest(str(self.numbers()))

    @classmethod
    def read(cls, numbers: Tensor) -> StepOrder:
        count, *rest = map(int, numbers.tolist())
        return cls(tuple(rest[:count]), tuple(rest[count:]))


class MicrobatchCosts(NamedTuple):
    """The relative `costs` of the microbatches of a step, and `choose`, which returns their order for given costs.

    `ahead` is the order that was planned for these costs before the step, if any.
    """

    costs: tuple[float, ...]
    choose: Callable[[tuple[float, ...]], tuple[int, ...]]
    ahead: StepOrder | None = None


class RefusedError(Exception):
    """The first rank refuses the call that this rank has begun too."""


class StepMessages(NamedTuple):
    """The `known` shapes of a step's messages, the ranks whose messages are `announced`, and the batch size of the first rank.

    `order` has the microbatch at each place of the schedule. `passes` replace those of the schedule unless they are empty; see `StepOrder`.
    `data` is the number that the first rank has sent for its batch.
    """

    known: KnownMessages
    announced: frozenset[int]
    batch_size: int
    order: tuple[int, ...]
    passes: tuple[int, ...]
    data: int


class StepHandshake:
    """Opens the steps of `schedule`, and keeps the shapes of their messages for each kind of inputs, under a key that all ranks share."""

    def __init__(self, schedule: Schedule, peers: Peers) -> None:
        placement = schedule.placement
        route = placement.routes[min(schedule.microbatch_routes, default=0)]  # the first that any microbatch takes: its rank has inputs
        parents = {rank: route[0] for rank in range(placement.num_ranks) if rank != route[0]}
        parents |= {rank: route[route.index(rank) - 1] for rank in set(route) if route.index(rank) > 0}
        self._peers = peers
        # Ranks as errors name them: those of the transport.
        self._members, self._me = peers.members, peers.members[peers.rank]
        self._parent = parents.get(peers.rank)
        self._children = [rank for rank, parent in parents.items() if parent == peers.rank]
        self._chain = list(dict.fromkeys(route))
        self._num_ranks = placement.num_ranks
        self._forms: dict[int, tuple[int, ...]] = {}
        self._played = (schedule.num_microbatches, schedule.is_forward_only, _digest(schedule.to_text()))
        self._keys: dict[tuple[tuple[int, ...], Autocast | None, tuple[tuple[Shapes, Structure], ...]], int] = {}
        self._known: dict[int, KnownMessages] = {}
        self._sending: list[Sending] = []
        self._has_warned = False
        self._data_order = StepOrder(tuple(range(schedule.num_microbatches)))

    def open(
        self,
        call: int,
        inputs: list[Tensors],
        batch_size: int,
        form: tuple[int, ...] = (),
        costs: MicrobatchCosts | None = None,
        stepped: Stepped = Stepped.UNKNOWN,
        data: int = 0,
    ) -> StepMessages:
        """Opens the step of the `call` with this number, for these `inputs` of the first rank.

        `form` is what changes with the messages of this rank for the same inputs, such as which parameters require a gradient. With the
        `costs` of the first rank, microbatches take the places that these choose, in passes that were planned ahead if there are any;
        otherwise the order of the data. Warns once if this rank has `stepped` its optimizer and the rank before it has not, or vice versa.
        `data` is the number of this rank's batch, which the first rank sends.

        Raises `InputError` if this rank is in another call, or plays something else, than the rank that starts the step, and `RefusedError`
        if the first rank refuses the call.
        """
        if self._parent is None:
            plays = self._compare_lockstep(StepStart(call, 0, 0, batch_size, *self._played), costs)
            start = self._begin(call, [inputs[microbatch] for microbatch in plays.order] if inputs else [], batch_size, plays)
            start = replace(start, data=data)
        else:
            start = self._receive(self._parent, call)
            self._compare(start, self._parent)
            plays = self._data_order
            if start.more:
                plays = self._peers.expect_control(StepOrder, start.more, self._parent).wait("waiting for the order of the microbatches")
        if self._forms.get(start.key, form) != form and self._peers.rank in self._chain:
            start = replace(start, announced_from=min(start.announced_from, self._chain.index(self._peers.rank)))
        self._forms[start.key] = form
        self._compare_steps(start.stepped, stepped)
        self._forward(start if stepped is Stepped.UNKNOWN else replace(start, stepped=stepped))
        if start.more:
            self._sending += [self._peers.send_control(plays, rank) for rank in self._children]
        if start.announced_from == 0:
            self._known[start.key] = KnownMessages()
        shapes, announced = self._known[start.key], self._announced(start.announced_from)
        return StepMessages(shapes, announced, start.batch_size, plays.order, plays.passes, start.data)

    def refuse(self, call: int) -> StepStart | None:
        """Forwards to the ranks behind that the `call` is refused. Returns the start that this rank received instead, if any.

        Raises `InputError` if this rank is in another call than the rank that starts the step.
        """
        if self._parent is None:
            start = StepStart(call, 0, 0, 0, 0, evaluating=False, digest=0)
            self._compare_lockstep(start, None)
            self._forward(start)
            return None
        start = self._receive(self._parent, call)
        if not start.is_refused:
            return start
        self._forward(start)
        return None

    def _forward(self, start: StepStart) -> None:
        self._sending = [self._peers.send_control(start, rank) for rank in self._children]

    def _announced(self, first: int) -> frozenset[int]:
        """Returns the other ranks that announce the shapes of messages with this rank."""
        if first == 0:
            return frozenset(range(self._num_ranks)) - {self._peers.rank}
        knowing = self._chain[first:]
        return frozenset(knowing) - {self._peers.rank} if self._peers.rank in knowing else frozenset()

    def clear(self) -> None:
        """Drops messages: one that was sent keeps its connection open."""
        self._sending = []

    def _begin(self, call: int, inputs: list[Tensors], batch_size: int, plays: StepOrder) -> StepStart:
        parts = tuple((shapes_of(part), part.structure if isinstance(part, Payload) else None) for part in inputs)
        signature = plays.passes, autocast_of(self._peers.device.type), parts  # autocast decides the dtypes of messages, too
        key = self._keys.pop(signature, None)
        announced_from = 0 if key is None else self._num_ranks
        if key is None:
            key = len(self._keys) if len(self._keys) < MOST_KEPT else self._keys.pop(next(iter(self._keys)))
        self._keys[signature] = key
        more = 0 if plays == self._data_order else len(plays.numbers())
        return StepStart(call, key, announced_from, batch_size, *self._played, more)

    def _receive(self, parent: int, call: int) -> StepStart:
        """Receives the start of this call from `parent`."""
        start = self._peers.expect_control(StepStart, _NUMBERS, parent).wait("waiting for the step to begin")
        if start.call != call:
            raise InputError(
                "rank {parent} is at call {parent_call} of step, eval_step, profile or describe, and rank {rank} at call {call}: one of "
                "them has skipped a call, or has caught an error that the other did not have; {remedy}",
                parent=self._members[parent],
                parent_call=start.call,
                rank=self._me,
                call=call,
                remedy="make the same calls on every rank, and create a new Pipeline after an error",
            )
        return start

    def _compare_lockstep(self, start: StepStart, costs: MicrobatchCosts | None) -> StepOrder:
        """Returns what the step plays, which is the same in all pipelines with stages that communicate with each other.

        They play passes that were planned ahead only if all have planned the same passes. Otherwise a microbatch costs as much as the most
        expensive microbatch that runs with it, and they play the order for these costs. Raises `InputError` if the pipelines begin
        different passes, which would deadlock.
        """
        mine, ahead = ((), None) if costs is None else (costs.costs, costs.ahead)
        others = self._peers.lockstep
        if others is None:
            return ahead or self._ordered(costs, mine)
        with others.collective("comparing steps with the pipelines whose stages communicate with this one"):
            gathered = others.gather_objects((start.numbers(), mine, None if ahead is None else ahead.digest))
        starts = [StepStart.of_numbers(numbers) for numbers, _, _ in gathered]
        if len({(begun.call, begun.schedule) for begun in starts}) > 1:
            steps = ", ".join(f"rank {rank} {begun} in call {begun.call}" for rank, begun in zip(others.members, starts, strict=True))
            differs = "" if len({(begun.call, begun.schedule[:2]) for begun in starts}) > 1 else " in another order"
            raise InputError(
                "the stages of ranks {ranks} communicate in every pass, but the ranks begin different steps{difference}: {steps}; {remedy}",
                ranks=", ".join(map(str, others.members)),
                difference=differs,
                steps=steps,
                remedy="call the same methods with the same num_microbatches and schedule on each",
            )
        if ahead is not None and all(digest == ahead.digest for _, _, digest in gathered):
            return ahead
        return self._ordered(costs, tuple(map(max, zip(*(theirs for _, theirs, _ in gathered), strict=True))))

    def _ordered(self, costs: MicrobatchCosts | None, longest: tuple[float, ...]) -> StepOrder:
        return self._data_order if costs is None else StepOrder(costs.choose(longest))

    def _compare_steps(self, theirs: Stepped, mine: Stepped) -> None:
        if self._parent is None or self._has_warned or Stepped.UNKNOWN in (theirs, mine) or theirs is mine:
            return
        self._has_warned = True
        ranks = [self._members[self._parent], self._me]
        stepped, other = ranks if theirs is Stepped.YES else ranks[::-1]
        warnings.warn(
            f"an optimizer of rank {stepped} has stepped since the last training step, and none of rank {other} has, so their stages train "
            "differently: decide whether to step from values that all ranks have, such as pipe.clip_grad_norm_(math.inf)",
            stacklevel=2,
        )

    def _compare(self, start: StepStart, parent: int) -> None:
        """Raises if this rank does not play what `parent` has started."""
        if start.is_refused:
            self._forward(start)
            raise RefusedError
        if start.schedule != self._played:
            mine = StepStart(start.call, start.key, start.announced_from, start.batch_size, *self._played)
            differs = " in another order" if start.schedule[:2] == self._played[:2] else ""
            raise InputError(
                "rank {parent} begins {expected}, rank {rank} {got}{difference}; {remedy}",
                parent=self._members[parent],
                expected=str(start),
                rank=self._me,
                got=str(mine),
                difference=differs,
                remedy="every rank must call the same method with the same num_microbatches, and have the same schedule for it",
            )


def write_passes(schedule: Schedule) -> tuple[int, ...]:
    """Returns the rows of `schedule`, one after another, as one number per pass.

    Every stage takes its microbatches in the order of their places, so a number for the kind and the stage identifies the pass.
    """
    kinds = {kind: place for place, kind in enumerate(KINDS)}
    return tuple(kinds[op.kind] * schedule.num_stages + op.stage for row in schedule.rows for op in row)


def read_passes(name: str, played: Schedule, numbers: tuple[int, ...]) -> Schedule:
    """Returns the schedule that was written as `numbers`, on the placement and with the microbatches of `played`."""
    kinds, home = list(KINDS), played.placement.routes[0]
    rows: list[list[Op]] = [[] for _ in range(played.num_ranks)]
    taken: Counter[int] = Counter()
    for number in numbers:
        kind, stage = divmod(number, played.num_stages)
        rows[home[stage]].append(Op(kinds[kind], stage, taken[number]))
        taken[number] += 1
    return replace(played, name=name, rows=tuple(map(tuple, rows)))
