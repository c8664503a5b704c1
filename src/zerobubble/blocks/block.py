"""A building block: the passes of one or a few microbatches, each with its start slot, and the interval between copies.

A schedule is made by repeating the block every `interval` slots. Copies do not collide if no two passes of a rank take the same slot modulo
the interval, so it is enough to check one block. The memory of a rank follows from the block too: it is the sum of the lifespans of its
stages, each divided by the interval. The method and its terms come from Pipeline Parallelism with Controllable Memory (arXiv 2405.15362,
sections 2 and 3).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from zerobubble.arguments import as_tuple, takes
from zerobubble.display import Displayed
from zerobubble.errors import InputError, ParseError
from zerobubble.ir import Header, Kind, Op, Placement, add_header_line, content_lines, parse_row
from zerobubble.units import counted

Times = tuple[int, int, int]

UNIT: Times = (1, 1, 1)
MOST_SLOTS = 1_000_000


@takes()
class Start(NamedTuple):
    """The pass `op` and its start `slot`, counted from 0. Text form: `2B0@7`."""

    op: Op
    slot: int

    def __str__(self) -> str:
        return f"{self.op}@{self.slot}"

    @classmethod
    def parse(cls, text: str) -> Start:
        """Read `text`, `<pass>@<slot>`; raises `ParseError` for anything else."""
        op, at, slot = text.partition("@")
        if not at or not re.fullmatch("[0-9]{1,9}", slot):
            raise ParseError("{text!r} is not a pass with its slot; write <pass>@<slot>, such as 0F0@3", text=text)
        return cls(Op.parse(op), int(slot))


@takes()
@dataclass(frozen=True, repr=False)
class Block(Displayed):
    """The passes of microbatches 0 to k-1 on each rank with their slots, repeated every `interval` slots.

    Attributes:
        name: The name in files, tables and messages.
        placement: Which rank holds which stage.
        interval: The slots between a block and its next copy.
        starts: The passes of each rank with their slots, in order of the slots.
        times: The slots that F, B and W take, 1 each by default; BW takes those of B and W.

    Only the parts are checked here; `repeat` checks that copies do not collide and that no pass starts too early.
    """

    name: str
    placement: Placement
    interval: int
    starts: tuple[tuple[Start, ...], ...]
    times: Times = field(default=UNIT)

    def __post_init__(self) -> None:
        if self.interval < 1:
            raise InputError("block {block!r} needs an interval of at least 1 slot, got {got}", block=self.name, got=self.interval)
        if len(self.times) != 3 or min(self.times) < 1:
            raise InputError("block {block!r} needs at least 1 slot for each of F, B and W, got {got}", block=self.name, got=self.times)
        starts = list(chain.from_iterable(self.starts))
        if not starts:
            raise InputError("block {block!r} needs at least one pass", block=self.name)
        foreign = [start.op for start in starts if start.op.kind not in lengths(self.times)]
        if foreign:
            message = "block {name!r} has {foreign}, but blocks may only have {known}"
            raise InputError(message, name=self.name, foreign=foreign[0], known=", ".join(lengths(self.times)))
        early = [start for start in starts if start.slot < 0]
        if early:
            message = "block {name!r} has {op} in slot {slot}"
            raise InputError(message, name=self.name, op=str(early[0].op), slot=early[0].slot, remedy="count slots from 0")
        latest = max((self.interval, *self.times, *(start.slot for start in starts)))
        if latest > MOST_SLOTS:
            message = "block {name!r} has slot {latest}, but blocks may have up to {limit:,}"
            raise InputError(message, name=self.name, latest=latest, limit=MOST_SLOTS, remedy="use longer slots")
        self.header.check(len(self.starts))
        object.__setattr__(self, "starts", tuple(tuple(sorted(row, key=lambda start: start.slot)) for row in self.starts))

    def _summary(self) -> str:
        return f"{self.header.summary()}, {counted(sum(map(len, self.starts)), 'pass')}, repeated every {counted(self.interval, 'slot')}"

    def _details(self) -> Iterator[str]:
        for rank, row in enumerate(self.starts):
            yield f"rank {rank}: {' '.join(map(str, row))}"

    @property
    def num_microbatches(self) -> int:
        """Microbatches in one copy."""
        return 1 + max(start.op.microbatch for row in self.starts for start in row)

    @property
    def header(self) -> Header:
        """All parts but the slots and the interval."""
        return Header(self.name, self.placement, self.num_microbatches, ())

    def length(self, kind: Kind) -> int:
        """Return the number of slots that a pass of `kind` takes."""
        return lengths(self.times)[kind]

    def to_text(self) -> str:
        """Return the text form: a header, then one line per rank. `Block.from_text` reads it."""
        times = [f"times {' '.join(map(str, self.times))}"] * (self.times != UNIT)
        rows = [f"rank {rank}: {' '.join(map(str, row))}".rstrip() for rank, row in enumerate(self.starts)]
        return "\n".join(["zerobubble block 1", *self.header.lines(), f"interval {self.interval}", *times, *rows]) + "\n"

    @classmethod
    @takes(text=str)
    def from_text(cls, text: str) -> Block:
        """Read `text`, as `to_text` writes it; `#` starts a comment.

        Raises `ParseError` naming the line, and `InputError` if the parts do not match.
        The header has `name`, `placement` and `interval`, and `times` (slots of F, B, W) if they are not 1 1 1. `microbatches` is optional.
        """
        header: dict[str, str] = {}
        numbers: dict[str, tuple[int, ...]] = {}
        rows: list[tuple[Start, ...]] = []
        for number, line in content_lines(text, "block"):
            key, _, rest = line.partition(" ")
            if key == "rank":
                rows.append(parse_row(number, rest, len(rows), Start.parse))
            elif key in _NUMBERS and key not in numbers:
                numbers[key] = _parse_numbers(number, key, rest)
            else:
                add_header_line(header, number, line)
        return cls._assembled(header, numbers, tuple(rows))

    @classmethod
    def _assembled(cls, header: dict[str, str], numbers: dict[str, tuple[int, ...]], rows: tuple[tuple[Start, ...], ...]) -> Block:
        if "interval" not in numbers:
            raise ParseError("the header line 'interval' is missing")
        if "routes" in header:
            raise ParseError("a block cannot have the header line 'routes': its passes take route 0")
        stated = Header.parse({"microbatches": "0", **header}, len(rows))
        (interval,), (forward, backward, weight) = numbers["interval"], numbers.get("times", UNIT)
        block = cls(stated.name, stated.placement, interval, rows, (forward, backward, weight))
        if stated.num_microbatches not in (0, block.num_microbatches):
            raise ParseError(
                "the header says {stated} microbatches, but the rows have {got}", stated=stated.num_microbatches, got=block.num_microbatches
            )
        return block

    @classmethod
    def from_paths(
        cls,
        name: str,
        placement: Placement,
        interval: int,
        *paths: Sequence[int],
        split: bool = True,
        times: Times = UNIT,
    ) -> Block:
        """Return the block in which microbatch j starts its passes in slots `paths[j]`: F from first to last stage, B from last to first.

        `path_slots` makes a path. `name`, `placement`, `interval` and `times` are those of the block. With `split`, each W takes the first
        slot of its rank after its B that is free modulo the interval; otherwise backward is BW. Raises `InputError` if a path does not have
        two slots per stage or no slot is free for a W.
        """
        back = Kind.B if split else Kind.BW
        stages = placement.num_stages
        rows: list[list[Start]] = [[] for _ in range(placement.num_ranks)]
        for microbatch, slots_of in enumerate(paths):
            if len(as_tuple(f"a path of block {name!r}, slot after slot,", slots_of)) != 2 * stages:
                message = "block {name!r}: a path over {stages} stages has {num_slots} slots, got {got}"
                raise InputError(message, name=name, stages=stages, num_slots=2 * stages, got=len(slots_of))
            chain = [*((Kind.F, s) for s in range(stages)), *((back, s) for s in reversed(range(stages)))]
            for (kind, stage), slot in zip(chain, slots_of, strict=True):
                rows[placement.routes[0][stage]].append(Start(Op(kind, stage, microbatch), slot))
        whole = cls(name, placement, interval, tuple(map(tuple, rows)), times)
        return with_weights(whole) if split else whole


_NUMBERS = {"interval": 1, "times": 3}


def lengths(times: Times) -> dict[Kind, int]:
    """Return the number of slots of a pass of each kind, from the `times` of F, B and W."""
    forward, backward, weight = times
    return {Kind.F: forward, Kind.B: backward, Kind.W: weight, Kind.BW: backward + weight}


@takes()
def path_slots(first: int, *runs: tuple[int, int]) -> list[int]:
    """Return the start slots of consecutive passes, of which the first starts in slot `first`.

    Each of `runs` is a pair (number of passes, slots from each pass to the next).
    """
    slots = [first]
    for hops, gap in runs:
        slots += [slots[-1] + gap * hop for hop in range(1, hops + 1)]
    return slots


@takes()
def with_weights(block: Block) -> Block:
    """Return `block` with a W for every B, each in the first slot of the rank after its B that is free modulo the interval.

    Raises `InputError` if no slot is free.
    """
    rows = [(*row, *_weights(block, rank, row)) for rank, row in enumerate(block.starts)]
    return Block(block.name, block.placement, block.interval, tuple(rows), block.times)


def _weights(block: Block, rank: int, row: Iterable[Start]) -> Iterator[Start]:
    taken = {slot % block.interval for start in row for slot in _covers(block, start)}
    for (kind, stage, microbatch), slot in row:
        if kind is Kind.B:
            weight = Op(Kind.W, stage, microbatch)
            after = slot + block.length(kind)
            candidates = (Start(weight, after + wait) for wait in range(block.interval))
            free = (start for start in candidates if not any(s % block.interval in taken for s in _covers(block, start)))
            start = next(free, None)
            if start is None:
                message = "block {block!r}: rank {rank} has no free slot for {op}"
                raise InputError(message, block=block.name, rank=rank, op=str(weight), remedy=f"choose an interval above {block.interval}")
            taken.update(s % block.interval for s in _covers(block, start))
            yield start


def _covers(block: Block, start: Start) -> range:
    return range(start.slot, start.slot + block.length(start.op.kind))


def _parse_numbers(number: int, key: str, rest: str) -> tuple[int, ...]:
    words = rest.split()
    if len(words) != _NUMBERS[key] or not all(re.fullmatch("[0-9]{1,9}", word) for word in words):
        raise ParseError(
            "line {number}: {key!r} takes {expected} whole numbers, got {rest!r}", number=number, key=key, expected=_NUMBERS[key], rest=rest
        )
    return tuple(map(int, words))
