"""Checks of a program: its messages match, every buffer is freed once after its last use, and it never deadlocks.

A deadlock depends on the transport. Two models bound what a transport may do: under EAGER a send never waits, under RENDEZVOUS it waits
until its receive is posted. A program that finishes under RENDEZVOUS also finishes under EAGER and under any mixture, since every action
can then only run earlier. It finishes over NCCL, too, because all messages from one rank to another have one order at both ends; the reason
is in `communicators`. Which rank runs first does not matter either: an action that can run stays able to run until it does. So one play of
the program under RENDEZVOUS proves that it cannot deadlock, and EAGER only serves to explain a failure.

A program of 64 ranks and 512 microbatches has half a million actions, and each rank checks all of them before it runs its own. Values are
therefore numbers here, computed once for each kind and stage, and become names again only in messages of faults.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple

from zerobubble.arguments import takes
from zerobubble.errors import Fault
from zerobubble.garbage_pause import garbage_collection_paused
from zerobubble.ir import Op
from zerobubble.kinds import Kind, ValueKind
from zerobubble.program import Action, Channel, Compute, Free, Program, Recv, Send
from zerobubble.rules import Value, carried_from, carried_to, makes, uses
from zerobubble.verify import schedule_faults


class MessageModel(StrEnum):
    """A model of the transport. EAGER: a send never waits. RENDEZVOUS: a send waits until its receive is posted."""

    EAGER = "eager"
    RENDEZVOUS = "rendezvous"


@takes(program=Program)
@garbage_collection_paused()
def program_faults(program: Program) -> tuple[Fault, ...]:
    """Return every fault of `program`; empty exactly if it is sound. Root causes come first: each group of checks requires those before.

    In a sound program the passes form a legal schedule. Every message has one sender and one receiver, and messages from one rank to
    another are received in the order of the sends, whatever they carry. Every value is available when it is used, and is consumed or freed
    once, after its last use. The program finishes under the eager and under the rendezvous message model.

    >>> import zerobubble as zb
    >>> program = zb.lower(zb.make("1f1b", 2, 2))
    >>> zb.lowering.program_faults(program)
    ()
    >>> shorter = zb.Program.from_text(program.to_text().replace("  send a0.0 to 1\\n", ""))
    >>> print(zb.lowering.program_faults(shorter)[0])
    among the activations from rank 0 to rank 1, a0.0 is sent never and received once: send and receive it once
    """
    faults = list(schedule_faults(program.to_schedule()))
    if faults:
        return tuple(faults)
    numbered = _Numbered(program)
    faults = _message_faults(numbered)
    for rank in range(program.num_ranks):
        faults += _buffer_faults(numbered, rank)
    if faults:
        return tuple(faults)
    stops = _stop_faults(numbered, MessageModel.RENDEZVOUS)
    if not stops:  # a program that finishes under RENDEZVOUS also finishes under EAGER
        return ()
    return (*_stop_faults(numbered, MessageModel.EAGER), *stops)


class _Numbers(NamedTuple):
    """The numbers of the values that an action needs and makes. A send or receive has one number and a peer."""

    action: Action
    needed: Sequence[int]
    made: Sequence[int]
    peer: int = -1


class _Numbered:
    """The actions of each rank with the numbers of their values.

    Values outside the range of microbatches, which occur in faulty programs only, get negative numbers.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self._columns: dict[tuple[ValueKind, int], int] = {}
        self._odd: dict[Value, int] = {}
        self._used: dict[tuple[Kind, int], list[int]] = {}
        self._made: dict[tuple[Kind, int, Kind | None], list[int]] = {}
        self.rows = [[self._numbers(action) for action in row] for row in program.rows]
        self._names = list(self._columns)
        self._odd_names = list(self._odd)

    def value(self, number: int) -> Value:
        """Return the value with this number."""
        if number < 0:
            return self._odd_names[-1 - number]
        column, microbatch = divmod(number, self.program.num_microbatches)
        return Value(*self._names[column], microbatch)

    def messages(self) -> Iterator[tuple[int, _Numbers]]:
        """Yield all sends and receives, each with its rank."""
        for rank, row in enumerate(self.rows):
            for numbers in row:
                if numbers.peer >= 0:
                    yield rank, numbers

    def _numbers(self, action: Action) -> _Numbers:
        if isinstance(action, Compute):
            step = action.step
            if len(step) == 1:
                return _Numbers(action, self._used_by(step[0]), self._made_by(step[0]))
            used = dict.fromkeys(number for op in step for number in self._used_by(op))
            return _Numbers(action, list(used), [number for op in step for number in self._made_by(op)])
        number = (self._number(action.value),)
        if isinstance(action, Recv):
            return _Numbers(action, (), number, action.peer)
        return _Numbers(action, number, (), action.peer if isinstance(action, Send) else -1)

    def _number(self, value: Value) -> int:
        value_kind, stage, microbatch = value
        if 0 <= microbatch < self.program.num_microbatches:
            return self._column(value_kind, stage) + microbatch
        return self._odd.setdefault(value, -1 - len(self._odd))  # its microbatch is out of range

    def _column(self, value_kind: ValueKind, stage: int) -> int:
        """Return the number of a stage's value for microbatch 0. Adding j gives that for microbatch j."""
        column = self._columns.get((value_kind, stage))
        if column is None:
            column = self._columns[value_kind, stage] = len(self._columns)
        return column * self.program.num_microbatches

    def _used_by(self, op: Op) -> list[int]:
        kind, stage, microbatch = op
        if (kind, stage) not in self._used:
            values = uses(Op(kind, stage, 0), self.program.num_stages, self.program.head_parts)
            self._used[kind, stage] = [self._column(value.value_kind, value.stage) for value in values]
        carried = carried_to(kind, microbatch, self.program.slices)
        near = [self._column(value_kind, stage) + maker for value_kind, maker in carried]
        return [*(column + microbatch for column in self._used[kind, stage]), *near]

    def _made_by(self, op: Op) -> list[int]:
        kind, stage, microbatch = op
        recomputed_by = self.program.recomputed.get((stage, microbatch))
        if (kind, stage, recomputed_by) not in self._made:
            program = self.program
            values = makes(Op(kind, stage, 0), program.num_stages, program.is_forward_only, recomputed_by, program.head_parts)
            self._made[kind, stage, recomputed_by] = [self._column(value.value_kind, value.stage) for value in values]
        carried = carried_from(kind, microbatch, self.program.slices)
        near = [self._column(value_kind, stage) + microbatch for value_kind in carried]
        return [*(column + microbatch for column in self._made[kind, stage, recomputed_by]), *near]


