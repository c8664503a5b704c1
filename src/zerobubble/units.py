"""Numbers as people read them: times in ms, shares in percent, bytes with a decimal prefix."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from itertools import takewhile
from math import floor, log10
from typing import TypeVar

Number = TypeVar("Number", int, float)

NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000
MOST_MS = 10**9
"""The longest time of a pass or message, in ms: eleven days. Beyond stands a slip of the pen."""
MOST = MOST_MS * NS_PER_MS
"""That in ns; and the most bytes that a stage may hold for a microbatch, a petabyte."""


_BYTES = {prefix + "B": 1000**power for power, prefix in enumerate(("", "k", "M", "G", "T"))}
_BYTES |= {prefix + "iB": 1024**power for power, prefix in enumerate(("K", "M", "G", "T"), 1)}
BYTE_UNITS = ", ".join(_BYTES)
"""The units in which memory may be given."""


def read_bytes(text: str) -> int | None:
    """The bytes of an amount with its unit, such as `40GB` or `1.5 GiB`; None where the text is none."""
    found = re.fullmatch(r"\s*([0-9.eE+-]+)\s*([a-zA-Z]*B)\s*", text)
    try:
        return round(float(found[1]) * _BYTES[found[2]]) if found else None
    except (KeyError, OverflowError, ValueError):
        return None


def ms(time: int) -> float:
    """Milliseconds of a time in ns."""
    return time / NS_PER_MS


def show_ms(time: int) -> str:
    """A time in ns with four significant digits, trailing zeros dropped: `18.52 ms`."""
    return f"{float(f'{ms(time):.4g}'):,.12g} ms"


def show_percent(share: float) -> str:
    """A share with one decimal: `15.9 %`."""
    return f"{100 * share:.1f} %"


def show_bytes(count: int) -> str:
    """Bytes with the largest fitting decimal prefix and three digits: `1.25 GB`."""
    size = float(count)
    for prefix in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.3g} {prefix}"
        size /= 1000
    return f"{size:.3g} TB"


def show_range(values: Iterable[Number], show: Callable[[Number], str]) -> str:
    """The least and the largest of `values`, each by `show`, once where they are the same: `9.8 ms to 10.2 ms`."""
    known = list(values)
    if not known:
        return "none"
    least, largest = show(min(known)), show(max(known))
    return least if least == largest else f"{least} to {largest}"


def ticks(end: int, most: int) -> tuple[int, ...]:
    """Round times in ns from 0 to at most `end`, in steps of 1, 2 or 5 times a power of ten, no more than `most` of them."""
    if end <= 0:
        return (0,)
    rough = max(1.0, end / max(1, most - 1))
    power = 10 ** floor(log10(rough))
    step = next(power * digit for digit in (1, 2, 5, 10) if power * digit >= rough)
    return tuple(takewhile(lambda tick: tick <= end, _multiples(step)))


def _multiples(step: int) -> Iterable[int]:
    tick = 0
    while True:
        yield tick
        tick += step


def counted(count: float, noun: str) -> str:
    """A count with its noun, in the plural unless it is 1: `1 stage`, `2 passes`, `2.5 microbatches`."""
    ending = "" if count == 1 else "es" if noun.endswith(("ch", "ss")) else "s"
    return f"{count:.6g} {noun}{ending}" if isinstance(count, float) else f"{count:,} {noun}{ending}"
