"""Selection of the parts to offload as a covering problem.

In each step, the offloaded bytes must be at least the bytes by which the device would exceed its limit. A part can be away in a contiguous
window of steps between its forward and its backward. If parts could be divided, a greedy sweep would be optimal: go through the steps in
order, and cover what a step lacks with the part that can stay away longest. That gives the lower bound of `fewest_bytes`. For whole parts
the same sweep, with different margins of time, gives the `candidates`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import gcd
from typing import NamedTuple

from zerobubble.errors import InputError
from zerobubble.ir import Step
from zerobubble.offload.offloads import HostLink, Offload, SavedParts
from zerobubble.timeline import Copying
from zerobubble.units import show_bytes

SPARES = (0, 1, 2, 3, 4, 6, 8)
"""Extra memory to free, in multiples of the largest part, so that copies can begin earlier and end later."""
MARGINS = (0.0, 1.0, 2.0, 4.0)
"""Time that a part must have for each of its copies to be offloaded, in multiples of the copy's time."""
HEADSTARTS = (1.5, 4.0)
"""Time given to each copy if memory allows, in multiples of the copy's time."""
Window = tuple[int, int]
"""The step from which a part is away, and the step before which it is back."""
Choice = Mapping[tuple[int, int], Window]
"""When parts are away, by stage and microbatch."""


class RankRow(NamedTuple):
    """The row of a rank: its offloadable parts, the bytes on the device in each step without offloads, the limit, and the step times."""

    steps: Sequence[Step]
    parts: SavedParts
    held: list[int]
    limit: int
    begins: list[int]
    ends: list[int]

    def headroom(self, choice: Choice) -> list[int]:
        """Return the free bytes in each step; negative if the limit is exceeded."""
        headroom = [self.limit - held for held in self.held]
        for key, window in choice.items():
            add_window(headroom, window, self.parts[key].bytes)
        return headroom

    def longest(self, key: tuple[int, int]) -> Window:
        """Return the longest window of a part, which leaves its copies no time in parallel with passes."""
        return self.parts[key].made + 1, self.parts[key].needed


def fewest_bytes(rank: RankRow, where: int) -> int:
    """Return a lower bound of the bytes to offload: the optimum if parts could be divided into pieces of their common divisor.

    Raises `InputError` if the rank exceeds its limit with everything offloaded.
    """
    piece = gcd(*(part.bytes for part in rank.parts.values())) or 1
    left = {key: part.bytes for key, part in rank.parts.items()}
    freed = [0] * len(rank.held)
    for step, held in enumerate(rank.held):
        lacking = -(-max(0, held - rank.limit) // piece) * piece - freed[step]
        available = [(part.needed, key) for key, part in rank.parts.items() if part.made < step < part.needed and left[key]]
        for needed, key in sorted(available, reverse=True):
            taken = max(0, min(lacking, left[key]))
            left[key] -= taken
            lacking -= taken
            add_window(freed, (step, needed), taken)
        if lacking > 0:
            least = held - sum(part.bytes for part in rank.parts.values() if part.made < step < part.needed)
            raise InputError(
                "rank {where} holds {got} in {steps} even with everything offloaded, more than its limit of {limit}",
                where=where,
                got=show_bytes(least),
                steps="&".join(map(str, rank.steps[step])),
                limit=show_bytes(rank.limit),
                remedy="raise the limit, or choose a schedule that holds less",
            )
    return sum(part.bytes for part in rank.parts.values()) - sum(left.values())


def candidates(rank: RankRow, link: HostLink) -> Iterator[list[Offload]]:
    """Yield distinct offloads that keep the rank within its limit, fewest parts first."""
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
    """Return the window of a part in which each copy has `margin` times its own time; empty if the part's wait is too short."""
    maker, needed, _ = rank.parts[key]
    out, back = _copy_times(rank, key, link)
    freed = max(maker + 1, bisect_left(rank.begins, rank.ends[maker] + round(margin * out)))
    return freed, min(needed, bisect_right(rank.ends, rank.begins[needed] - round(margin * back)))


def _covering(rank: RankRow, windows: Choice, spare: int) -> dict[tuple[int, int], Window] | None:
    """Return parts whose windows cover the overrun of each step, plus the size of `spare` largest parts as far as available.

    The sweep covers steps in order, with the part that can be away longest; None if the windows cannot cover them. Without spare parts,
    those that turn out to be unnecessary are removed, the smallest first.
    """
    largest = max((part.bytes for part in rank.parts.values()), default=0)
    overrun = [held - rank.limit for held in rank.held]
    taken: dict[tuple[int, int], Window] = {}
    freed = [0] * len(overrun)
    for step, lacking in enumerate(overrun):
        if lacking <= 0:
            continue
        available = sorted((window[1], key) for key, window in windows.items() if window[0] <= step < window[1] and key not in taken)
        while freed[step] < lacking + spare * largest and available:
            _, key = available.pop()
            taken[key] = windows[key]
            add_window(freed, windows[key], rank.parts[key].bytes)
        if freed[step] < lacking:
            return None
    if not spare:
        for key in sorted(taken, key=lambda key: (rank.parts[key].bytes, taken[key][1] - taken[key][0])):
            size, (first, stop) = rank.parts[key].bytes, taken[key]
            if all(freed[step] - size >= overrun[step] for step in range(first, stop)):
                add_window(freed, taken.pop(key), -size)
    return taken


def add_window(counts: list[int], window: Window, size: int) -> None:
    """Add `size` to the count of each step in a window."""
    for step in range(*window):
        counts[step] += size


def with_headstart(rank: RankRow, choice: Choice, headstart: float, link: HostLink) -> Choice:
    """Return the same parts with shorter windows, in which copies get up to `headstart` times their own time if memory allows.

    Windows shrink one step at a time in turn, so that the headroom is shared and no part takes it all.
    """
    headroom, windows = rank.headroom(choice), dict(choice)
    shrinking = sorted(windows, key=lambda key: rank.parts[key].needed)
    while shrinking:
        shrinking = [key for key in shrinking if _shrink(rank, windows, key, headroom, headstart, link)]
    return windows


def offloads_of(rank: RankRow, choice: Choice) -> list[Offload]:
    """Return the offloads of a choice."""
    return sorted(Offload(*key, rank.parts[key].made, *window, rank.parts[key].needed) for key, window in choice.items())


def _shrink(
    rank: RankRow, windows: dict[tuple[int, int], Window], key: tuple[int, int], headroom: list[int], headstart: float, link: HostLink
) -> bool:
    """Give each copy of a part one more step if it needs the time and memory allows. Return whether any copy got one."""
    maker, needed, size = rank.parts[key]
    out, back = _copy_times(rank, key, link)
    first, stop = windows[key]
    if stop - first > 1 and headroom[stop - 1] >= size and rank.begins[needed] - rank.ends[stop - 1] < headstart * back:
        stop -= 1
        headroom[stop] -= size
    if stop - first > 1 and headroom[first] >= size and rank.begins[first] - rank.ends[maker] < headstart * out:
        headroom[first] -= size
        first += 1
    shrunk = windows[key] != (first, stop)
    windows[key] = first, stop
    return shrunk
