"""Which stages' weights stay on a rank from step to step, so that the fewest have to be gathered again: a problem of caching.

The order of the steps is known, so this is caching offline. Where all weights are of one size, it is optimal to give up the stage that is
needed again last (L. A. Belady, A study of replacement algorithms for a virtual-storage computer, IBM Systems Journal 5, 1966), however the
room changes from step to step. With several sizes the problem is NP-hard (M. Chrobak, G. Woeginger, K. Makino, H. Xu, Caching is hard, even
in the fault model, Algorithmica 63, 2012); most ranks hold few stages, of which all sets are tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import inf
from typing import NamedTuple

Needs = Sequence[frozenset[int]]
"""For each step of a rank, the stages whose weights it computes with."""
Resident = list[frozenset[int]]
"""For each step of a rank, the stages whose weights are there."""
MOST_STAGES = 9
"""Up to so many stages of several sizes on a rank, every set of them is tried at each step."""


class Cached(NamedTuple):
    """The stages whose weights are there in each step, how many gathers that takes, and a number of them that nothing can beat."""

    resident: Resident
    num_gathers: int
    bound: int


def cached(needs: Needs, sizes: Mapping[int, int], room: Sequence[int]) -> Cached:
    """The fewest gathers for weights of these `sizes` in bytes with this `room` in bytes at each step.

    What a step needs must fit into its room. The bound is met where the sizes are equal or the stages not more than `MOST_STAGES`.
    """
    slots = _slots(needs, sizes, room)
    resident = _needed_last_goes(needs, slots)
    bound = num_gathers(resident)
    if len(set(sizes.values())) <= 1:
        return Cached(resident, bound, bound)
    if len(sizes) > MOST_STAGES:
        resident = _nearest_stay(needs, sizes, room)
        return Cached(resident, num_gathers(resident), bound)
    resident = _search(needs, sizes, room)
    found = num_gathers(resident)
    return Cached(resident, found, found)


def num_gathers(resident: Resident) -> int:
    """How many weights come that were not there in the step before."""
    return sum(len(now - before) for before, now in pairwise([frozenset[int](), *resident]))


def _slots(needs: Needs, sizes: Mapping[int, int], room: Sequence[int]) -> list[int]:
    """For each step, the most stages that can be there at once: those it needs, and the smallest others.

    Where sizes differ this allows sets that do not fit, so what is optimal with it is a lower bound.
    """
    counts = []
    for needed, available in zip(needs, room, strict=True):
        left = available - sum(sizes[stage] for stage in needed)
        count = len(needed)
        for size in sorted(size for stage, size in sizes.items() if stage not in needed):
            left -= size
            if left < 0:
                break
            count += 1
        counts.append(count)
    return counts


def _next_needs(needs: Needs, stages: Sequence[int]) -> list[dict[int, float]]:
    """For each step and stage, the next step after it that needs the stage; infinite where none does."""
    coming = dict.fromkeys(stages, inf)
    found: list[dict[int, float]] = []
    for step in reversed(range(len(needs))):
        found.append(dict(coming))
        coming.update(dict.fromkeys(needs[step], step))
    return found[::-1]


def _needed_last_goes(needs: Needs, slots: Sequence[int]) -> Resident:
    """What is there in each step when the stage that is needed again last is given up where there are more than the slots."""
    coming = _next_needs(needs, sorted(frozenset[int]().union(*needs)))
    held: frozenset[int] = frozenset()
    resident = []
    for needed, count, later in zip(needs, slots, coming, strict=True):
        kept = sorted((stage for stage in held - needed if later[stage] < inf), key=later.__getitem__)
        held = needed.union(kept[: max(0, count - len(needed))])
        resident.append(held)
    return resident


def _nearest_stay(needs: Needs, sizes: Mapping[int, int], room: Sequence[int]) -> Resident:
    """What is there in each step when stages stay in the order of their next needs, as far as they fit: not always the best."""
    held: frozenset[int] = frozenset()
    resident = []
    for needed, available, later in zip(needs, room, _next_needs(needs, sorted(sizes)), strict=True):
        left = available - sum(sizes[stage] for stage in needed)
        kept = set(needed)
        for stage in sorted((stage for stage in held - needed if later[stage] < inf), key=later.__getitem__):
            if sizes[stage] <= left:
                kept.add(stage)
                left -= sizes[stage]
        held = frozenset(kept)
        resident.append(held)
    return resident


class _State(NamedTuple):
    """A way to get to a set of stages at a step: gathers and bytes gathered so far, and the sets before it, the last one first."""

    gathers: int
    gathered_bytes: int
    path: tuple[frozenset[int], _State | None]

    @property
    def price(self) -> tuple[int, int]:
        return self.gathers, self.gathered_bytes


def _search(needs: Needs, sizes: Mapping[int, int], room: Sequence[int]) -> Resident:
    """What is there in each step of a best way, of those the one that gathers the fewest bytes."""
    states = [_State(0, 0, (frozenset(), None))]
    coming = _next_needs(needs, sorted(sizes))
    for needed, available, later in zip(needs, room, coming, strict=True):
        found: dict[frozenset[int], _State] = {}
        for state in states:
            for then in _after(state, needed, sizes, available, later):
                held = then.path[0]
                if held not in found or then.price < found[held].price:
                    found[held] = then
        states = _undominated(sorted(found.values(), key=lambda state: state.price), sizes)
    return _path(states[0])


def _after(state: _State, needed: frozenset[int], sizes: Mapping[int, int], available: int, later: Mapping[int, float]) -> Iterator[_State]:
    """The states after a step: what it needs, and as much of what was there, and is needed again, as fits."""
    held = state.path[0]
    new = needed - held
    gathers, gathered = state.gathers + len(new), state.gathered_bytes + sum(sizes[stage] for stage in new)
    others = sorted(stage for stage in held - needed if later[stage] < inf)
    left = available - sum(sizes[stage] for stage in needed)
    for kept in _largest_fitting(others, sizes, left):
        yield _State(gathers, gathered, (needed | kept, state))


def _largest_fitting(stages: Sequence[int], sizes: Mapping[int, int], room: int) -> Iterator[frozenset[int]]:
    """The sets of `stages` that fit into the room, without those to which another stage could be added."""
    if sum(sizes[stage] for stage in stages) <= room:
        yield frozenset(stages)
        return
    for chosen, left in _fitting(stages, sizes, room):
        if all(stage in chosen or sizes[stage] > left for stage in stages):
            yield chosen


def _fitting(stages: Sequence[int], sizes: Mapping[int, int], room: int) -> Iterator[tuple[frozenset[int], int]]:
    """Every set of `stages` that fits into the room, with what it leaves of it."""
    if not stages:
        yield frozenset(), room
        return
    first, *others = stages
    for chosen, left in _fitting(others, sizes, room):
        yield chosen, left
        if sizes[first] <= left:
            yield chosen | {first}, left - sizes[first]


def _undominated(states: list[_State], sizes: Mapping[int, int]) -> list[_State]:
    """The states, which come by price, but for those that another one beats whatever comes.

    One with the same stages or more at the same price or less does, and so does one that could gather what it lacks for less.
    """
    kept: list[_State] = []
    for state in states:
        held = state.path[0]
        for other in kept:
            lacking = held - other.path[0]
            price = other.gathers + len(lacking), other.gathered_bytes + sum(sizes[stage] for stage in lacking)
            if price <= state.price:
                break
        else:
            kept.append(state)
    return kept


def _path(state: _State) -> Resident:
    """What was there in each step on the way to `state`."""
    found: Resident = []
    held, before = state.path
    while before is not None:
        found.append(held)
        held, before = before.path
    return found[::-1]
