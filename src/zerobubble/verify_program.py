"""Whether a program's messages match, its buffers end where they should, and it never stops, however messages behave."""

from __future__ import annotations

from collections import Counter, defaultdict
from enum import StrEnum

from zerobubble.arguments import takes
from zerobubble.errors import Fault
from zerobubble.program import Action, Channel, Compute, Free, Program, Recv, Send
from zerobubble.rules import Value
from zerobubble.verify import schedule_faults


class MessageModel(StrEnum):
    """How a transport may behave. EAGER: a send never waits. RENDEZVOUS: a send waits until its receive is posted."""

    EAGER = "eager"
    RENDEZVOUS = "rendezvous"


@takes(program=Program)
def program_faults(program: Program) -> tuple[Fault, ...]:
    """Every fault of `program`; empty exactly when it is sound. Root causes first: a group of checks runs when those before it pass.

    Checked: the passes make a legal schedule; one sender and one receiver for every message, in the same order at both ends of
    every channel; every value used up or freed once, after its last use, and none used that is not there; no stop under the eager and
    under the rendezvous message model.

    >>> import zerobubble as zb
    >>> program = zb.lower(zb.make("1f1b", 2, 2))
    >>> zb.lowering.program_faults(program)
    ()
    >>> shorter = zb.Program.from_text(program.to_text().replace("  send a0.0 to 1\\n", ""))
    >>> print(zb.lowering.program_faults(shorter)[0])
    among the activations from rank 0 to rank 1, a0.0 is sent never and received once: once each is needed
    """
    faults = list(schedule_faults(program.to_schedule()))
    if faults:
        return tuple(faults)
    faults = _message_faults(program)
    for rank in range(program.num_ranks):
        faults += _buffer_faults(program, rank)
    return tuple(faults or [fault for model in MessageModel for fault in _stop_faults(program, model)])


def _message_faults(program: Program) -> list[Fault]:
    ends: dict[Channel, tuple[list[Value], list[Value]]] = defaultdict(lambda: ([], []))
    for _, _, channel, action in program.channels():
        ends[channel][isinstance(action, Recv)].append(action.value)
    return [fault for channel, (sent, received) in sorted(ends.items()) for fault in _channel_faults(channel, sent, received)]


def _channel_faults(channel: Channel, sent: list[Value], received: list[Value]) -> list[Fault]:
    times_sent, times_received = Counter(sent), Counter(received)
    unequal = [value for value in sorted({*sent, *received}) if not times_sent[value] == times_received[value] == 1]
    if not unequal and sent != received:
        at = next(k for k, (left, arrived) in enumerate(zip(sent, received, strict=True)) if left != arrived)
        orders = f"message {at} is {sent[at]} at the sender and {received[at]} at the receiver"
        message = f"the {channel} go in two orders: {orders}; post the receives in the order of the sends"
        return [Fault("channel-order", message, channel.destination, None, str(received[at]))]
    return [_count_fault(channel, value, times_sent[value], times_received[value]) for value in unequal]


def _count_fault(channel: Channel, value: Value, sent: int, received: int) -> Fault:
    rank = channel.destination if sent == 1 else channel.source
    message = f"among the {channel}, {value} is sent {_times(sent)} and received {_times(received)}: once each is needed"
    return Fault("message", message, rank, None, str(value))


def _times(count: int) -> str:
    return ("never", "once", "twice")[count] if count < 3 else f"{count} times"


def _buffer_faults(program: Program, rank: int) -> list[Fault]:
    row = program.rows[rank]
    here: set[Value] = set()
    gone: set[Value] = set()
    faults: list[Fault] = []
    last_use = {value: position for position, a in enumerate(row) if isinstance(a, Compute) for value in program.uses(a.step)}
    sent = {action.value for action in row if isinstance(action, Send)}
    for position, action in enumerate(row):
        if isinstance(action, Recv):
            here.add(action.value)
            continue
        needed = program.uses(action.step) if isinstance(action, Compute) else [action.value]
        faults += [_absent(rank, position, action, value, value in gone) for value in needed if value not in here]
        if isinstance(action, Compute):
            ended = [value for value in needed if last_use[value] == position and value not in sent]
            here.update(program.makes(action.step))
        else:
            ended = needed if isinstance(action, Free) else []
        here.difference_update(ended)
        gone.update(ended)
    return faults + [_leak(rank, value) for value in sorted(here)]


def _absent(rank: int, position: int, action: Action, value: Value, gone: bool) -> Fault:
    at = f"rank {rank} position {position}, {action}"
    if not gone:
        return Fault("not-there", f"{at}: {value} is not on this rank yet; make or receive it before", rank, position, str(action))
    if isinstance(action, Free):
        return Fault("double-free", f"{at}: {value} was used up or freed before; remove this", rank, position, str(action))
    return Fault("use-after-free", f"{at}: {value} was freed before; free it after its last use", rank, position, str(action))


def _leak(rank: int, value: Value) -> Fault:
    return Fault("leak", f"rank {rank} never frees {value}: free it after its last use", rank, None, str(value))


def _stop_faults(program: Program, model: MessageModel) -> list[Fault]:
    player = _Player(program, model)
    player.play()
    faults = []
    for rank, head in enumerate(player.heads):
        if head < len(program.rows[rank]):
            action = program.rows[rank][head]
            blocker = player.blocker(rank, action)
            assert blocker is not None
            reason = f"rank {action.peer} does not reach its receive" if isinstance(action, Send) else f"{blocker[0]} is not sent"
            message = f"under {model} messages rank {rank} stops at position {head}, {action}: {reason}; move that earlier"
            faults.append(Fault("stop", message, rank, head, str(action)))
    return faults


_Message = tuple[Value, int]
"""A value on its way to a rank."""


class _Player:
    """Plays a program under a message model, rank by rank, as far as it goes. `heads[r]` is rank r's next action."""

    def __init__(self, program: Program, model: MessageModel) -> None:
        self.heads = [0] * program.num_ranks
        self._program = program
        self._rendezvous = model is MessageModel.RENDEZVOUS
        self._messages = {(action.value, channel.destination) for _, _, channel, action in program.channels()}
        self._posted: set[_Message] = set()
        self._sent: set[_Message] = set()

    def play(self) -> None:
        """Advance every rank until none can go on."""
        asleep: dict[_Message, int] = {}
        ready = list(range(self._program.num_ranks))
        while ready:
            self._advance(ready.pop(), ready, asleep)

    def _advance(self, rank: int, ready: list[int], asleep: dict[_Message, int]) -> None:
        row = self._program.rows[rank]
        while self.heads[rank] < len(row):
            action = row[self.heads[rank]]
            blocker = self.blocker(rank, action)
            if blocker is not None:
                asleep[blocker] = rank
                return
            if isinstance(action, (Send, Recv)):
                done, message = (
                    (self._sent, (action.value, action.peer)) if isinstance(action, Send) else (self._posted, (action.value, rank))
                )
                done.add(message)
                if message in asleep:
                    ready.append(asleep.pop(message))
            self.heads[rank] += 1

    def blocker(self, rank: int, action: Action) -> _Message | None:
        """The message that `action` of `rank` waits for: one still to be sent to this rank, or one whose receive is not posted yet."""
        if isinstance(action, Compute):
            needed = [(value, rank) for value in self._program.uses(action.step)]
            return next((message for message in needed if message in self._messages and message not in self._sent), None)
        if not (self._rendezvous and isinstance(action, Send)):
            return None
        message = action.value, action.peer
        return message if message not in self._posted else None
