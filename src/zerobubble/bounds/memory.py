"""Bounds from a memory limit over time: the waits of forwards for memory, and the byte-time that all microbatches need.

`memory_wait` bounds the time between the first and the last F of a visit. An F needs memory, which only backward passes of earlier
microbatches free; their earliest times give a recurrence over microbatches. `memory_energy` is Little's law: bytes times the ns for which
they are held cannot exceed the limit times the span.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import product, zip_longest
from math import ceil
from typing import NamedTuple

from zerobubble.bounds.rank_load import RankLoad

MAX_CHOICES = 4
"""The number of stages whose W is tried both as done and as pending: each number of stages has at most 2 to this power of states."""


def memory_wait(load: RankLoad, starts: Sequence[int], visit: int, enough: int) -> int:
    """The least ns from the first F of a visit to the last, if every F waits for memory; 0 if that is not above `enough`.

    `starts` are the earliest starts of the rank's visits for a microbatch alone. When an F begins, some microbatches before it still wait
    for B of its stage, and each holds what the rank's stages up to it have saved. For the F to fit, the oldest of them must have progressed
    (at once, or after all its F) until its bytes and those of the others fit. The microbatch before the oldest must have progressed until
    its bytes fit in addition to theirs.
    """
    pace, last, held = load.forward[visit], load.microbatches - 1, load.held_during(visit)
    if not held:
        return 0
    others, slowest = min(load.limit // held - 1, last), starts[-1] - starts[visit] + load.backwards[-1]
    if wait_at_most((others, slowest, slowest), pace, last) <= enough:
        return 0
    waits = _waits(load, starts, visit, others)
    if min(wait_at_most(wait, pace, last) for wait in waits) <= enough:
        return 0
    first = [0] * load.microbatches
    for n in range(1, load.microbatches):
        soonest = min(
            [max(first[n - count] + oldest, first[n - count - 1] + older) if count < n else oldest for count, oldest, older in waits]
        )
        first[n] = max(first[n - 1] + pace, soonest)
    return first[last]


def wait_at_most(wait: tuple[int, int, int], pace: int, last: int) -> int:
    """An upper bound on the ns from the first of `last` F to the last, if each waits like `wait`.

    It is cheap: if it is not above the threshold, the wait itself need not be computed.
    """
    count, oldest, older = wait
    return last * max(pace, ceil(oldest / max(count, 1)), ceil(older / (count + 1))) + max(oldest, older)


class BackwardState(NamedTuple):
    """The progress of a microbatch in its backward: the stages that wait for B, and the bytes held.

    `passes` has each B done so far, by its visit, with the ns of that B and of all that follows it up to this state.
    """

    left: int
    held: int
    passes: tuple[tuple[int, int], ...]

    def time(self, starts: Sequence[int]) -> int:
        """The earliest time (ns) of this state, given the earliest starts of the microbatch's visits; 0 before any B."""
        return max((starts[visit] + passed for visit, passed in self.passes), default=0)


@lru_cache(maxsize=64)  # the ranks of a pipeline often have equal loads
def backward_states(load: RankLoad) -> tuple[BackwardState, ...]:
    """Every state that a microbatch may be in.

    After each of its B, its further passes have run one after another. W of a stage is done or pending; beyond `MAX_CHOICES` stages it
    counts neither time nor bytes, which keeps the number of states small.
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
    return tuple(states)


def _waits(load: RankLoad, starts: Sequence[int], visit: int, most: int) -> list[tuple[int, int, int]]:
    """For each number of microbatches that wait for B of a visit's stage: the ns from its F until the oldest of them, and the one before
    it, free memory. If several numbers have equal waits, only the largest counts, because it requires the least. The waits grow when a
    state no longer fits.
    """
    held_each = load.held_during(visit)
    since = [(state.left > visit, state.held, max(0, state.time(starts) - starts[visit])) for state in backward_states(load)]
    early, late = ([(held, time) for waiting, held, time in since if waiting == side] for side in (True, False))
    counts = {most, *((load.limit - held) // held_each for held, _ in early), *((load.limit - held) // held_each - 1 for held, _ in late)}
    waits = {}
    for count in sorted(count for count in counts if 0 <= count <= most):
        headroom = load.limit - count * held_each
        oldest = min(time for held, time in early if held <= headroom)
        waits[oldest, min(time for held, time in late if held <= headroom - held_each)] = count
    return [(count, oldest, older) for (oldest, older), count in waits.items()]


def memory_energy(load: RankLoad, starts: Sequence[int]) -> int:
    """The least span (ns) of a rank whose limit holds the bytes of all its microbatches, each for at least as long as if it were alone.

    Memory cannot be full while the first forwards fill it and while the last weight passes empty it (Little's law, CM section 3).
    """
    if not load.held[-1]:
        return 0
    stays = [starts[2 * load.num_stages - 1 - s] + load.backward[s] - starts[s] for s in range(load.num_stages)]
    saved = sum(held * stay for held, stay in zip(load.saved, stays, strict=True))
    pending = sum(held * weight for held, weight in zip(load.pending, load.weight, strict=True))
    return ceil((load.microbatches * (saved + pending) + unused_memory(load)) / load.limit)


def unused_memory(load: RankLoad) -> Fraction:
    """The byte-ns of memory that are unused while the first forwards fill it and while the last weight passes empty it."""
    (filling, unfilled), (emptying, emptied) = _filling(load, min(load.forward)), _emptying(load)
    return unfilled + emptied if filling + emptying <= load.work else max(unfilled, emptied)


def _filling(load: RankLoad, pace: int) -> tuple[Fraction, Fraction]:
    """Returns the ns in which memory fills, one stage every `pace` ns, and the byte-ns unused during that time."""
    largest = max(load.saved)
    count = load.limit // largest
    return Fraction(count * pace), Fraction(pace * (count * load.limit - largest * count * (count + 1) // 2))


def _emptying(load: RankLoad) -> tuple[Fraction, Fraction]:
    """Returns the ns in which memory empties, and the byte-ns unused during that time.

    Each stage that holds bytes needs its W, so this is filling in reverse. If W frees little, B frees more: bytes are freed no faster than
    at the higher of the two rates, except for the pass that is running.
    """
    by_weight = _filling(load, min(load.weight))
    stages = list(zip(load.backward, load.weight, load.saved, load.pending, strict=True))
    if not all(w if held else b + w for b, w, _, held in stages):
        return by_weight
    rate = max(max(Fraction(saved, b + w), Fraction(held, w or 1)) for b, w, saved, held in stages)
    time = max(Fraction(0), load.limit / rate - max(*load.backward, *load.weight))
    return max(by_weight, (time, time * time * rate / 2), key=lambda state: state[1])
