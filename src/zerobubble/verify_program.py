"""Whether a program's messages match, its buffers end where they should, and it never stops, however messages behave."""

from __future__ import annotations

from collections import defaultdict
from enum import StrEnum

from zerobubble.errors import Fault
from zerobubble.program import Action, Channel, Compute, Free, Program, Recv, Send
from zerobubble.rules import Value, makes, uses


class Model(StrEnum):
    """How a transport may behave. EAGER: a send never waits. RENDEZVOUS: a send waits until its receive is posted."""

    EAGER = "eager"
    RENDEZVOUS = "rendezvous"


def program_faults(program: Program) -> tuple[Fault, ...]:
    """Every fault of `program`; empty exactly when it is sound.

    Checked: one sender and one receiver for every message; the same order at both ends of every channel; every value freed once,
    after its last use, and none used that is not there; no stop under the eager and under the rendezvous message model.
    """
    faults = _message_faults(program)
    for rank in range(program.num_ranks):
        faults += _buffer_faults(program, rank)
    if not faults:
        faults = [fault for model in Model for fault in _stop_faults(program, model)]
    return tuple(faults)


def _message_faults(program: Program) -> list[Fault]:
    ends: dict[Channel, tuple[list[Value], list[Value]]] = defaultdict(lambda: ([], []))
    for _, _, channel, action in program.channels():
        ends[channel][isinstance(action, Recv)].append(action.value)
    faults = []
    for channel, (sent, received) in sorted(ends.items()):
        for value in sorted(set(sent) | set(received)):
            if sent.count(value) != 1 or received.count(value) != 1:
                counts = f"sent {sent.count(value)} and received {received.count(value)} times"
                faults.append(Fault("message", f"{value} of the {channel} is {counts}: once each is needed", op=str(value)))
        if sorted(sent) == sorted(received) and sent != received:
            at = next(i for i, (a, b) in enumerate(zip(sent, received, strict=True)) if a != b)
            orders = f"message {at} is {sent[at]} at the sender and {received[at]} at the receiver"
            faults.append(
                Fault("channel-order", f"the {channel} arrive in another order: {orders}", channel.destination, None, str(sent[at]))
            )
    return faults


def _buffer_faults(program: Program, rank: int) -> list[Fault]:
    here: set[Value] = set()
    freed: set[Value] = set()
    faults: list[Fault] = []

    def fault(code: str, message: str, position: int, action: Action) -> None:
        faults.append(Fault(code, f"rank {rank} position {position}, {action}: {message}", rank, position, str(action)))

    forward_only = program.is_forward_only
    for position, action in enumerate(program.rows[rank]):
        if isinstance(action, Recv):
            here.add(action.value)
            continue
        needed = uses(action.op, program.num_stages) if isinstance(action, Compute) else [action.value]
        for value in needed:
            if value not in here:
                state = "was freed before" if value in freed else "is not on this rank yet"
                fault("use-after-free" if value in freed else "not-there", f"{value} {state}", position, action)
        if isinstance(action, Compute):
            here.update(makes(action.op, program.num_stages, forward_only))
        elif isinstance(action, Free):
            here.discard(action.value)
            freed.add(action.value)
    faults += [Fault("leak", f"rank {rank} never frees {value}", rank, None, str(value)) for value in sorted(here)]
    return faults


def _stop_faults(program: Program, model: Model) -> list[Fault]:
    player = Player(program, model)
    player.play()
    faults = []
    for rank, action, value in player.stuck():
        position = player.heads[rank]
        reason = f"rank {action.peer} never posts the receive" if isinstance(action, Send) else f"{value} is never sent"
        message = f"under {model} messages rank {rank} stops at position {position}, {action}: {reason}"
        faults.append(Fault("stop", message, rank, position, str(action)))
    return faults


class Player:
    """Plays a program under a message model, rank by rank, as far as it goes. `heads[r]` is rank r's next action."""

    def __init__(self, program: Program, model: Model) -> None:
        self.rows: list[list[Action]] = [list(row) for row in program.rows]
        self.heads = [0] * program.num_ranks
        self._model = model
        self._num_stages = program.num_stages
        self._receiver = {action.value: rank for rank, _, _, action in program.channels() if isinstance(action, Recv)}
        self._posted: set[Value] = set()
        self._sent: set[Value] = set()

    def play(self) -> None:
        """Advance every rank until none can go on."""
        asleep: dict[Value, int] = {}
        ready = list(range(len(self.rows)))
        while ready:
            self._advance(ready.pop(), ready, asleep)

    def _advance(self, rank: int, ready: list[int], asleep: dict[Value, int]) -> None:
        row = self.rows[rank]
        while self.heads[rank] < len(row):
            action = row[self.heads[rank]]
            blocker = self._blocker(action)
            if blocker is not None:
                asleep[blocker] = rank
                return
            if isinstance(action, (Send, Recv)):
                (self._sent if isinstance(action, Send) else self._posted).add(action.value)
                if action.value in asleep:
                    ready.append(asleep.pop(action.value))
            self.heads[rank] += 1

    def _blocker(self, action: Action) -> Value | None:
        """The value `action` waits for: one still to be sent to this rank, or one whose receive is not posted yet."""
        if isinstance(action, Compute):
            for value in uses(action.op, self._num_stages):
                if value in self._receiver and value not in self._sent:
                    return value
        elif isinstance(action, Send) and self._model is Model.RENDEZVOUS and action.value not in self._posted:
            return action.value
        return None

    def stuck(self) -> list[tuple[int, Action, Value]]:
        """The ranks that cannot go on, as (rank, action, the value it waits for)."""
        found = []
        for rank, head in enumerate(self.heads):
            if head < len(self.rows[rank]):
                action = self.rows[rank][head]
                value = self._blocker(action)
                if value is not None:
                    found.append((rank, action, value))
        return found
