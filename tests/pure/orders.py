"""Every order of the passes of a small problem."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from zerobubble import Costs, Kind, Op, Placement, Schedule, Timeline, simulate
from zerobubble.errors import ScheduleError


def every_schedule(placement: Placement, microbatches: int) -> Iterator[Schedule]:
    """Every order of the passes F, B and W on every rank in which each microbatch has F before B and B before W of a stage."""
    rows = []
    for rank in range(placement.num_ranks):
        chains = [
            tuple(Op(kind, stage, j) for kind in (Kind.F, Kind.B, Kind.W))
            for _, stage in placement.stages(rank)
            for j in range(microbatches)
        ]
        rows.append(list(interleaved(chains)))
    for chosen in product(*rows):
        yield Schedule("any", placement, microbatches, chosen)


def interleaved(chains: list[tuple[Op, ...]]) -> Iterator[tuple[Op, ...]]:
    """All interleavings of the chains."""
    if not any(chains):
        yield ()
    for place, chain in enumerate(chains):
        if chain:
            yield from ((chain[0], *rest) for rest in interleaved([*chains[:place], chain[1:], *chains[place + 1 :]]))


def played(schedule: Schedule, costs: Costs) -> list[Timeline]:
    try:
        return [simulate(schedule, costs)]
    except ScheduleError:
        return []
