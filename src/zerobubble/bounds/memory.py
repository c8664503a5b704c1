"""What a memory limit costs all along: microbatches that wait for room, and the room that all of them need over time."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import product, zip_longest
from math import ceil
from typing import NamedTuple

from zerobubble.bounds.rank_load import RankLoad

MAX_CHOICES = 4
"""Stages whose W is taken as done or as pending, both tried: 2 to the power of so many states at most for each number of stages."""


def memory_wait(load: RankLoad, starts: Sequence[int], visit: int, enough: int) -> int:
    """The least time (ns) from the first F of a visit to the last, given that every F waits for room in memory; 0 if not over `enough`.

    `starts` are the earliest starts of the rank's visits by a microbatch alone. When an F begins, some microbatches before it still wait
    for B of its stage, and each holds what the rank's stages up to it have saved. For room to be left, the oldest of them must have come
    so far (or come so far once it has had all its F) that its own bytes and those of the others fit, and the microbatch before it so far
    that those of all of them fit in addition to its own.
    """
    pace, last, each = load.forward[visit], load.microbatches - 1, load.during(visit)
    if not each:
        return 0
    others, slowest = min(load.limit // each - 1, last), starts[-1] - starts[visit] + load.backwards[-1]
    if _at_most((others, slowest, slowest), pace, last) <= enough:
        return 0
    waits = _waits(load, starts, visit, others)
    if min(_at_most(wait, pace, last) for wait in waits) <= enough:
        return 0
    first = [0] * load.microbatches
    for n in range(1, load.microbatches):
        soonest = min([max(first[n - count] + own, first[n - count - 1] + older) if count < n else own for count, own, older in waits])
        first[n] = max(first[n - 1] + pace, soonest)
    return first[last]


def _at_most(wait: tuple[int, int, int], pace: int, last: int) -> int:
    """An upper bound on the ns until the last of `last` F after the first begins, if each waits like `wait`.

    It is found at once, and where it is not over the threshold, the wait itself need not be worked out.
    """
    count, own, older = wait
    return last * max(pace, ceil(own / max(count, 1)), ceil(older / (count + 1))) + max(own, older)


class BackwardState(NamedTuple):
    """How far a microbatch may have come backward: the stages that wait for B, and the bytes held.

    `passes` has each B that it has had, by its visit, with the ns of that B and of what follows it up to here.
    """

    left: int
    held: int
    passes: tuple[tuple[int, int], ...]

    def time(self, starts: Sequence[int]) -> int:
        """The earliest time (ns) of this state where the visits of the microbatch have these earliest starts; 0 without any B."""
        return max((starts[visit] + passed for visit, passed in self.passes), default=0)


def backward_states(load: RankLoad) -> list[BackwardState]:
    """Every state in which a microbatch may be.

    The passes from any of its B on have run one after the other. W of a stage is done or kept pending; beyond `MAX_CHOICES` stages it is
    taken to cost neither time nor room, so that states stay few.
    """
    states, stages = [BackwardState(load.num_stages, load.held[-1], ())], load.num_stages
    for left in range(stages):
        for kept in product((0, 1), repeat=min(MAX_CHOICES, stages - left)):
            held, passed, passes = load.held[left], 0, []
            for n, keep in zip_longest(range(left, stages), kept):
                held += load.pending[n] * (keep == 1)
                passed += load.backward[n] + load.weight[n] * (keep == 0)
                passes.append((2 * stages - 1 - n, passed))
            states.append(BackwardState(left, held, tuple(passes)))
    return states


def _waits(load: RankLoad, starts: Sequence[int], visit: int, most: int) -> list[tuple[int, int, int]]:
    """For numbers of microbatches that wait for B of a visit's stage: how long after its F the oldest, and the one before, leave room.

    Of numbers with equal waits only the largest counts: it asks for the least. The waits grow where a state no longer fits.
    """
    each = load.during(visit)
    since = [(state.left > visit, state.held, max(0, state.time(starts) - starts[visit])) for state in backward_states(load)]
    early, late = ([(held, time) for waiting, held, time in since if waiting == side] for side in (True, False))
    counts = {most, *((load.limit - held) // each for held, _ in early), *((load.limit - held) // each - 1 for held, _ in late)}
    waits = {}
    for count in sorted(count for count in counts if 0 <= count <= most):
        room = load.limit - count * each
        own = min(time for held, time in early if held <= room)
        waits[own, min(time for held, time in late if held <= room - each)] = count
    return [(count, own, older) for (own, older), count in waits.items()]


def memory_energy(load: RankLoad, starts: Sequence[int]) -> int:
    """The least span (ns) of a rank whose limit holds what all its microbatches hold, over time, for at least as long as one alone.

    Memory cannot be full while the first forwards fill it and while the last weight passes empty it (Little's law, CM section 3).
    """
    if not load.held[-1]:
        return 0
    stays = [starts[2 * load.num_stages - 1 - s] + load.backward[s] - starts[s] for s in range(load.num_stages)]
    saved = sum(held * stay for held, stay in zip(load.saved, stays, strict=True))
    pending = sum(held * weight for held, weight in zip(load.pending, load.weight, strict=True))
    return ceil((load.microbatches * (saved + pending) + unused_room(load)) / load.limit)


def unused_room(load: RankLoad) -> Fraction:
    """The byte ns of room that are not used while the first forwards fill the memory and while the last weight passes empty it."""
    (filling, unfilled), (emptying, emptied) = _filling(load, min(load.forward)), _emptying(load)
    return unfilled + emptied if filling + emptying <= load.work else max(unfilled, emptied)


def _filling(load: RankLoad, pace: int) -> tuple[Fraction, Fraction]:
    """How long memory takes to fill, a stage each `pace` ns, and the room (byte ns) that is not used meanwhile."""
    largest = max(load.saved)
    count = load.limit // largest
    return Fraction(count * pace), Fraction(pace * (count * load.limit - largest * count * (count + 1) // 2))


def _emptying(load: RankLoad) -> tuple[Fraction, Fraction]:
    """How long memory takes to empty, and the room that is not used meanwhile.

    Each stage that holds something needs its W, so this is filling backwards. Where W leaves little to be held, B gives more: bytes
    go no faster than the fastest of the two ways to hold them, but for the pass that is under way.
    """
    by_weight = _filling(load, min(load.weight))
    stages = list(zip(load.backward, load.weight, load.saved, load.pending, strict=True))
    if not all(w if held else b + w for b, w, _, held in stages):
        return by_weight
    rate = max(max(Fraction(saved, b + w), Fraction(held, w or 1)) for b, w, saved, held in stages)
    time = max(Fraction(0), load.limit / rate - max(*load.backward, *load.weight))
    return max(by_weight, (time, time * time * rate / 2), key=lambda state: state[1])
