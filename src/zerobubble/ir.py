"""The score: passes, where stages live, and the order in which each rank plays them.

A `Schedule` holds order only. Time is a `Timeline`, messages are a `Program`, idle time is nobody's object.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple

from zerobubble.errors import InputError, ParseError


class Kind(StrEnum):
    """What a pass computes: F forward, B gradient for the input, W gradient for the weights, BW both in one."""

    F = "F"
    B = "B"
    W = "W"
    BW = "BW"


_OP = re.compile(r"(\d+)(F|BW|B|W)(\d+)")


class Op(NamedTuple):
    """One pass: `kind` of `stage` for `microbatch` (both 0-based). Text form: `2BW5`."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Op:
        """Read `<stage><kind><microbatch>`; raises `ParseError` for anything else."""
        match = _OP.fullmatch(text)
        if match is None:
            raise ParseError(f"{text!r} is not a pass; write <stage><kind><microbatch> with kind F, B, W or BW, such as 0F3")
        return cls(Kind(match[2]), int(match[1]), int(match[3]))


@dataclass(frozen=True, slots=True)
class Placement:
    """Which rank holds which stage.

    `routes[k][s]` is the rank that runs stage `s` for microbatches of route `k`. One route is the usual case; bidirectional
    schedules (Chimera, DualPipe) have two, each a full copy of the model. `name` is `linear`, `looped`, `vee` or `custom`.
    """

    name: str
    num_ranks: int
    routes: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise InputError(f"a pipeline needs at least 1 rank, got {self.num_ranks}")
        if not self.routes or not self.routes[0]:
            raise InputError("a placement needs at least one route with at least one stage")
        lengths = {len(route) for route in self.routes}
        if len(lengths) > 1:
            raise InputError(f"every route must hold the same stages, got routes of {sorted(lengths)} stages")
        used = {rank for route in self.routes for rank in route}
        if not used <= set(range(self.num_ranks)):
            raise InputError(f"a placement over {self.num_ranks} ranks names ranks {sorted(used - set(range(self.num_ranks)))}")
        if len(used) < self.num_ranks:
            raise InputError(f"ranks {sorted(set(range(self.num_ranks)) - used)} hold no stage; use fewer ranks or more stages")

    @property
    def num_stages(self) -> int:
        return len(self.routes[0])

    @property
    def stages_per_rank(self) -> int:
        """Stages on the fullest rank, copies on different routes counted apart."""
        return max(len(self.stages(rank)) for rank in range(self.num_ranks))

    def stages(self, rank: int) -> tuple[tuple[int, int], ...]:
        """The (route, stage) pairs that live on `rank`."""
        return tuple((k, s) for k, route in enumerate(self.routes) for s, r in enumerate(route) if r == rank)

    @classmethod
    def linear(cls, num_ranks: int) -> Placement:
        """Stage s on rank s."""
        return cls("linear", num_ranks, (tuple(range(num_ranks)),))

    @classmethod
    def looped(cls, num_ranks: int, stages_per_rank: int) -> Placement:
        """Stage c*p + r on rank r: round and round."""
        return cls("looped", num_ranks, (tuple(range(num_ranks)) * stages_per_rank,))

    @classmethod
    def vee(cls, num_ranks: int) -> Placement:
        """Stages r and 2p-1-r on rank r: down and back, so the loss is on the first rank."""
        there = tuple(range(num_ranks))
        return cls("vee", num_ranks, (there + there[::-1],))

    @classmethod
    def custom(cls, *routes: Iterable[int]) -> Placement:
        """Ranks of the stages, one sequence per route."""
        as_tuples = tuple(tuple(route) for route in routes)
        ranks = [rank for route in as_tuples for rank in route]
        if not ranks:
            raise InputError("a custom placement needs at least one stage")
        return cls("custom", max(ranks) + 1, as_tuples)


