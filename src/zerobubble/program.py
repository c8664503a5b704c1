"""A program: the actions with which each rank runs a schedule, which are passes, sends, receives, and frees of buffers.

A message goes through the FIFO channel (source, destination, value kind). Receives are posted ahead, in the order of the sends of their
source over all its channels to this rank. Sends do not wait, and a `Compute` waits until all values that it uses have arrived. A value is
consumed by its last use on a rank. A value that the rank sends lives until its `Free`, because the transport may still read it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from zerobubble.arguments import takes
from zerobubble.display import COLUMNS
from zerobubble.errors import ParseError, reading
from zerobubble.ir import Header, Placement, Schedule, Step, WithHeader, add_header_line, content_lines, parse_step
from zerobubble.kinds import SENT_BETWEEN_RANKS, Kind, ValueKind, kinds_making
from zerobubble.rules import Recomputed, Value, makes, recomputed, uses
from zerobubble.units import counted


class Compute(NamedTuple):
    """Run a step, one pass or two overlapped passes, once all values that it uses have arrived."""

    step: Step

    def __str__(self) -> str:
        return f"run {'&'.join(map(str, self.step))}"

    @property
    def in_words(self) -> str:
        """Such as "F of stage 2, microbatch 5"."""
        return " with ".join(f"{op.kind} of stage {op.stage}, microbatch {op.microbatch}" for op in self.step)


class Send(NamedTuple):
    """Send a value of this rank to `peer`."""

    value: Value
    peer: int

    def __str__(self) -> str:
        return f"send {self.value} to {self.peer}"


class Recv(NamedTuple):
    """Post the receive of a value from `peer`, without waiting for it."""

    value: Value
    peer: int

    def __str__(self) -> str:
        return f"recv {self.value} from {self.peer}"


class Free(NamedTuple):
    """Free a value that was sent from this rank."""

    value: Value

    def __str__(self) -> str:
        return f"free {self.value}"


Action = Compute | Send | Recv | Free


class Channel(NamedTuple):
    """A FIFO from `source` to `destination` for one value kind."""

    source: int
    destination: int
    value_kind: ValueKind

    def __str__(self) -> str:
        contents = SENT_BETWEEN_RANKS[self.value_kind][1] if self.value_kind in SENT_BETWEEN_RANKS else repr(self.value_kind)
        return f"{contents} from rank {self.source} to rank {self.destination}"


def channel_of(rank: int, action: Send | Recv) -> Channel:
    """Return the channel of a send or receive of `rank`."""
    if isinstance(action, Send):
        return Channel(rank, action.peer, action.value.value_kind)
    return Channel(action.peer, rank, action.value.value_kind)


@takes()
@dataclass(frozen=True, repr=False)
class Program(WithHeader):
    """The actions of every rank: `rows[rank]` are those of one rank, first to last. Made by `lower`, checked by `program_faults`.

    Attributes:
        name: The name of the schedule.
        placement: Which rank holds which stage.
        num_microbatches: The number of microbatches of a step, or of all slices.
        rows: The actions of each rank, first to last.
        microbatch_routes: The route of each microbatch through the placement; empty for route 0 for all.
        slices: The number of slices of its sequence into which each microbatch is cut.

    >>> import zerobubble as zb
    >>> print(zb.lower(zb.make("1f1b", 2, 1)))
    Program 1f1b: 2 stages on 2 ranks (linear), 1 microbatch, 10 actions
    rank 0: recv g1.0 from 1; run 0F0; send a0.0 to 1; run 0BW0; free a0.0
    rank 1: recv a0.0 from 0; run 1F0; run 1BW0; send g1.0 to 0; free g1.0
    """

    name: str
    placement: Placement
    num_microbatches: int
    rows: tuple[tuple[Action, ...], ...]
    microbatch_routes: tuple[int, ...] = field(default=())
    slices: int = 1

    def __post_init__(self) -> None:
        self.header.check(len(self.rows))

    def _summary(self) -> str:
        return f"{self.header.summary()}, {counted(sum(map(len, self.rows)), 'action')}"

    def _details(self) -> Iterator[str]:
        for rank, row in enumerate(self.rows):
            yield f"rank {rank}: {'; '.join(map(str, row[:COLUMNS]))}"

    @property
    def is_forward_only(self) -> bool:
        """Whether the program has no backward passes, so that its forwards save nothing."""
        return self.kinds <= kinds_making(ValueKind.ACTIVATION)

    @cached_property
    def kinds(self) -> frozenset[Kind]:
        """The kinds of its passes."""
        steps = (action.step for row in self.rows for action in row if isinstance(action, Compute))
        return frozenset(op.kind for step in steps for op in step)

    @cached_property
    def recomputed(self) -> Recomputed:
        """The recomputed forwards: by stage and microbatch, the kind of the pass that recomputes them."""
        return recomputed(op for row in self.rows for action in row if isinstance(action, Compute) for op in action.step)

    @cached_property
    def head_parts(self) -> tuple[int, ...]:
        """The stage numbers that the passes of a divided head carry, one per part, in order; empty if the head is not divided."""
        return self.to_schedule().head_parts

    def uses(self, step: Step) -> list[Value]:
        """Return the values that `step`, its passes, needs to start, each once, in the order of the passes."""
        used = [value for op in step for value in uses(op, self.num_stages, self.head_parts, self.slices)]
        return used if len(step) == 1 else list(dict.fromkeys(used))

    def makes(self, step: Step) -> list[Value]:
        """Return the values that `step` makes for other passes."""
        forward_only, recomputed_by, parts = self.is_forward_only, self.recomputed, self.head_parts
        return [value for op in step for value in makes(op, self.num_stages, forward_only, recomputed_by.get(op[1:]), parts, self.slices)]

    def channels(self) -> Iterator[tuple[int, int, Channel, Send | Recv]]:
        """Yield every send and receive as (rank, position, channel, action)."""
        for rank, row in enumerate(self.rows):
            for position, action in enumerate(row):
                if isinstance(action, (Send, Recv)):
                    yield rank, position, channel_of(rank, action), action

    def to_schedule(self) -> Schedule:
        """Return the schedule that the program runs."""
        rows = [[action.step for action in row if isinstance(action, Compute)] for row in self.rows]
        return Schedule.of_steps(*self.header[:3], rows, self.microbatch_routes, self.slices)

    def to_text(self) -> str:
        """Return the text form, one action per line. `Program.from_text` reads it."""
        lines = ["zerobubble program 1", *self.header.lines()]
        for rank, row in enumerate(self.rows):
            lines += [f"rank {rank}", *(f"  {action}" for action in row)]
        return "\n".join(lines) + "\n"

    @classmethod
    @takes(text=str)
    def from_text(cls, text: str) -> Program:
        """Read `text`, as `to_text` writes it; `#` starts a comment.

        Raises `ParseError` naming the line, and `InputError` if the parts do not match.
        """
        header: dict[str, str] = {}
        rows: list[list[Action]] = []
        for number, line in content_lines(text, "program"):
            words = line.split()
            if words[0] in _ACTIONS and rows:
                rows[-1].append(_parse_action(number, line))
            elif words == ["rank", str(len(rows))]:
                rows.append([])
            else:
                add_header_line(header, number, line)
        name, placement, microbatches, routes, slices = Header.parse(header, len(rows))
        return cls(name, placement, microbatches, tuple(map(tuple, rows)), routes, slices)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form; `from_dict` reads it."""
        return {"format": "zerobubble program 1", "text": self.to_text()}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Program:
        """Read `data`, as `to_dict` returns it; raises `ParseError` if it is malformed."""
        with reading("program", data):
            if not isinstance(data["text"], str):
                raise ParseError("'text' must be the text form of a program, got {got}", got=type(data["text"]).__name__)
            return cls.from_text(data["text"])


