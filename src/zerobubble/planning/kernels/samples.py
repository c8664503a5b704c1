"""The axis of noise: values of passes and ranks exist once for measured times, or once per sample of noisy times.

The player and the annealer are written once. Their operations on times go through the functions of this file, which check the number of
axes of the array `end` or `idle`:

- One axis: measured times. Clocks are whole ns and plain numbers, which the compiler keeps in registers.
- Two axes: samples in columns, in floating-point ns. Column 0 has the measured times, the others noisy ones. Dependencies are the same in
  every sample, so one pass over the rows plays them all.

The compiler knows the number of axes and drops the other branch, so measured times have no overhead: `sampled` and `clocks` are empty
tuples there. Names that both cases share have the type `Any`: a number in one, an array in the other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zerobubble.planning.kernels.compiled import inlined
from zerobubble.planning.kernels.tables import Floats, Ints, Tables

Times = NDArray[Any]
"""Times in ns: integers along one axis, or floats with a second axis for the samples."""


class SampledTimes(NamedTuple):
    """Noisy times in ns, a column per sample; column 0 has the measured times."""

    duration: Floats
    """The time of each pass: code c for microbatch j at `c * microbatches + j`."""
    work: Floats
    """The total time of all passes of a rank."""


class Clocks(NamedTuple):
    """Scratch space for the clocks of a play, in ns: one value or column per sample."""

    free: Floats
    """The time when the current rank is free."""
    idle: Floats
    """The idle time of the current rank."""
    longest: Floats
    """The time of the longest rank so far."""
    length: Floats
    """The time of each rank so far."""


def new_clocks(ranks: int, samples: int) -> Clocks:
    """Returns clocks for `ranks` ranks and `samples` samples."""
    return Clocks(np.zeros(samples), np.zeros(samples), np.zeros(samples), np.zeros((ranks, samples)))


@inlined
def draw_sample(values: Times) -> int:
    """Returns the index of a random noisy sample. With measured times only, returns 0 without drawing."""
    if values.ndim == 1:
        return 0
    return np.random.randint(1, values.shape[1])


@inlined
def in_sample(values: Times, at: int, sample: int) -> Any:
    """Returns the value at a position in one sample; sample 0 has the measured times."""
    if values.ndim == 1:
        return values[at]
    return values[at, sample]


@inlined
def copy_times(into_end: Times, into_idle: Times, end: Times, idle: Times, start: int, stop: int) -> None:
    """Copies both times of the positions from `start` to `stop` in one loop, because most ranges are too short for two."""
    if end.ndim == 1:
        for at in range(start, stop):
            into_end[at] = end[at]
            into_idle[at] = idle[at]
    else:
        for at in range(start, stop):
            for s in range(end.shape[1]):
                into_end[at, s] = end[at, s]
                into_idle[at, s] = idle[at, s]


@inlined
def known_times(tables: Tables, head: Ints, idle: Times, sampled: Any, clocks: Any, share: float) -> Any:
    """Returns the time of the longest rank and the sum over ranks, for rows played up to their heads.

    Both are lower bounds on the complete play.

    With samples, fills in the clocks and returns those of the longest rank and the sum of the costs over the noisy samples.
    """
    if idle.ndim == 1:
        most, total = 0, 0
        for r in range(len(tables.ranks)):
            time = tables.ranks[r].work
            if head[r] > tables.ranks[r].first:
                time += idle[head[r] - 1]
            total += time
            most = max(most, time)
        return most, total
    longest, length, costs = clocks.longest, clocks.length, 0.0
    for s in range(len(longest)):
        longest[s] = 0.0
    for r in range(len(tables.ranks)):
        for s in range(len(longest)):
            length[r, s] = sampled.work[r, s] + (idle[head[r] - 1, s] if head[r] > tables.ranks[r].first else 0.0)
            longest[s] = max(longest[s], length[r, s])
            costs += share * length[r, s] if s > 0 else 0.0
    for s in range(1, len(longest)):
        costs += longest[s]
    return longest, costs


@inlined
def begin_visit(end: Times, idle: Times, at: int, first: int, clocks: Any) -> Any:
    """Returns when a rank whose row starts at `first` can run the pass at position `at`, and its idle time until then."""
    if end.ndim == 1:
        if at == first:
            return 0, 0
        return end[at - 1], idle[at - 1]
    for s in range(len(clocks.free)):
        clocks.free[s] = end[at - 1, s] if at > first else 0.0
        clocks.idle[s] = idle[at - 1, s] if at > first else 0.0
    return clocks.free, clocks.idle


@inlined
def wait_for(end: Times, at: int, lag: int, counts: bool, free: Any, idle: Any, work: int, longest: Any, total: Any) -> Any:
    """Makes a rank wait for the message of the pass at position `at`, which takes `lag` ns.

    Returns whether the known cost grew, and the new `free`, `idle`, `longest` and `total`. The wait is idle time only if it `counts`.
    With samples, the cost is updated at the end of a visit (`end_visit`), because an update takes as long as a pass.
    """
    if end.ndim == 1:
        gap = end[at] + lag - free
        if gap <= 0:
            return False, free, idle, longest, total
        if not counts:
            return False, free + gap, idle, longest, total
        return True, free + gap, idle + gap, max(longest, work + idle + gap), total + gap
    for s in range(len(free)):
        wait = max(0.0, end[at, s] + lag - free[s])
        free[s] += wait
        idle[s] += wait if counts else 0.0
    return False, free, idle, longest, total


@inlined
def exceeds(end: Times, longest: Any, total: Any, share: float, cutoff: float) -> bool:
    """Whether the cost with the measured times is above `cutoff`. Always False with samples, which `is_refused` checks."""
    if end.ndim == 1:
        return longest + share * total > cutoff
    return False


@inlined
def run_ahead(end: Times, free: Any, ahead: int) -> Any:
    """Returns when a rank is free after the R right before a pass; the R takes `ahead` ns. Noisy samples have no R."""
    if end.ndim == 1:
        return free + ahead
    return free


@inlined
def run_pass(end: Times, idle: Times, sampled: Any, at: int, one: int, time: int, free: Any, idled: Any) -> Any:
    """Runs the pass at position `at`, which has index `one` in the sampled times, and records its times. Returns when its rank is free."""
    if end.ndim == 1:
        end[at] = free + time
        idle[at] = idled
        return free + time
    for s in range(len(free)):
        free[s] += sampled.duration[one, s]
        end[at, s] = free[s]
        idle[at, s] = idled[s]
    return free


@inlined
def end_visit(end: Times, sampled: Any, rank: int, clocks: Any, share: float, total: Any) -> Any:
    """With samples, adds the idle time of `rank` to the clocks. Returns the sum of the costs. One sample has nothing to do."""
    if end.ndim == 1:
        return total
    longest, length = clocks.longest, clocks.length
    for s in range(len(longest)):
        now = sampled.work[rank, s] + clocks.idle[s]
        total += share * (now - length[rank, s]) + max(0.0, now - longest[s]) if s > 0 else 0.0
        length[rank, s] = now
        longest[s] = max(longest[s], now)
    return total


@inlined
def is_refused(end: Times, longest: Any, total: Any, most: float, cutoff: float) -> bool:
    """Whether, with samples, the measured time is above `most` or the mean cost above `cutoff`."""
    if end.ndim == 1:
        return False
    return longest[0] > most or total > cutoff * (len(longest) - 1)


@inlined
def outcome(end: Times, longest: Any, total: Any, share: float) -> Any:
    """The measured time of the longest rank, and the cost: that of the measured times, or the mean over the noisy samples."""
    if end.ndim == 1:
        return longest, longest + share * total
    return longest[0], total / (len(longest) - 1)


@inlined
def aim(end: Times, longest: Any, cost: float) -> Any:
    """The value that the search minimizes: the measured time of the longest rank, or the cost if there are samples."""
    if end.ndim == 1:
        return longest
    return cost


@inlined
def duration_of(time: Ints, end: Times, sampled: Any, one: int, sample: int) -> Any:
    """Returns the time in a sample of the pass at index `one` among all codes and microbatches; `time` has the measured ns."""
    if end.ndim == 1:
        return time[one]
    return sampled.duration[one, sample]


@inlined
def time_of_rank(tables: Tables, idle: Times, sampled: Any, rank: int, sample: int) -> Any:
    """Returns the time of a rank in a sample that has been played completely."""
    if idle.ndim == 1:
        return tables.ranks[rank].work + idle[tables.ranks[rank].stop - 1]
    return sampled.work[rank, sample] + idle[tables.ranks[rank].stop - 1, sample]
