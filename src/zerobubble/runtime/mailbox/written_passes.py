"""The passes of a step as numbers, for ranks that hold a schedule on the same placement with as many microbatches.

Every stage takes its microbatches in the order of their places, so a number for the kind and the stage says which pass it is.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from zerobubble.ir import Op, Schedule
from zerobubble.kinds import KINDS


def write_passes(schedule: Schedule) -> tuple[int, ...]:
    """The rows of `schedule`, one after another, as numbers."""
    kinds = {kind: place for place, kind in enumerate(KINDS)}
    return tuple(kinds[op.kind] * schedule.num_stages + op.stage for row in schedule.rows for op in row)


def read_passes(name: str, played: Schedule, numbers: tuple[int, ...]) -> Schedule:
    """The schedule that was written as `numbers`, on the placement of `played` and with as many microbatches."""
    kinds, home = list(KINDS), played.placement.routes[0]
    rows: list[list[Op]] = [[] for _ in range(played.num_ranks)]
    taken: Counter[int] = Counter()
    for number in numbers:
        kind, stage = divmod(number, played.num_stages)
        rows[home[stage]].append(Op(kinds[kind], stage, taken[number]))
        taken[number] += 1
    return replace(played, name=name, rows=tuple(map(tuple, rows)))