_ACTIONS = ("run", "send", "recv", "free")
_VALUE = re.compile(r"([a-z])([0-9]{1,9})\.([0-9]{1,9})")


def _parse_action(number: int, line: str) -> Action:
    try:
        match line.split():
            case ["run", step]:
                return Compute(parse_step(step))
            case ["send", value, "to", peer]:
                return Send(_parse_value(value), _parse_rank(peer))
            case ["recv", value, "from", peer]:
                return Recv(_parse_value(value), _parse_rank(peer))
            case ["free", value]:
                return Free(_parse_value(value))
    except ParseError as error:
        raise ParseError("line {number}: {reason}", number=number, reason=str(error)) from None
    message = "line {number}: {line!r} is not an action; {remedy}"
    raise ParseError(message, number=number, line=line, remedy="write 'run 0F0', 'send a0.0 to 1', 'recv a0.0 from 0' or 'free a0.0'")


def _parse_value(text: str) -> Value:
    match = _VALUE.fullmatch(text)
    if match is None:
        raise ParseError("{text!r} is not a value; write <a, g, s or w><stage>.<microbatch>, such as a0.3", text=text)
    return Value(ValueKind(match[1]), int(match[2]), int(match[3]))


def _parse_rank(text: str) -> int:
    if not re.fullmatch("[0-9]{1,9}", text):
        raise ParseError("{text!r} is not a rank", text=text)
    return int(text)