@dataclass(frozen=True)
class Schedule:
    """The order of passes on every rank: `rows[rank]` is what that rank runs, first to last.

    `microbatch_routes[j]` names the route microbatch `j` takes through the placement; empty means route 0 for all.
    Legality is not checked here (a faulty schedule must be a value to be explained): see `verify.schedule_faults`.
    """

    name: str
    placement: Placement
    num_microbatches: int
    rows: tuple[tuple[Op, ...], ...]
    microbatch_routes: tuple[int, ...] = field(default=())

    def __post_init__(self) -> None:
        if self.num_microbatches < 1:
            raise InputError(f"a schedule needs at least 1 microbatch, got {self.num_microbatches}")
        if len(self.rows) != self.num_ranks:
            raise InputError(f"{self.num_ranks} ranks need {self.num_ranks} rows, got {len(self.rows)}")
        routes = self.microbatch_routes
        if routes and len(routes) != self.num_microbatches:
            raise InputError(f"{self.num_microbatches} microbatches need as many routes, got {len(routes)}")
        if any(not 0 <= route < len(self.placement.routes) for route in routes):
            raise InputError(f"microbatch routes must be below {len(self.placement.routes)}, got {routes}")

    @property
    def num_ranks(self) -> int:
        return self.placement.num_ranks

    @property
    def num_stages(self) -> int:
        return self.placement.num_stages

    @property
    def is_forward_only(self) -> bool:
        """True for an inference schedule: it holds F passes and nothing else."""
        return all(op.kind is Kind.F for row in self.rows for op in row)

    def rank_of(self, stage: int, microbatch: int) -> int:
        """The rank that runs `stage` for `microbatch`."""
        route = self.microbatch_routes[microbatch] if self.microbatch_routes else 0
        return self.placement.routes[route][stage]

    @cached_property
    def split_stages(self) -> frozenset[int]:
        """Stages with at least one W pass of their own."""
        return frozenset(op.stage for row in self.rows for op in row if op.kind is Kind.W)

    def forward_only(self) -> Schedule:
        """The F passes alone, in the same order: what evaluation runs."""
        rows = tuple(tuple(op for op in row if op.kind is Kind.F) for row in self.rows)
        return Schedule(f"{self.name} (forward only)", self.placement, self.num_microbatches, rows, self.microbatch_routes)

    def ops(self) -> Iterator[tuple[int, int, Op]]:
        """Every pass as (rank, position, op)."""
        for rank, row in enumerate(self.rows):
            for position, op in enumerate(row):
                yield rank, position, op

    def to_text(self) -> str:
        """The text form: a header, then one line per rank. `Schedule.from_text` reads it back."""
        routes = " | ".join(" ".join(map(str, route)) for route in self.placement.routes)
        lines = ["zerobubble schedule 1", f"name {self.name}", f"placement {self.placement.name}: {routes}"]
        lines.append(f"microbatches {self.num_microbatches}")
        if self.microbatch_routes:
            lines.append("routes " + " ".join(map(str, self.microbatch_routes)))
        lines += [f"rank {rank}: " + " ".join(map(str, row)) for rank, row in enumerate(self.rows)]
        return "\n".join(line.rstrip() for line in lines) + "\n"

    @classmethod
    def from_text(cls, text: str) -> Schedule:
        """Read the text form; raises `ParseError` naming the line."""
        return _parse_schedule(text)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form; `from_dict` reads it back."""
        return {
            "format": "zerobubble schedule 1",
            "name": self.name,
            "placement": {"name": self.placement.name, "routes": [list(route) for route in self.placement.routes]},
            "microbatches": self.num_microbatches,
            "microbatch_routes": list(self.microbatch_routes),
            "rows": [[str(op) for op in row] for row in self.rows],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Schedule:
        """Read the JSON form; raises `ParseError` when a part is missing or malformed."""
        try:
            routes = tuple(tuple(int(r) for r in route) for route in data["placement"]["routes"])
            rows = tuple(tuple(Op.parse(cell) for cell in row) for row in data["rows"])
            placement = Placement(str(data["placement"]["name"]), len(rows), routes)
            taken = tuple(int(k) for k in data.get("microbatch_routes", ()))
            return cls(str(data["name"]), placement, int(data["microbatches"]), rows, taken)
        except (KeyError, TypeError) as error:
            raise ParseError(f"not a schedule in JSON form: {error!r} is missing or of the wrong type") from error


def _parse_schedule(text: str) -> Schedule:
    head: dict[str, str] = {}
    rows: list[tuple[Op, ...]] = []
    lines = [(n, line.split("#")[0].strip()) for n, line in enumerate(text.splitlines(), 1)]
    lines = [(n, line) for n, line in lines if line]
    if not lines or lines[0][1] != "zerobubble schedule 1":
        raise ParseError("line 1: a schedule file starts with 'zerobubble schedule 1'")
    for number, line in lines[1:]:
        key, _, rest = line.partition(" ")
        if key == "rank":
            rows.append(_parse_row(number, rest, len(rows)))
        elif key in ("name", "placement", "microbatches", "routes") and key not in head:
            head[key] = rest.strip()
        else:
            raise ParseError(f"line {number}: {line!r} is neither a header (name, placement, microbatches, routes, once each) nor a row")
    for key in ("placement", "microbatches"):
        if key not in head:
            raise ParseError(f"the header line {key!r} is missing")
    name, _, routes = head["placement"].partition(":")
    try:
        parsed = tuple(tuple(map(int, route.split())) for route in routes.split("|"))
        microbatches = int(head["microbatches"])
        taken = tuple(map(int, head.get("routes", "").split()))
    except ValueError as error:
        raise ParseError(f"the header holds something that is not a number: {error}") from error
    return Schedule(head.get("name", "unnamed"), Placement(name, len(rows), parsed), microbatches, tuple(rows), taken)


def _parse_row(number: int, rest: str, expected: int) -> tuple[Op, ...]:
    label, colon, cells = rest.partition(":")
    if not colon or label.strip() != str(expected):
        raise ParseError(f"line {number}: expected 'rank {expected}: ...', the ranks in order")
    try:
        return tuple(Op.parse(cell) for cell in cells.split())
    except ParseError as error:
        raise ParseError(f"line {number}: {error}") from None
