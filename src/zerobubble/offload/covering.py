"""Which of what waits on a rank is away in which steps, so that its device holds no more than its limit: a problem of covering.

What is away in a step must weigh as much as what the device would hold beyond its limit. Where parts may go in pieces this is solved
exactly by going through the steps from left to right and taking what can stay away longest, and no choice moves fewer bytes than that.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import gcd
from typing import NamedTuple

from zerobubble.errors import InputError
from zerobubble.ir import Step
from zerobubble.offload.copies import HostLink
from zerobubble.offload.offloads import Offload, SavedParts
from zerobubble.timeline import Copying
from zerobubble.units import show_bytes

SPARES = (0, 1, 2, 3, 4, 6, 8)
"""How many of the largest parts more than needed are moved, so that copies have room to begin earlier and end later."""
MARGINS = (0.0, 1.0, 2.0, 4.0)
"""What waits less than so many times its copies is left on the device where others can go."""
HEADSTARTS = (1.5, 4.0)
"""A copy gets this many times its own time, so far as there is room."""
Window = tuple[int, int]
"""The step from which something is gone, and the step before which it is back."""
Choice = Mapping[tuple[int, int], Window]
"""When parts are away, by stage and microbatch."""


class RankRow(NamedTuple):
    """A rank's row: what can go, what the device holds in each step without offloads, its limit, and when its steps begin and end."""

    steps: Sequence[Step]
    parts: SavedParts
    held: list[int]
    limit: int
    begins: list[int]
    ends: list[int]

    def room(self, choice: Choice) -> list[int]:
        """The bytes that are left in each step; below 0 where the limit is exceeded."""
        room = [self.limit - held for held in self.held]
        for key, window in choice.items():
            add_window(room, window, self.parts[key].bytes)
        return room

    def longest(self, key: tuple[int, int]) -> Window:
        """How long a part can be away, where its copies get no time beside passes."""
        return self.parts[key].made + 1, self.parts[key].needed


def fewest_bytes(rank: RankRow, where: int) -> int:
    """The fewest bytes that must go, where each part could go in pieces as large as divide all parts.

    Raises `InputError` where the rank does not fit with all gone.
    """
    piece = gcd(*(part.bytes for part in rank.parts.values())) or 1
    left = {key: part.bytes for key, part in rank.parts.items()}
    gone = [0] * len(rank.held)
    for step, held in enumerate(rank.held):
        lacking = -(-max(0, held - rank.limit) // piece) * piece - gone[step]
        there = [(part.needed, key) for key, part in rank.parts.items() if part.made < step < part.needed and left[key]]
        for needed, key in sorted(there, reverse=True):
            taken = max(0, min(lacking, left[key]))
            left[key] -= taken
            lacking -= taken
            for later in range(step, needed):
                gone[later] += taken
        if lacking > 0:
            least = held - sum(part.bytes for part in rank.parts.values() if part.made < step < part.needed)
            raise InputError(
                f"rank {where} holds {show_bytes(least)} in {'&'.join(map(str, rank.steps[step]))} even with all that waits on the host, "
                f"more than its limit of {show_bytes(rank.limit)}: give more memory, or choose a schedule that holds less"
            )
    return sum(part.bytes for part in rank.parts.values()) - sum(left.values())


def candidates(rank: RankRow, link: HostLink) -> Iterator[list[Offload]]:
    """Offloads with which the rank keeps within its limit, those that move the fewest parts first, each once."""
    seen = set()
    for spare, margin, headstart in product(SPARES, MARGINS, HEADSTARTS):
        windows = {key: _window(rank, key, margin, link) for key in rank.parts}
        open_windows = {key: window for key, window in windows.items() if window[0] < window[1]}
        covering = _covering(rank, open_windows, spare)
        if covering is None:
            continue
        offloads = offloads_of(rank, with_headstart(rank, covering, headstart, link))
        if tuple(offloads) not in seen:
            seen.add(tuple(offloads))
            yield offloads


def _copy_times(rank: RankRow, key: tuple[int, int], link: HostLink) -> tuple[int, int]:
    size = rank.parts[key].bytes
    return link.time(size), link.time(size, Copying.FROM_HOST)


def _window(rank: RankRow, key: tuple[int, int], margin: float, link: HostLink) -> Window:
    """How long a part can be away when each of its copies gets `margin` times its own time; empty where that is too little time."""
    made, needed, _ = rank.parts[key]
    out, back = _copy_times(rank, key, link)
    gone = max(made + 1, bisect_left(rank.begins, rank.ends[made] + round(margin * out)))
    return gone, min(needed, bisect_right(rank.ends, rank.begins[needed] - round(margin * back)))


def _covering(rank: RankRow, windows: Choice, spare: int) -> dict[tuple[int, int], Window] | None:
    """Parts whose windows cover what the rank holds too much in each step, and `spare` parts more as far as there are any.

    Steps are covered from left to right by what can be away longest; None where the windows do not cover them.
    """
    largest = max((part.bytes for part in rank.parts.values()), default=0)
    excess = [held - rank.limit for held in rank.held]
    taken: dict[tuple[int, int], Window] = {}
    gone = [0] * len(excess)
    for step, lacking in enumerate(excess):
        if lacking <= 0:
            continue
        free = sorted((window[1], key) for key, window in windows.items() if window[0] <= step < window[1] and key not in taken)
        while gone[step] < lacking + spare * largest and free:
            _, key = free.pop()
            taken[key] = windows[key]
            add_window(gone, windows[key], rank.parts[key].bytes)
        if gone[step] < lacking:
            return None
    if not spare:
        for key in sorted(taken, key=lambda key: (rank.parts[key].bytes, taken[key][1] - taken[key][0])):
            size, (first, stop) = rank.parts[key].bytes, taken[key]
            if all(gone[step] - size >= excess[step] for step in range(first, stop)):
                add_window(gone, taken.pop(key), -size)
    return taken


def add_window(counts: list[int], window: Window, size: int) -> None:
    """Add to what is counted in each step of a window."""
    for step in range(*window):
        counts[step] += size


def with_headstart(rank: RankRow, choice: Choice, headstart: float, link: HostLink) -> Choice:
    """The same parts, away for less time: copies get up to `headstart` times their own time where there is room for it."""
    room, windows = rank.room(choice), dict(choice)
    growing = sorted(windows, key=lambda key: rank.parts[key].needed)
    while growing:
        growing = [key for key in growing if _grow(rank, windows, key, room, headstart, link)]
    return windows


def offloads_of(rank: RankRow, choice: Choice) -> list[Offload]:
    """The offloads of a choice."""
    return sorted(Offload(*key, rank.parts[key].made, *window, rank.parts[key].needed) for key, window in choice.items())


def _grow(
    rank: RankRow, windows: dict[tuple[int, int], Window], key: tuple[int, int], room: list[int], headstart: float, link: HostLink
) -> bool:
    """Give the copies of a part a step more each, where they want it and there is room; whether any got one."""
    made, needed, size = rank.parts[key]
    out, back = _copy_times(rank, key, link)
    first, stop = windows[key]
    if stop - first > 1 and room[stop - 1] >= size and rank.begins[needed] - rank.ends[stop - 1] < headstart * back:
        stop -= 1
        room[stop] -= size
    if stop - first > 1 and room[first] >= size and rank.begins[first] - rank.ends[made] < headstart * out:
        room[first] -= size
        first += 1
    grown = windows[key] != (first, stop)
    windows[key] = first, stop
    return grown
