"""The values that passes of a row make and use, and those that it receives and sends."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from zerobubble.ir import Op
from zerobubble.kinds import Collective
from zerobubble.program import Compute, Program, Recv, Send
from zerobubble.rules import Value
from zerobubble.runtime.mailbox.mailbox import Mailbox
from zerobubble.runtime.measure.step_records import StepRecords
from zerobubble.runtime.values.payload import Payload, Tensors
from zerobubble.timeline import Doing

GATHERED = frozenset(collective.value_kind for collective in Collective)
"""The kinds of values that several ranks use."""


class RowValues:
    """The values of one row of `program` in a step.

    A value is removed when its only user takes it, or by its last user or release if several passes use it or it is also sent. What was
    sent belongs to `mailbox` until the program releases it.
    """

    def __init__(self, program: Program, rank: int, mailbox: Mailbox, records: StepRecords) -> None:
        row = program.rows[rank]
        self.made: dict[Value, Any] = {}
        self._program = program
        self._mailbox = mailbox
        self._records = records
        self._received = {action.value for action in row if isinstance(action, Recv)}
        self._sent = {action.value for action in row if isinstance(action, Send)}
        ops = [op for action in row if isinstance(action, Compute) for op in action.step]
        self._last_users = {value: op for op in ops for value in program.uses((op,)) if value.value_kind in GATHERED}

    def taking(self, source: Value, take: Callable[[Value], Any] | None = None) -> Callable[[], Any]:
        """Returns the call that takes `source`, timed if it is a message; `take` replaces the method."""
        call = partial(take or self.take, source)
        return self._records.timed(Doing.WAIT, source, call) if source in self._received else call

    def take(self, source: Value) -> Any:
        """Returns and removes a value with one user."""
        return self._mailbox.take(source) if source in self._received else self.made.pop(source)

    def inputs(self, source: Value) -> Tensors:
        """Takes the inputs of a forward. Those that this rank has made are cut from the graph of their stage."""
        tensors: Tensors = self.take(source)
        if source in self._received:
            return tensors
        apart = tuple(t.detach().requires_grad_(t.requires_grad) for t in tensors)
        return tensors.with_tensors(apart) if isinstance(tensors, Payload) else apart

    def collecting(self, op: Op) -> Callable[[], list[Tensors]]:
        """Returns the call that collects all parts that a pass gathers, in their order."""
        gathered = [value for value in self._program.uses((op,)) if value.value_kind in GATHERED]
        takes = [self.taking(value, partial(self._read_shared, op)) for value in gathered]
        return lambda: [take() for take in takes]

    def _read_shared(self, op: Op, value: Value) -> Tensors:
        """Returns a value that several passes of this rank may use and others may be sent; its last user removes it, or the release."""
        if value in self._received and value not in self.made:
            self.made[value] = self._mailbox.take(value)
        tensors: Tensors = self.made[value]
        if self._last_users[value] == op and value not in self._sent:
            del self.made[value]
        return tensors

    def send(self, value: Value, peer: int) -> None:
        """Sends a value, which this rank keeps if its own passes may use it, too."""
        self._mailbox.send(value, peer, self.made[value] if value.value_kind in GATHERED else self.made.pop(value))

    def release(self, value: Value) -> None:
        """Frees a value that was sent or received."""
        self.made.pop(value, None)
        self._mailbox.release(value)
