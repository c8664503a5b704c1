"""The intermediate representation: passes, the placement of stages on ranks, and the order of passes on each rank.

A `Schedule` is an order only. Times are in a `Timeline`, messages in a `Program`. Idle time is not represented: it follows from the order
and the costs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, islice
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

from zerobubble.arguments import COUNT, NUMBERED, WHOLE, as_tuple, require, takes, wrong
from zerobubble.display import COLUMNS, Displayed
from zerobubble.errors import InputError, ParseError, reading, whole
from zerobubble.kinds import KINDS, ValueKind, head_kinds, kinds_making, kinds_using
from zerobubble.kinds import Kind as Kind
from zerobubble.units import counted

LONGEST_NAME = 1000
_OP = re.compile(r"([0-9]{1,9})([A-Z]{1,3})([0-9]{1,9})")


class _Pass(NamedTuple):
    kind: Kind
    stage: int
    microbatch: int


class Op(_Pass):
    """One pass: `kind` of `stage` for `microbatch`. Text form: `2BW5`.

    Attributes:
        kind: The kind of pass, such as `zb.Kind.F`; letters such as "F" stand for their kind.
        stage: The stage, from 0.
        microbatch: The microbatch, from 0; in a schedule over slices, the slice, numbered over all microbatches.

    Raises `InputError` for an unknown kind, and for a stage or microbatch that is not a whole number from 0.

    >>> import zerobubble as zb
    >>> zb.Op(zb.Kind.F, stage=2, microbatch=5)
    Op.parse('2F5')
    >>> str(zb.Op.parse("2BW5"))
    '2BW5'
    """

    __slots__ = ()

    def __new__(cls, kind: str, stage: int, microbatch: int) -> Op:
        # Planning makes hundreds of thousands of passes: one that is plainly right takes five comparisons.
        if type(kind) is not Kind or type(stage) is not int or type(microbatch) is not int or stage < 0 or microbatch < 0:
            kind = Kind(kind)
            require("the stage of a pass", stage, NUMBERED)
            require("the microbatch of a pass", microbatch, NUMBERED)
        return tuple.__new__(cls, (kind, stage, microbatch))

    def __repr__(self) -> str:
        return f"Op.parse('{self}')"

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Op:
        """Read `text`, `<stage><kind><microbatch>` such as "0F3"; raises `ParseError` for anything else."""
        match = _OP.fullmatch(text)
        if match is None or match[2] not in KINDS:
            *others, last = KINDS
            kinds = f"{', '.join(others)} or {last}"
            raise ParseError("{text!r} is not a pass; write <stage><kind><microbatch> with kind {kind}, such as 0F3", text=text, kind=kinds)
        return cls(Kind(match[2]), int(match[1]), int(match[3]))


Step = tuple[Op, ...]
"""A step of a rank: one pass, or two overlapped passes. Text form: `2BW5`, `0F8&7BW0`."""
Cell = TypeVar("Cell")


def parse_step(text: str) -> Step:
    """Read one pass, or two joined by `&`; raises `ParseError` for anything else."""
    step = tuple(map(Op.parse, str(text).split("&")))
    if len(step) > 2:
        raise ParseError("{text!r} overlaps {num_step} passes; a step is one pass or two, such as 0F8&7BW0", text=text, num_step=len(step))
    return step


@takes()
@dataclass(frozen=True, repr=False)
class Placement(Displayed):
    """Mapping of stages to ranks.

    Most schedules have one route. Bidirectional schedules (Chimera, DualPipe) have two, each with a full copy of the model.

    Attributes:
        name: The family: "linear", "looped", "vee", "wave", "bidirectional" or "custom".
        num_ranks: The number of ranks.
        routes: For each route, the rank that runs each stage: `routes[k][s]` runs stage `s` for microbatches of route `k`.

    >>> import zerobubble as zb
    >>> zb.Placement.vee(3)
    <Placement vee: 6 stages on 3 ranks: 0 1 2 2 1 0>
    >>> zb.Placement.custom([0, 1, 1, 0]).stages(1)
    ((0, 1), (0, 2))
    """

    name: str
    num_ranks: int
    routes: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        _check_name("placement", self.name)
        require("num_ranks of a placement", self.num_ranks, WHOLE)
        routes = as_tuple("the routes of a placement", self.routes)
        object.__setattr__(self, "routes", tuple(as_tuple("the ranks of a route", route) for route in routes))
        used = {*chain.from_iterable(self.routes)}
        for rank in used:
            require("the rank of a stage", rank, WHOLE)
        if self.num_ranks < 1:
            raise InputError("a pipeline needs at least 1 rank, got {got}", got=self.num_ranks)
        if not self.routes or not self.routes[0]:
            raise InputError("a placement needs at least one route with at least one stage")
        lengths = {*map(len, self.routes)}
        if len(lengths) > 1:
            raise InputError("every route must hold the same stages, got routes of {lengths} stages", lengths=sorted(lengths))
        beyond = sorted(rank for rank in used if not 0 <= rank < self.num_ranks)
        if beyond:
            raise InputError("a placement over {num_ranks} ranks must not name ranks {beyond}", num_ranks=self.num_ranks, beyond=beyond)
        if len(used) < self.num_ranks:
            idle = list(islice((rank for rank in range(self.num_ranks) if rank not in used), 20))
            more = f" and {self.num_ranks - len(used) - 20} more" if self.num_ranks - len(used) > 20 else ""
            raise InputError("ranks {idle}{more} hold no stage; {remedy}", idle=idle, more=more, remedy="use fewer ranks or more stages")

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.routes[0])

    def _summary(self) -> str:
        routes = " | ".join(" ".join(map(str, route)) for route in self.routes)
        return f"{self.name}: {counted(self.num_stages, 'stage')} on {counted(self.num_ranks, 'rank')}: {routes}"

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form; `from_dict` reads it."""
        return {"name": self.name, "ranks": self.num_ranks, "routes": [list(route) for route in self.routes]}

    @classmethod
    def from_dict(cls, data: Any) -> Placement:
        """Read `data`, as `to_dict` returns it; raises `ParseError` if a part is missing, malformed or does not match the others."""
        with reading("placement", data):
            routes = tuple(tuple(map(whole, route)) for route in data["routes"])
            return cls(str(data["name"]), whole(data["ranks"]), routes)

    @property
    def stages_per_rank(self) -> int:
        """The largest number of stages on a rank, counting copies on different routes separately."""
        return max(map(len, self._stages))

    def stages(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Return the (route, stage) pairs on `rank`."""
        return self._stages[rank] if 0 <= rank < self.num_ranks else ()

    def rank_sums(self, column: Sequence[int]) -> list[int]:
        """Return, per rank, the sum of `column`, one value per stage, over its stages, counting copies on different routes."""
        return [sum(column[stage] for _, stage in stages) for stages in self._stages]

    @cached_property
    def _stages(self) -> list[tuple[tuple[int, int], ...]]:
        """Per rank, its (route, stage) pairs."""
        pairs: list[list[tuple[int, int]]] = [[] for _ in range(self.num_ranks)]
        for k, stage, rank in ((k, stage, rank) for k, route in enumerate(self.routes) for stage, rank in enumerate(route)):
            pairs[rank].append((k, stage))
        return list(map(tuple, pairs))

    @classmethod
    @takes(num_ranks=WHOLE)
    def linear(cls, num_ranks: int) -> Placement:
        """Stage s on rank s of `num_ranks` ranks."""
        return cls("linear", num_ranks, (tuple(range(num_ranks)),))

    @classmethod
    @takes(num_ranks=WHOLE, stages_per_rank=WHOLE)
    def looped(cls, num_ranks: int, stages_per_rank: int) -> Placement:
        """Stage c*p + r on rank r of p = `num_ranks`: stages go around the ranks in a loop, `stages_per_rank` times."""
        return cls("looped", num_ranks, (tuple(range(num_ranks)) * stages_per_rank,))

    @classmethod
    @takes(num_ranks=WHOLE)
    def vee(cls, num_ranks: int) -> Placement:
        """Stages r and 2p-1-r on rank r of p = `num_ranks`: down the ranks and back up, so the loss is on the first rank."""
        there = tuple(range(num_ranks))
        return cls("vee", num_ranks, (there + there[::-1],))

    @classmethod
    @takes(num_ranks=WHOLE, waves=WHOLE)
    def wave(cls, num_ranks: int, waves: int) -> Placement:
        """Stages down `num_ranks` ranks and back up `waves` times, with two stages per rank in each wave. One wave is the vee."""
        there = tuple(range(num_ranks))
        return cls("wave", num_ranks, ((there + there[::-1]) * waves,))

    @classmethod
    @takes(num_ranks=WHOLE)
    def bidirectional(cls, num_ranks: int) -> Placement:
        """Two copies of the model on p = `num_ranks` ranks: stage s on rank s for route 0, on rank p-1-s for route 1."""
        there = tuple(range(num_ranks))
        return cls("bidirectional", num_ranks, (there, there[::-1]))

    @classmethod
    def custom(cls, *routes: Iterable[int]) -> Placement:
        """Any placement: each of `routes` has the ranks of its stages, first to last."""
        as_tuples = tuple(as_tuple("a route, the ranks of its stages,", route) for route in routes)
        ranks = [rank for route in as_tuples for rank in route]
        if not ranks:
            raise InputError("a custom placement needs at least one stage")
        for rank in ranks:
            require("the rank of a stage", rank, WHOLE)
        return cls("custom", max(ranks) + 1, as_tuples)


class Header(NamedTuple):
    """The header of schedules and programs: all but their rows."""

    name: str
    placement: Placement
    num_microbatches: int
    microbatch_routes: tuple[int, ...]
    slices: int = 1

    def check(self, num_rows: int) -> None:
        """Raise `InputError` if the parts do not match each other or `num_rows` rows."""
        _check_name("schedule", self.name)
        require("placement of a schedule", self.placement, Placement)
        require("num_microbatches of a schedule", self.num_microbatches, WHOLE)
        ranks, microbatches, routes = self.placement.num_ranks, self.num_microbatches, self.microbatch_routes
        if microbatches < 1:
            raise InputError("a schedule needs at least 1 microbatch, got {got}", got=microbatches)
        if num_rows != ranks:
            raise InputError("a placement over {ranks} ranks needs {ranks} rows, got {got}", ranks=ranks, got=num_rows)
        if routes and len(routes) != microbatches:
            raise InputError("{microbatches} microbatches need as many routes, got {got}", microbatches=microbatches, got=len(routes))
        if any(not 0 <= route < len(self.placement.routes) for route in routes):
            raise wrong("microbatch routes", routes, f"in 0 to {len(self.placement.routes) - 1}")
        require("slices of a schedule", self.slices, COUNT)
        if microbatches % self.slices:
            raise InputError(
                "microbatches of {slices} slices need a multiple of {slices} numbers, got {got}", slices=self.slices, got=microbatches
            )
        if any(len({*routes[first : first + self.slices]}) > 1 for first in range(0, len(routes), self.slices)):
            raise wrong("microbatch routes", routes, f"the same for all {self.slices} slices of a microbatch")

    def summary(self) -> str:
        """Return the name and the sizes in a few words."""
        where = f"{counted(self.placement.num_stages, 'stage')} on {counted(self.placement.num_ranks, 'rank')} ({self.placement.name})"
        slices = f" of {self.slices} slices" if self.slices > 1 else ""
        return f"{self.name or 'unnamed'}: {where}, {counted(self.num_microbatches // self.slices, 'microbatch')}{slices}"

    def lines(self) -> list[str]:
        """Return the text form; `parse` reads it."""
        routes = " | ".join(" ".join(map(str, route)) for route in self.placement.routes)
        lines = [f"name {self.name}".rstrip(), f"placement {self.placement.name}: {routes}", f"microbatches {self.num_microbatches}"]
        if self.microbatch_routes:
            lines.append("routes " + " ".join(map(str, self.microbatch_routes)))
        if self.slices > 1:
            lines.append(f"slices {self.slices}")
        return lines

    @classmethod
    def parse(cls, lines: dict[str, str], num_rows: int) -> Header:
        """Read the header from `lines`, which maps the key of each line to the rest of it; raises `ParseError` naming the key."""
        for key in ("placement", "microbatches"):
            if key not in lines:
                raise ParseError("the header line {key!r} is missing", key=key)
        name, _, routes = lines["placement"].rpartition(":")
        placement = Placement(name, num_rows, tuple(_numbers("placement", route) for route in routes.split("|")))
        microbatches, slices = _number("microbatches", lines["microbatches"]), _number("slices", lines.get("slices", "1"))
        return cls(lines.get("name", "unnamed"), placement, microbatches, _numbers("routes", lines.get("routes", "")), slices)


def _number(key: str, text: str) -> int:
    numbers = _numbers(key, text)
    if len(numbers) != 1:
        raise ParseError("the header line {key!r} must have one number, got {got!r}", key=key, got=text)
    return numbers[0]


def _numbers(key: str, text: str) -> tuple[int, ...]:
    words = text.split()
    unreadable = [word for word in words if not re.fullmatch("[0-9]{1,9}", word)]
    if unreadable:
        raise ParseError(
            "the header line {key!r} has {unreadable!r}, which is not a whole number of at most 9 digits", key=key, unreadable=unreadable[0]
        )
    return tuple(map(int, words))


def _check_name(noun: str, name: str) -> None:
    """Raise `InputError` unless `name` can be a line of the text forms."""
    require(f"the name of a {noun}", name, str)
    if not name.isprintable() or name != name.strip() or "#" in name or len(name) > LONGEST_NAME:
        rule = f"one line of printable text without '#' and without spaces at either end, of at most {LONGEST_NAME} characters"
        raise wrong(f"the name of a {noun}", name, rule)


def content_lines(text: str, noun: str) -> list[tuple[int, str]]:
    """Return the numbered lines of a text form without comments and blank lines, after its first line `zerobubble <noun> 1`."""
    numbered = enumerate(text.split("\n"), 1)
    lines = [(number, content) for number, line in numbered if (content := line.partition("#")[0].strip())]
    if not lines or lines[0][1] != f"zerobubble {noun} 1":
        raise ParseError("line 1: a {noun} file must start with 'zerobubble {noun} 1'", noun=noun)
    return lines[1:]


_HEADER_KEYS = ("name", "placement", "microbatches", "routes", "slices")


def add_header_line(header: dict[str, str], number: int, line: str) -> None:
    """Add a header line to `header`; raises `ParseError` for an unknown or repeated one."""
    key, _, rest = line.partition(" ")
    if key not in _HEADER_KEYS or key in header:
        message = "line {number}: {line!r} is neither a row nor a header ({keys}; once each)"
        raise ParseError(message, number=number, line=line, keys=", ".join(_HEADER_KEYS))
    header[key] = rest.strip()


class WithHeader(Displayed):
    """A value with a header and a row for each rank: a `Schedule` of passes or a `Program` of actions."""

    name: str
    placement: Placement
    num_microbatches: int
    microbatch_routes: tuple[int, ...]
    slices: int

    @property
    def header(self) -> Header:
        """All parts but the rows."""
        return Header(self.name, self.placement, self.num_microbatches, self.microbatch_routes, self.slices)

    @property
    def num_ranks(self) -> int:
        return self.placement.num_ranks

    @property
    def num_stages(self) -> int:
        return self.placement.num_stages

    @property
    def whole_microbatches(self) -> int:
        """Number of microbatches, each with all its slices."""
        return self.num_microbatches // self.slices


@takes()
@dataclass(frozen=True, repr=False)
class Schedule(WithHeader):
    """The order of passes on every rank: `rows[rank]` are the passes of that rank, first to last.

    Legality is not checked here, so that a faulty schedule is a value that can be explained; see `zb.schedule_faults`.

    Attributes:
        name: The name in files, tables and messages.
        placement: Which rank holds which stage.
        num_microbatches: The number of microbatches of a step; with `slices`, the number of all slices.
        rows: The passes of each rank, first to last.
        microbatch_routes: The route of each microbatch through the placement; empty for route 0 for all.
        overlaps: Pairs of adjacent passes of a row that run as one step: both start when the inputs of both have arrived, and their results
            are sent when both have ended.
        slices: The number of slices of its sequence into which each microbatch is cut. Microbatch numbers then count slices: number `j` is
            slice `j % slices` of microbatch `j // slices`. Slices of a stage run F in order, and B or BW in reverse order.

    >>> import zerobubble as zb
    >>> rows = [[zb.Op.parse(text) for text in row.split()] for row in ("0F0 0F1 0BW0 0BW1", "1F0 1BW0 1F1 1BW1")]
    >>> schedule = zb.Schedule("mine", zb.Placement.linear(2), 2, rows)
    >>> print(schedule)
    Schedule mine: 2 stages on 2 ranks (linear), 2 microbatches, 8 passes
    rank 0: 0F0 0F1 0BW0 0BW1
    rank 1: 1F0 1BW0 1F1 1BW1
    >>> zb.schedule_faults(schedule)
    ()
    """

    name: str
    placement: Placement
    num_microbatches: int
    rows: tuple[tuple[Op, ...], ...]
    microbatch_routes: tuple[int, ...] = field(default=())
    overlaps: frozenset[tuple[Op, Op]] = field(default=frozenset())
    slices: int = 1

    def __post_init__(self) -> None:
        rows = as_tuple("the rows of a schedule, a list of passes for each rank,", self.rows)
        object.__setattr__(self, "rows", tuple(as_tuple("the passes of a rank", row) for row in rows))
        object.__setattr__(self, "microbatch_routes", as_tuple("the routes of microbatches", self.microbatch_routes))
        self.header.check(len(self.rows))
        # Rows of Op only, which are nearly all, are skipped at once.
        for op in chain.from_iterable(row for row in self.rows if {*map(type, row)} - {Op}):
            require("a pass in the rows of a schedule", op, Op)
        if self.overlaps:
            together = [step for row in self.steps for step in row if len(step) > 1]
            apart = self.overlaps.difference(together)
            if apart:
                first, second = min(apart)
                message = "overlapped passes must be adjacent in a row and in one pair each, but {first} and {second} are not"
                raise InputError(message, first=str(first), second=str(second))

    def _summary(self) -> str:
        return f"{self.header.summary()}, {counted(sum(map(len, self.rows)), 'pass')}"

    def _details(self) -> Iterator[str]:
        for rank, row in enumerate(self.steps):
            yield f"rank {rank}: {' '.join(map(_step_text, row[:COLUMNS]))}"

    @cached_property
    def steps(self) -> tuple[tuple[Step, ...], ...]:
        """The rows divided into steps."""
        return tuple(tuple(_cut(row, self.overlaps) if self.overlaps else zip(row)) for row in self.rows)

    @classmethod
    def of_steps(
        cls,
        name: str,
        placement: Placement,
        num_microbatches: int,
        rows: Iterable[Iterable[Step]],
        microbatch_routes: tuple[int, ...] = (),
        slices: int = 1,
    ) -> Schedule:
        """Return the schedule whose `rows` consist of steps: tuples of one pass, or of two overlapped ones.

        Args:
            name, placement, num_microbatches: As in `Schedule`.
            rows: The steps of each rank, first to last.
            microbatch_routes, slices: As in `Schedule`.
        """
        cut = [list(row) for row in rows]
        passes = tuple(tuple(op for step in row for op in step) for row in cut)
        pairs = frozenset((step[0], step[1]) for row in cut for step in row if len(step) > 1)
        return cls(name, placement, num_microbatches, passes, microbatch_routes, pairs, slices)

    @property
    def is_forward_only(self) -> bool:
        """Whether the schedule has forward passes only, as for inference."""
        forwards = kinds_making(ValueKind.ACTIVATION)
        return all(op[0] in forwards for row in self.rows for op in row)

    def rank_of(self, stage: int, microbatch: int) -> int:
        """Return the rank that runs `stage` for `microbatch`."""
        route = self.microbatch_routes[microbatch] if self.microbatch_routes else 0
        return self.placement.routes[route][stage]

    @cached_property
    def split_stages(self) -> frozenset[int]:
        """Stages whose backward is split: they have at least one pass that uses weight work, as W does."""
        weights = kinds_using(ValueKind.WEIGHT_WORK)
        return frozenset(op.stage for row in self.rows for op in row if op.kind in weights)

    @cached_property
    def has_divided_head(self) -> bool:
        """Whether the head is divided over ranks, in passes such as S and T."""
        return not head_kinds().isdisjoint(map(itemgetter(0), chain.from_iterable(self.rows)))

    @property
    def head_parts(self) -> tuple[int, ...]:
        """The stages that name the parts of a divided head, in order; empty if the head is not divided."""
        kinds = head_kinds()
        return tuple(sorted({stage for kind, stage, _ in chain.from_iterable(self.rows) if kind in kinds}))

    def forward_only(self) -> Schedule:
        """Return the schedule for evaluation: only the forwards, as F, in the same order.

        With several routes, all microbatches take route 0 instead, and a rank runs all forwards of one stage before its next stage.
        """
        name, route = f"{self.name} (forward only)", self.placement.routes[0]
        if len(self.placement.routes) == 1:
            forwards = kinds_making(ValueKind.ACTIVATION)
            rows = tuple(tuple(Op(Kind.F, stage, j) for kind, stage, j in row if kind in forwards) for row in self.rows)
        else:
            stages = [[stage for stage, home in enumerate(route) if home == rank] for rank in range(self.num_ranks)]
            rows = tuple(
                tuple(Op(Kind.F, stage, j) for stage in stages_of_rank for j in range(self.num_microbatches)) for stages_of_rank in stages
            )
        return Schedule(name, self.placement, self.num_microbatches, rows, slices=self.slices)

    def ops(self) -> Iterator[tuple[int, int, Op]]:
        """Yield every pass as (rank, position, op)."""
        return ((rank, position, op) for rank, row in enumerate(self.rows) for position, op in enumerate(row))

    def to_text(self) -> str:
        """Return the text form: a header, then one line per rank. `Schedule.from_text` reads it."""
        rows = [f"rank {rank}: {' '.join(map(_step_text, row))}".rstrip() for rank, row in enumerate(self.steps)]
        return "\n".join(["zerobubble schedule 1", *self.header.lines(), *rows]) + "\n"

    @classmethod
    @takes(text=str)
    def from_text(cls, text: str) -> Schedule:
        """Read `text`, as `to_text` writes it; `#` starts a comment.

        Raises `ParseError` naming the line, and `InputError` if the parts do not match.
        """
        header: dict[str, str] = {}
        rows: list[tuple[Step, ...]] = []
        for number, line in content_lines(text, "schedule"):
            if line.startswith("rank "):
                rows.append(parse_row(number, line[5:], len(rows), parse_step))
            else:
                add_header_line(header, number, line)
        name, placement, microbatches, routes, slices = Header.parse(header, len(rows))
        return cls.of_steps(name, placement, microbatches, rows, routes, slices)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form; `from_dict` reads it."""
        return {
            "format": "zerobubble schedule 1",
            "name": self.name,
            "placement": {"name": self.placement.name, "routes": [list(route) for route in self.placement.routes]},
            "microbatches": self.num_microbatches,
            "microbatch_routes": list(self.microbatch_routes),
            **({"slices": self.slices} if self.slices > 1 else {}),
            "rows": [list(map(_step_text, row)) for row in self.steps],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Schedule:
        """Read `data`, as `to_dict` returns it; raises `ParseError` if a part is missing, malformed or does not match the others."""
        with reading("schedule", data):
            routes = tuple(tuple(map(whole, route)) for route in data["placement"]["routes"])
            rows, taken = tuple(tuple(map(parse_step, row)) for row in data["rows"]), tuple(map(whole, data.get("microbatch_routes", ())))
            placement = Placement(str(data["placement"]["name"]), len(rows), routes)
            return cls.of_steps(str(data["name"]), placement, whole(data["microbatches"]), rows, taken, whole(data.get("slices", 1)))


def _cut(row: tuple[Op, ...], pairs: frozenset[tuple[Op, Op]]) -> Iterator[Step]:
    """Yield the steps of a row. If two pairs share a pass, the first one counts."""
    at = 0
    while at < len(row):
        length = 2 if row[at : at + 2] in pairs else 1
        yield row[at : at + length]
        at += length


def _step_text(step: Step) -> str:
    return "&".join(map(str, step))


def parse_row(number: int, rest: str, expected: int, parse: Callable[[str], Cell]) -> tuple[Cell, ...]:
    """Read the row of rank `expected` after the word `rank`; raises `ParseError` naming the line."""
    label, colon, cells = rest.partition(":")
    if not colon or label.strip() != str(expected):
        raise ParseError("line {line}: expected 'rank {rank}: ...', the ranks in order", line=number, rank=expected)
    try:
        return tuple(map(parse, cells.split()))
    except ParseError as error:
        raise ParseError("line {number}: {reason}", number=number, reason=str(error)) from None
