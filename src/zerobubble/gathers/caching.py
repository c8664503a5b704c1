"""The caching problem behind gathers: which weights stay on a rank from step to step, so that the fewest gathers are needed.

The order of the steps is known, so this is offline caching. If all weights have the same size, evicting the stage whose next use is
farthest in the future is optimal, even if the memory changes from step to step (L. A. Belady, A study of replacement algorithms for a
virtual-storage computer, IBM Systems Journal 5, 1966). With several sizes the problem is NP-hard (M. Chrobak, G. Woeginger, K. Makino, H.
Xu, Caching is hard, even in the fault model, Algorithmica 63, 2012). Most ranks hold few stages, so dynamic programming over the sets of
resident stages solves it exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import inf
from typing import NamedTuple

Needs = Sequence[frozenset[int]]
"""For each step of a rank, the stages whose weights it uses."""
Resident = list[frozenset[int]]
"""For each step of a rank, the stages whose weights are resident."""
MOST_STAGES = 9
"""Largest number of stages of different sizes on a rank for which the search is exact. Above it, a heuristic is used."""


class Cached(NamedTuple):
    """The resident stages in each step, the number of gathers, and a lower bound of that number."""

    resident: Resident
    num_gathers: int
    bound: int


def cached(needs: Needs, sizes: Mapping[int, int], memory: Sequence[int]) -> Cached:
    """Return residents with the fewest gathers found, for weights of `sizes` bytes and `memory` bytes in each step.

    The weights that a step needs must fit in its memory. The result is optimal if all sizes are equal or there are at most `MOST_STAGES`
    stages.
    """
    slots = _slots(needs, sizes, memory)
    resident = _belady(needs, slots)
    bound = num_gathers(resident)
    if len(set(sizes.values())) <= 1:
        return Cached(resident, bound, bound)
    if len(sizes) > MOST_STAGES:
        resident = _nearest_stay(needs, sizes, memory)
        return Cached(resident, num_gathers(resident), bound)
    resident = _search(needs, sizes, memory)
    fewest = num_gathers(resident)
    return Cached(resident, fewest, fewest)


def num_gathers(resident: Resident) -> int:
    """Return the number of weights that are resident in a step but not in the step before."""
    return sum(len(now - before) for before, now in pairwise([frozenset[int](), *resident]))


def _slots(needs: Needs, sizes: Mapping[int, int], memory: Sequence[int]) -> list[int]:
    """Return, for each step, the largest number of resident stages: the stages that it needs, and the smallest others.

    If sizes differ, this allows sets that do not fit, so the optimum with these slots is a lower bound.
    """
    counts = []
    for needed, available in zip(needs, memory, strict=True):
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
    """Return, for each step and stage, the next step after it that needs the stage; infinity if none does."""
    coming = dict.fromkeys(stages, inf)
    coming_by_step: list[dict[int, float]] = []
    for step in reversed(range(len(needs))):
        coming_by_step.append(dict(coming))
        coming.update(dict.fromkeys(needs[step], step))
    return coming_by_step[::-1]


def _belady(needs: Needs, slots: Sequence[int]) -> Resident:
    """Return the residents of each step under Belady's rule: evict the stage whose next use is farthest in the future."""
    coming = _next_needs(needs, sorted(frozenset[int]().union(*needs)))
    held: frozenset[int] = frozenset()
    resident = []
    for needed, count, later in zip(needs, slots, coming, strict=True):
        kept = sorted((stage for stage in held - needed if later[stage] < inf), key=later.__getitem__)
        held = needed.union(kept[: max(0, count - len(needed))])
        resident.append(held)
    return resident


def _nearest_stay(needs: Needs, sizes: Mapping[int, int], memory: Sequence[int]) -> Resident:
    """Return residents by a heuristic for several sizes: stages stay in the order of their next uses, as far as they fit."""
    held: frozenset[int] = frozenset()
    resident = []
    for needed, available, later in zip(needs, memory, _next_needs(needs, sorted(sizes)), strict=True):
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
    """A path to a set of resident stages at a step: gathers and bytes so far, and the sets before it, the last one first."""

    gathers: int
    gathered_bytes: int
    path: tuple[frozenset[int], _State | None]

    @property
    def price(self) -> tuple[int, int]:
        return self.gathers, self.gathered_bytes


def _search(needs: Needs, sizes: Mapping[int, int], memory: Sequence[int]) -> Resident:
    """Return optimal residents: the fewest gathers, and among those the fewest bytes."""
    states = [_State(0, 0, (frozenset(), None))]
    coming = _next_needs(needs, sorted(sizes))
    for needed, available, later in zip(needs, memory, coming, strict=True):
        cheapest: dict[frozenset[int], _State] = {}
        for state in states:
            for then in _after(state, needed, sizes, available, later):
                held = then.path[0]
                if held not in cheapest or then.price < cheapest[held].price:
                    cheapest[held] = then
        states = _undominated(sorted(cheapest.values(), key=lambda state: state.price), sizes)
    return _path(states[0])


def _after(state: _State, needed: frozenset[int], sizes: Mapping[int, int], available: int, later: Mapping[int, float]) -> Iterator[_State]:
    """Yield the states after a step. It has the stages it needs, and maximal sets of other residents that a later step needs.

    Keeping less than a maximal set is never better, since keeping a stage costs nothing.
    """
    held = state.path[0]
    new = needed - held
    gathers, gathered = state.gathers + len(new), state.gathered_bytes + sum(sizes[stage] for stage in new)
    others = sorted(stage for stage in held - needed if later[stage] < inf)
    left = available - sum(sizes[stage] for stage in needed)
    for kept in _largest_fitting(others, sizes, left):
        yield _State(gathers, gathered, (needed | kept, state))


def _largest_fitting(stages: Sequence[int], sizes: Mapping[int, int], memory: int) -> Iterator[frozenset[int]]:
    """Yield the maximal sets of `stages` that fit in `memory` bytes."""
    if sum(sizes[stage] for stage in stages) <= memory:
        yield frozenset(stages)
        return
    for chosen, left in _fitting(stages, sizes, memory):
        if all(stage in chosen or sizes[stage] > left for stage in stages):
            yield chosen


def _fitting(stages: Sequence[int], sizes: Mapping[int, int], memory: int) -> Iterator[tuple[frozenset[int], int]]:
    """Yield every set of `stages` that fits in `memory` bytes, with the bytes left."""
    if not stages:
        yield frozenset(), memory
        return
    first, *others = stages
    for chosen, left in _fitting(others, sizes, memory):
        yield chosen, left
        if sizes[first] <= left:
            yield chosen | {first}, left - sizes[first]


def _undominated(states: list[_State], sizes: Mapping[int, int]) -> list[_State]:
    """Return the states without dominated ones; `states` are sorted by price.

    A state is dominated if a cheaper state, after gathering what it lacks, is no more expensive.
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
    """Return the residents of each step on the path to `state`."""
    residents: Resident = []
    held, before = state.path
    while before is not None:
        residents.append(held)
        held, before = before.path
    return residents[::-1]
