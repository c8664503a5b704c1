"""Recognition of a schedule: the known schedule that it equals or is closest to, and the first difference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise, zip_longest
from operator import eq

from zerobubble.arguments import takes
from zerobubble.display import Displayed
from zerobubble.errors import InputError
from zerobubble.ir import Op, Schedule
from zerobubble.listing import listing
from zerobubble.schedules import known_schedules, make
from zerobubble.units import show_percent
from zerobubble.verify import lacks_most_passes

__all__ = ["Recognition", "recognize"]

__dir__ = listing(__all__)


@dataclass(frozen=True, slots=True, repr=False)
class Recognition(Displayed):
    """The known schedule that an order equals or is closest to.

    `share` is the fraction of positions with the same pass. `difference` describes the first other position and is empty for an equal
    schedule. `relabeled` is true if microbatches of the known schedule were renumbered for the comparison. `also` names other schedules
    that are equal at this shape. `name` is empty if no known schedule has these ranks, stages and microbatches.
    """

    name: str
    share: float
    difference: str
    relabeled: bool = False
    also: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether the order equals the known schedule."""
        return bool(self.name) and not self.difference

    def _summary(self) -> str:
        return str(self)

    def __str__(self) -> str:
        if not self.name:
            return f"it cannot be compared: {self.difference}"
        numbered = ", with the microbatches numbered in another order" if self.relabeled else ""
        if self.difference:
            equal = f"{show_percent(self.share)} of the positions are equal"
            return f"it is closest to {self.name}{numbered}: {equal}; first difference: {self.difference}"
        return f"it is {self.name}{numbered}" + (f" (at this shape the same as {', '.join(self.also)})" if self.also else "")


@takes(schedule=Schedule)
def recognize(schedule: Schedule) -> Recognition:
    """Return the known schedule with the placement and rows of `schedule`, or the closest of the same shape.

    Schedules that differ only in the numbering of microbatches count as equal.
    """
    if lacks_most_passes(schedule):
        shape = f"{schedule.num_stages} stages and {schedule.num_microbatches} microbatches"
        return Recognition("", 0.0, f"{sum(map(len, schedule.rows))} passes are too few for {shape}")
    compared = [_compared(schedule, name, candidate) for name, candidate in _candidates(schedule)]
    if not compared:
        shape = f"{schedule.num_stages} stages on {schedule.num_ranks} ranks for {schedule.num_microbatches} microbatches"
        return Recognition("", 0.0, f"no known schedule has {shape}")
    first, *others = sorted(compared, key=lambda r: (not r.exact, -r.share, r.relabeled, r.name != schedule.name))
    return replace(first, also=tuple(other.name for other in others if first.exact and other.exact))


def _candidates(schedule: Schedule) -> Iterator[tuple[str, Schedule]]:
    """Yield the known schedules with the same ranks, stages and microbatches."""
    shape = schedule.num_ranks, schedule.num_microbatches, schedule.placement.stages_per_rank
    for name, recipe in known_schedules().items():
        if recipe.allows(*shape):
            try:
                candidate = make(name, *shape)
            except InputError:  # a registered function may refuse a shape that its recipe allows
                continue
            if candidate.num_stages == schedule.num_stages:
                yield name, candidate


def _compared(schedule: Schedule, name: str, candidate: Schedule) -> Recognition:
    numbered = _numbered_like(schedule, candidate)
    share, other = _share(schedule, candidate), _share(schedule, numbered)
    relabeled = other > share
    return Recognition(name, max(share, other), _difference(schedule, name, numbered if relabeled else candidate), relabeled)


def _share(schedule: Schedule, candidate: Schedule) -> float:
    same = sum(sum(map(eq, row, other)) for row, other in zip(schedule.rows, candidate.rows, strict=True))
    return same / max(1, *(sum(map(len, rows)) for rows in (schedule.rows, candidate.rows)))


def _numbered_like(schedule: Schedule, candidate: Schedule) -> Schedule:
    """Return `candidate` with its microbatches renumbered in the order in which the microbatches of `schedule` first appear."""
    now, then = (_appearance(order) for order in (schedule, candidate))
    if now == then:
        return candidate
    new = dict(zip(then, now, strict=False))

    def renamed(op: Op) -> Op:
        return Op(op.kind, op.stage, new[op.microbatch])

    rows = tuple(tuple(map(renamed, row)) for row in candidate.rows)
    routes = dict(zip(map(new.__getitem__, range(candidate.num_microbatches)), candidate.microbatch_routes, strict=False))
    overlaps = frozenset((renamed(first), renamed(second)) for first, second in candidate.overlaps)
    return replace(candidate, rows=rows, microbatch_routes=tuple(routes[j] for j in sorted(routes)), overlaps=overlaps)


def _appearance(schedule: Schedule) -> list[int]:
    """Return the microbatches in the order of their first passes, row after row."""
    seen = dict.fromkeys(op[2] for row in schedule.rows for op in row if op[2] < schedule.num_microbatches)
    return list(seen | dict.fromkeys(range(schedule.num_microbatches)))


def _difference(schedule: Schedule, name: str, candidate: Schedule) -> str:
    """Return the first difference as a clause, "" if there is none. Placement and routes are compared before rows."""
    for homes, others in zip_longest(schedule.placement.routes, candidate.placement.routes, fillvalue=()):
        for stage, (home, other) in enumerate(zip_longest(homes, others, fillvalue=None)):
            if home != other:
                return f"stage {stage} is on {_rank(home)} where {name} has it on {_rank(other)}"
    for j, (route, other) in enumerate(zip_longest(schedule.microbatch_routes, candidate.microbatch_routes, fillvalue=0)):
        if route != other:
            return f"microbatch {j} takes route {route} where {name} sends it on route {other}"
    return _row_difference(schedule, name, candidate) or _step_difference(schedule, name, candidate)


def _rank(rank: int | None) -> str:
    return "no rank" if rank is None else f"rank {rank}"


def _row_difference(schedule: Schedule, name: str, candidate: Schedule) -> str:
    for position, columns in enumerate(zip(_columns(schedule), _columns(candidate), strict=False)):
        for rank, (op, other) in enumerate(zip(*columns, strict=True)):
            if op != other:
                mine = "ends" if op is None else f"runs {op}"
                theirs = f"{name}'s row ends" if other is None else f"{name} runs {other}"
                return f"rank {rank}, position {position}: {mine} where {theirs}"
    return ""


def _columns(schedule: Schedule) -> Iterator[tuple[Op | None, ...]]:
    """Yield the passes of all ranks at each position; the last column, past every row, is empty."""
    yield from zip_longest(*schedule.rows)
    yield (None,) * schedule.num_ranks


def _step_difference(schedule: Schedule, name: str, candidate: Schedule) -> str:
    for rank, row in enumerate(schedule.rows):
        for position, pair in enumerate(pairwise(row)):
            if (pair in schedule.overlaps) != (pair in candidate.overlaps):
                ways = "overlapped", "one after the other"
                mine, theirs = ways if pair in schedule.overlaps else ways[::-1]
                return f"rank {rank}, position {position}: runs {pair[0]} and {pair[1]} {mine} where {name} runs them {theirs}"
    return ""