def _message_faults(numbered: _Numbered) -> list[Fault]:
    ends: dict[tuple[int, int], tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for rank, (_, needed, made_numbers, peer) in numbered.messages():
        if made_numbers:
            ends[peer, rank][1].append(made_numbers[0])
        else:
            ends[rank, peer][0].append(needed[0])
    faults = []
    for (source, destination), (sent, received) in sorted(ends.items()):
        if sent != received or len(set(sent)) < len(sent):
            faults += _direction_faults(source, destination, [*map(numbered.value, sent)], [*map(numbered.value, received)])
    return faults


def _direction_faults(source: int, destination: int, sent: list[Value], received: list[Value]) -> list[Fault]:
    times_sent, times_received = Counter(sent), Counter(received)
    unequal = [value for value in sorted({*sent, *received}) if not times_sent[value] == times_received[value] == 1]
    if not unequal:
        at = next(k for k, (left, arrived) in enumerate(zip(sent, received, strict=True)) if left != arrived)
        orders = f"message {at} is {sent[at]} at the sender and {received[at]} at the receiver"
        which = f"the messages from rank {source} to rank {destination}"
        message = f"{which} are sent and received in different orders: {orders}; post the receives in the order of the sends"
        return [Fault("channel-order", message, destination, None, str(received[at]))]
    return [
        _count_fault(Channel(source, destination, value.value_kind), value, times_sent[value], times_received[value]) for value in unequal
    ]


def _count_fault(channel: Channel, value: Value, sent: int, received: int) -> Fault:
    rank = channel.destination if sent == 1 else channel.source
    message = f"among the {channel}, {value} is sent {_times(sent)} and received {_times(received)}: send and receive it once"
    return Fault("message", message, rank, None, str(value))


def _times(count: int) -> str:
    return ("never", "once", "twice")[count] if count < 3 else f"{count} times"


def _buffer_faults(numbered: _Numbered, rank: int) -> list[Fault]:
    row = numbered.rows[rank]
    here: set[int] = set()
    freed: set[int] = set()
    faults: list[Fault] = []
    last_use = {number: place for place, numbers in enumerate(row) if isinstance(numbers.action, Compute) for number in numbers.needed}
    sent = {numbers.needed[0] for numbers in row if isinstance(numbers.action, Send)}
    for position, (action, needed, made_numbers, _) in enumerate(row):
        faults += [_absent(rank, position, action, numbered.value(number), number in freed) for number in needed if number not in here]
        if isinstance(action, Compute):
            # A pass consumes a value at its last use. A sent value stays until its Free, since the transport may still read it.
            ended: Iterable[int] = [number for number in needed if last_use[number] == position and number not in sent]
        else:
            ended = needed if isinstance(action, Free) else ()
        here.update(made_numbers)
        here.difference_update(ended)
        freed.update(ended)
    for value in sorted(map(numbered.value, here)):
        faults.append(Fault("leak", f"rank {rank} never frees {value}: free it after its last use", rank, None, str(value)))
    return faults


def _absent(rank: int, position: int, action: Action, value: Value, freed: bool) -> Fault:
    at = f"rank {rank} position {position}, {action}"
    if not freed:
        return Fault("not-there", f"{at}: {value} is not on this rank yet; make or receive it first", rank, position, str(action))
    if isinstance(action, Free):
        return Fault("double-free", f"{at}: {value} was already consumed or freed; remove this", rank, position, str(action))
    return Fault("use-after-free", f"{at}: {value} was already freed; free it after its last use", rank, position, str(action))


def _stop_faults(numbered: _Numbered, model: MessageModel) -> list[Fault]:
    player = _Player(numbered, model)
    player.play()
    faults = []
    for rank, head in enumerate(player.heads):
        if head < len(numbered.rows[rank]):
            numbers = numbered.rows[rank][head]
            action, blocker = numbers.action, player.blocker(rank, numbers)
            assert blocker is not None
            if isinstance(action, Send):
                reason = f"rank {action.peer} does not reach its receive; move the receive earlier"
            else:
                unsent = numbered.value(blocker // numbered.program.num_ranks)
                reason = f"the send of {unsent} is not reached; move the send earlier"
            message = f"under {model} messages rank {rank} stops at position {head}, {action}: {reason}"
            faults.append(Fault("stop", message, rank, head, str(action)))
    return faults


class _Player:
    """Plays a program under a message model, rank by rank, as far as it can. `heads[r]` is the next action of rank r.

    The number of a message is that of its value times the number of ranks, plus its destination.
    """

    def __init__(self, numbered: _Numbered, model: MessageModel) -> None:
        self._rows = numbered.rows
        self._num_ranks = numbered.program.num_ranks
        self.heads = [0] * self._num_ranks
        self._rendezvous = model is MessageModel.RENDEZVOUS
        self._posted: set[int] = set()
        self._to_come = {numbers.made[0] * self._num_ranks + rank for rank, numbers in numbered.messages() if numbers.made}
        """Messages that have not been sent."""

    def play(self) -> None:
        """Advance every rank until none can continue. A blocked rank sleeps until the message that it waits for."""
        asleep: dict[int, int] = {}
        ready = list(range(self._num_ranks))
        while ready:
            self._advance(ready.pop(), ready, asleep)

    def _advance(self, rank: int, ready: list[int], asleep: dict[int, int]) -> None:
        row = self._rows[rank]
        for at in range(self.heads[rank], len(row)):
            numbers = row[at]
            blocker = self.blocker(rank, numbers)
            if blocker is not None:
                self.heads[rank] = at
                asleep[blocker] = rank
                return
            if numbers.peer >= 0:
                if numbers.made:
                    message = numbers.made[0] * self._num_ranks + rank
                    self._posted.add(message)
                else:
                    message = numbers.needed[0] * self._num_ranks + numbers.peer
                    self._to_come.discard(message)
                if message in asleep:
                    ready.append(asleep.pop(message))
        self.heads[rank] = len(row)

    def blocker(self, rank: int, numbers: _Numbers) -> int | None:
        """Return the message that an action of `rank` waits for, to be sent or to be received; None if it can run."""
        if numbers.peer < 0:
            for number in numbers.needed:
                if number * self._num_ranks + rank in self._to_come:
                    return number * self._num_ranks + rank
            return None
        if not self._rendezvous or numbers.made:
            return None
        message = numbers.needed[0] * self._num_ranks + numbers.peer
        return None if message in self._posted else message
