"""A schedule turned into what each rank does: passes, messages on channels, and the points where buffers go.

A message travels on the FIFO channel (source, destination, stuff). Receives are posted ahead and sends do not wait; a `Compute`
waits until everything it uses is there. `Free` ends a value on a rank: what was sent is kept until it has left.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from zerobubble.errors import ParseError
from zerobubble.ir import Kind, Op, Placement
from zerobubble.rules import Stuff, Value


class Compute(NamedTuple):
    """Run a pass once all it uses has arrived."""

    op: Op

    def __str__(self) -> str:
        return f"run {self.op}"


class Send(NamedTuple):
    """Hand a value of this rank to the channel towards `peer`."""

    value: Value
    peer: int

    def __str__(self) -> str:
        return f"send {self.value} to {self.peer}"


class Recv(NamedTuple):
    """Post the receive of a value from `peer`; it does not wait."""

    value: Value
    peer: int

    def __str__(self) -> str:
        return f"recv {self.value} from {self.peer}"


class Free(NamedTuple):
    """Give up a value on this rank."""

    value: Value

    def __str__(self) -> str:
        return f"free {self.value}"


Action = Compute | Send | Recv | Free


class Channel(NamedTuple):
    """A FIFO from `source` to `destination` for one kind of stuff (activations one way through the model, gradients the other)."""

    source: int
    destination: int
    stuff: Stuff

    def __str__(self) -> str:
        what = "activations" if self.stuff is Stuff.ACTIVATION else "gradients"
        return f"{what} from rank {self.source} to rank {self.destination}"


def channel_of(rank: int, action: Send | Recv) -> Channel:
    """The channel a message action of `rank` uses."""
    if isinstance(action, Send):
        return Channel(rank, action.peer, action.value.stuff)
    return Channel(action.peer, rank, action.value.stuff)


@dataclass(frozen=True)
class Program:
    """`rows[rank]` are the actions of that rank, first to last. Made by `lower.lower`, checked by `verify_program.program_faults`."""

    name: str
    placement: Placement
    num_microbatches: int
    rows: tuple[tuple[Action, ...], ...]
    microbatch_routes: tuple[int, ...] = field(default=())

    @property
    def num_ranks(self) -> int:
        return self.placement.num_ranks

    @property
    def num_stages(self) -> int:
        return self.placement.num_stages

    @property
    def is_forward_only(self) -> bool:
        """True when it holds no backward pass, so forwards save nothing."""
        return all(action.op.kind is Kind.F for row in self.rows for action in row if isinstance(action, Compute))

    def channels(self) -> Iterator[tuple[int, int, Channel, Send | Recv]]:
        """Every message action as (rank, position, channel, action)."""
        for rank, row in enumerate(self.rows):
            for position, action in enumerate(row):
                if isinstance(action, (Send, Recv)):
                    yield rank, position, channel_of(rank, action), action

    def to_text(self) -> str:
        """The text form, one action a line. `Program.from_text` reads it back."""
        routes = " | ".join(" ".join(map(str, route)) for route in self.placement.routes)
        lines = ["zerobubble program 1", f"name {self.name}", f"placement {self.placement.name}: {routes}"]
        lines.append(f"microbatches {self.num_microbatches}")
        if self.microbatch_routes:
            lines.append("routes " + " ".join(map(str, self.microbatch_routes)))
        for rank, row in enumerate(self.rows):
            lines.append(f"rank {rank}")
            lines += [f"  {action}" for action in row]
        return "\n".join(lines) + "\n"

    @classmethod
    def from_text(cls, text: str) -> Program:
        """Read the text form; raises `ParseError` naming the line."""
        lines = text.splitlines()
        if not lines or lines[0] != "zerobubble program 1":
            raise ParseError("line 1: a program file starts with 'zerobubble program 1'")
        head: dict[str, str] = {}
        rows: list[list[Action]] = []
        for number, line in enumerate(lines[1:], 2):
            try:
                if line.startswith("  "):
                    rows[-1].append(_parse_action(line.split()))
                elif line == f"rank {len(rows)}":
                    rows.append([])
                else:
                    key, _, rest = line.partition(" ")
                    head[key] = rest
            except (IndexError, ValueError) as error:
                raise ParseError(f"line {number}: {line.strip()!r} is not an action") from error
        try:
            name, _, routes = head["placement"].partition(":")
            placement = Placement(name, len(rows), tuple(tuple(map(int, route.split())) for route in routes.split("|")))
            taken = tuple(map(int, head.get("routes", "").split()))
            return cls(head["name"], placement, int(head["microbatches"]), tuple(map(tuple, rows)), taken)
        except (KeyError, ValueError) as error:
            raise ParseError(f"the header (name, placement, microbatches) is incomplete or malformed: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """The JSON form; `from_dict` reads it back."""
        return {"format": "zerobubble program 1", "text": self.to_text()}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Program:
        """Read the JSON form; raises `ParseError` when it is malformed."""
        if not isinstance(data.get("text"), str):
            raise ParseError("not a program in JSON form: 'text' is missing")
        return cls.from_text(data["text"])


def _parse_action(words: list[str]) -> Action:
    match words:
        case ["run", op]:
            return Compute(Op.parse(op))
        case ["send", value, "to", peer]:
            return Send(_parse_value(value), int(peer))
        case ["recv", value, "from", peer]:
            return Recv(_parse_value(value), int(peer))
        case ["free", value]:
            return Free(_parse_value(value))
    raise ValueError(words)


def _parse_value(text: str) -> Value:
    stage, _, microbatch = text[1:].partition(".")
    return Value(Stuff(text[0]), int(stage), int(microbatch))
