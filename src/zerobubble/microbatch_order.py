"""The order in which a schedule takes its microbatches, and schedules with other numbers in their places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from zerobubble.errors import InputError
from zerobubble.ir import Kind, Schedule

_REMEDY = (
    "use a schedule with one route, no overlapped passes and the same order in all stages, such as 1f1b, or keep the order of the data"
)


def require_orderable(schedule: Schedule) -> None:
    """Raises `InputError` for a schedule with several routes or with overlapped passes, whose microbatches cannot be reordered."""
    routes = len(schedule.placement.routes)
    if routes > 1:
        raise _not_orderable("has {routes} routes", schedule, routes=routes)
    if schedule.overlaps:
        raise _not_orderable("has overlapped passes", schedule)


def numbers_by_place(schedule: Schedule) -> list[int]:
    """Returns the microbatches in the order in which every stage runs them; raises `InputError` if stages differ.

    R does not count, since it may skip microbatches and recompute others in any order. A place keeps its R for any microbatch in it.
    """
    taken: dict[tuple[Kind, int], list[int]] = {}
    for row in schedule.rows:
        for kind, stage, microbatch in row:
            if kind is not Kind.R:
                taken.setdefault((kind, stage), []).append(microbatch)
    first, *others = taken.items()
    for (kind, stage), numbers in others:
        if numbers != first[1]:
            passes = f"{first[0][0]} of stage {first[0][1]}", f"{kind} of stage {stage}"
            raise _not_orderable("runs {passes[0]} and {passes[1]} in different orders of microbatches", schedule, passes=passes)
    return first[1]


def _not_orderable(reason: str, schedule: Schedule, **fields: Any) -> InputError:
    sentence = f"the microbatches of schedule {{schedule!r}} cannot be reordered, because it {reason}"
    return InputError(sentence, schedule=schedule.name, remedy=_REMEDY, **fields)


def with_numbers(schedule: Schedule, number: Mapping[int, int] | Sequence[int]) -> Schedule:
    """Returns the schedule with `number[j]` in place of each microbatch j."""
    rows = tuple(tuple(op._replace(microbatch=number[op.microbatch]) for op in row) for row in schedule.rows)
    return replace(schedule, rows=rows)
