"""When a rank gathers the weights of each of its stages, and lets them go: for weights that lie in shards on ranks with other data.

A pass can run while its stage's weights are there, and while they are there they take memory. What is planned is the fewest gathers, each
as early as the memory allows, so that it is over when the weights are needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from zerobubble.arguments import WHOLE, each, either, optional, require_amount, takes
from zerobubble.costs import Costs
from zerobubble.display import Displayed
from zerobubble.errors import InputError
from zerobubble.gathers.caching import cached
from zerobubble.ir import Schedule, Step
from zerobubble.kinds import traits_of
from zerobubble.rules import recomputed
from zerobubble.units import counted, show_bytes


class Gather(NamedTuple):
    """The weights of `stage`, gathered once: steps count from 0 in the rank's row.

    The gather may start before step `begins`, the first step that computes with the weights is `needed`, and they are let go after `ends`.
    """

    stage: int
    begins: int
    needed: int
    ends: int


@dataclass(frozen=True, slots=True, repr=False)
class RankGathers(Displayed):
    """What one rank gathers, in the order in which gathers begin. No plan has fewer than `bound`; `peak_bytes` are there at most."""

    gathers: tuple[Gather, ...]
    bound: int
    peak_bytes: int

    @property
    def is_proven(self) -> bool:
        """Whether no plan has fewer gathers."""
        return len(self.gathers) == self.bound

    def _summary(self) -> str:
        return f"{counted(len(self.gathers), 'gather')}, at least {self.bound}, {show_bytes(self.peak_bytes)} at most"

    def _details(self) -> Iterator[str]:
        for stage, begins, needed, ends in self.gathers:
            yield f"stage {stage}: gathered from step {begins}, needed in {needed}, let go after {ends}"


@takes(
    schedule=Schedule,
    weights=each(WHOLE),
    memory=optional(either(WHOLE, each(WHOLE))),
    costs=optional(Costs),
)
def plan_gathers(
    schedule: Schedule, weights: Sequence[int], memory: int | Sequence[int] | None = None, costs: Costs | None = None
) -> tuple[RankGathers, ...]:
    """For each rank, the fewest gathers with which `schedule` can be played, and when they begin and end.

    The number is proven where the stages of a rank are of one size, or at most nine; `RankGathers.bound` says it. Of plans with as few
    gathers one that gathers the fewest bytes is chosen. F, B and BW compute with weights; W does not.

    Arguments:
        schedule: the order to play.
        weights: the bytes of each stage's weights when they are gathered.
        memory: the bytes that a rank has for gathered weights, or a number for each rank; None where each stage may stay.
        costs: with them, activations take their part of `memory`, too, and weights have what is left at each step.

    Raises `InputError` where the weights of a step do not fit.

    >>> import zerobubble as zb
    >>> schedule = zb.make("zb-v", 2, 4)
    >>> [len(rank.gathers) for rank in zb.lowering.plan_gathers(schedule, [6] * 4)]
    [2, 2]
    >>> [len(rank.gathers) for rank in zb.lowering.plan_gathers(schedule, [6] * 4, memory=6)]
    [7, 11]
    """
    if len(weights) != schedule.num_stages:
        raise InputError(f"schedule {schedule.name!r} has {schedule.num_stages} stages, weights are given for {len(weights)}")
    for stage, size in enumerate(weights):
        require_amount(f"the weights of stage {stage}", size)
    limits = [memory] * schedule.num_ranks if memory is None or isinstance(memory, int) else list(memory)
    if len(limits) != schedule.num_ranks:
        raise InputError(f"schedule {schedule.name!r} has {schedule.num_ranks} ranks, memory is given for {len(limits)}")
    if costs is not None:
        costs.require_schedule(schedule)
    sizes = dict(enumerate(weights))
    return tuple(
        gathers_of(steps, sizes, _room(steps, limit, costs, sizes), f"rank {rank}")
        for rank, (steps, limit) in enumerate(zip(schedule.steps, limits, strict=True))
    )


def gathers_of(steps: Sequence[Step], weights: Mapping[int, int], room: Sequence[int], where: str) -> RankGathers:
    """The gathers of a rank that plays `steps`, where `weights` have the bytes of each of its stages, and `room` those free at each step.

    Raises `InputError`, which begins with `where`, where the weights of a step do not fit.
    """
    needs = [frozenset(op.stage for op in step if traits_of(op.kind).uses_weights and op.stage in weights) for step in steps]
    sizes = {stage: weights[stage] for stage in sorted(frozenset[int]().union(*needs))}
    for step, needed, available in zip(steps, needs, room, strict=True):
        size = sum(sizes[stage] for stage in needed)
        if size > available:
            what = "&".join(map(str, step))
            raise InputError(
                f"{where} has {max(0, available)} bytes for gathered weights in {what}, whose weights take {size}: "
                "give more memory, or cut the model into more stages"
            )
    resident, _, bound = cached(needs, sizes, room)
    held = [0] * len(steps)
    stays = _stays(needs, resident)
    for stage, first, last in stays:
        for at in range(first, last + 1):
            held[at] += sizes[stage]
    gathers = sorted(_early(stays, sizes, held, room), key=lambda gather: (gather.begins, gather.needed))
    return RankGathers(tuple(gathers), bound, max(held, default=0))


def _room(steps: Sequence[Step], limit: int | None, costs: Costs | None, sizes: Mapping[int, int]) -> list[int]:
    """The bytes for weights at each step."""
    if limit is None:
        return [sum(sizes.values())] * len(steps)
    if costs is None:
        return [limit] * len(steps)
    recomputed_by = recomputed(op for step in steps for op in step)
    changes = (sum(costs.memory_change(*op[:2], recomputed_by.get(op[1:]), op.microbatch) for op in step) for step in steps)
    after = list(accumulate(changes))
    return [limit - max(before, now) for before, now in zip([0, *after], after, strict=False)]


def _stays(needs: Sequence[frozenset[int]], resident: Sequence[frozenset[int]]) -> list[tuple[int, int, int]]:
    """Each stay of a stage's weights as (stage, the step that needs them first, the step that needs them last), by the first."""
    open_stays: dict[int, tuple[int, int]] = {}
    found = []
    for step, (needed, there) in enumerate(zip(needs, resident, strict=True)):
        for stage in open_stays.keys() - there:
            found.append((stage, *open_stays.pop(stage)))
        for stage in needed:
            first, _ = open_stays.get(stage, (step, step))
            open_stays[stage] = first, step
    found += [(stage, *stay) for stage, stay in open_stays.items()]
    return sorted(found, key=lambda stay: stay[1:])


def _early(stays: Sequence[tuple[int, int, int]], sizes: Mapping[int, int], held: list[int], room: Sequence[int]) -> Iterator[Gather]:
    """The stays with their beginnings as early as the memory allows, those that are needed first before others; `held` counts them in."""
    free_from: dict[int, int] = {}
    for stage, needed, ends in stays:
        begins = needed
        while begins > free_from.get(stage, 0) and held[begins - 1] + sizes[stage] <= room[begins - 1]:
            begins -= 1
            held[begins] += sizes[stage]
        free_from[stage] = ends + 1
        yield Gather(stage, begins, needed, ends)
