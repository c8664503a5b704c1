"""Local search for faster offloads within the limits: change a window, or add, remove or replace a part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from zerobubble.offload.copies import HostLink
from zerobubble.offload.covering import HEADSTARTS, Choice, RankRow, Window, add_window, offloads_of, with_headstart
from zerobubble.offload.offloads import Offload

Price = tuple[int, int, int]
"""The price of a choice, compared lexicographically: the makespan, the sum of the end times of ranks, the bytes offloaded."""
PriceOf = Callable[[Sequence[Sequence[Offload]]], Price]


def improved(
    ranks: Sequence[RankRow], chosen: Sequence[Sequence[Offload]], link: HostLink, price_of: PriceOf, fastest: int, evaluations: int
) -> list[list[Offload]]:
    """Improve `chosen` by a first-improvement search of up to `evaluations` evaluations, which ends at a makespan of `fastest`."""
    choices: list[Choice] = [{one[:2]: (one.freed, one.back) for one in row} for row in chosen]
    rows = [offloads_of(rank, choice) for rank, choice in zip(ranks, choices, strict=True)]
    best = price_of(rows)
    has_changed = True
    while has_changed:
        has_changed = False
        for where, rank in enumerate(ranks):
            for changed in _changes(rank, choices[where], link):
                if evaluations <= 0 or best[0] == fastest:
                    return rows
                evaluations -= 1
                tried = [*rows[:where], offloads_of(rank, changed), *rows[where + 1 :]]
                price = price_of(tried)
                if price < best:
                    best, rows, has_changed = price, tried, True
                    choices[where] = changed
                    break
    return rows


def _changes(rank: RankRow, choice: Choice, link: HostLink) -> Iterator[Choice]:
    """Yield the choices within the limit that differ in one window, then those with one part more, one less, or one replaced."""
    headroom = rank.headroom(choice)
    for key in choice:
        others = {name: window for name, window in choice.items() if name != key}
        without = list(headroom)
        add_window(without, choice[key], -rank.parts[key].bytes)
        for window in _neighboring_windows(rank, key, choice[key]):
            if _fits(without, window, rank.parts[key].bytes):
                yield others | {key: window}
    there, further = set(choice), sorted(rank.parts.keys() - choice.keys())
    sets = [there | {one} for one in further] + [there - {key} for key in choice] + [there - {k} | {one} for k in choice for one in further]
    for parts in sets:
        longest = {key: rank.longest(key) for key in sorted(parts)}
        if min(rank.headroom(longest), default=0) >= 0:
            for headstart in HEADSTARTS:
                yield with_headstart(rank, longest, headstart, link)


def _neighboring_windows(rank: RankRow, key: tuple[int, int], window: Window) -> Iterator[Window]:
    """Yield the windows that begin or end a step earlier or later."""
    first, stop = window
    least, most = rank.longest(key)
    for then in ((first + 1, stop), (first, stop - 1), (first - 1, stop), (first, stop + 1), (first + 1, stop + 1), (first - 1, stop - 1)):
        if least <= then[0] < then[1] <= most:
            yield then


def _fits(headroom: Sequence[int], window: Window, size: int) -> bool:
    """Whether the limit holds in every step if `size` more bytes are away in the window."""
    first, stop = window
    return all(left + (size if first <= step < stop else 0) >= 0 for step, left in enumerate(headroom))
