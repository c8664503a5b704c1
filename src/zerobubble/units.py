"""Parsing and formatting of quantities: times in ms, shares in percent, bytes with a decimal prefix."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import count, takewhile
from math import floor, log10
from typing import TypeVar

Number = TypeVar("Number", int, float)

NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000
MOST_MS = 10**9
"""The longest time of a pass or message, in ms: eleven days. Larger numbers are taken for mistakes."""
MOST = MOST_MS * NS_PER_MS
"""The same in ns; also the most bytes that a stage may hold for a microbatch, a petabyte."""


_BYTES = {prefix + "B": 1000**power for power, prefix in enumerate(("", "k", "M", "G", "T"))}
_BYTES |= {prefix + "iB": 1024**power for power, prefix in enumerate(("K", "M", "G", "T"), 1)}
BYTE_UNITS = ", ".join(_BYTES)
"""The accepted units of memory."""
_SPELLED = {spelled.lower(): size for name, size in _BYTES.items() for spelled in (name, name[:-1]) if spelled}
"""Accepted spellings of the units, in lower case, with and without the B after a prefix."""
_NANOSECONDS = {"ns": 1, "us": 1000, "ms": NS_PER_MS, "s": NS_PER_S, "min": 60 * NS_PER_S, "h": 3600 * NS_PER_S}
TIME_UNITS = ", ".join(_NANOSECONDS)
"""The accepted units of time."""


def read_bytes(text: str) -> int | None:
    """Parse an amount of memory with its unit, such as `40GB`, `40g` or `1.5 GiB`; None if `text` is not one."""
    amount = _amount(text, _SPELLED)
    try:
        return None if amount is None else round(amount)
    except OverflowError:
        return None


def as_bytes(amount: int | str) -> int:
    """Return the bytes of an amount of memory: a number of bytes, or text as in `read_bytes`; 0 for other text.

    >>> as_bytes("40GB"), as_bytes(1024)
    (40000000000, 1024)
    """
    return amount if isinstance(amount, int) else read_bytes(amount) or 0


def read_time(text: str, unit: str) -> float | None:
    """Parse a time such as `10s` or `2.5 ms`, and return it in `unit`, the unit of a bare number; None if `text` is not a time.

    >>> read_time("1.5s", "ms"), read_time("20", "ms"), read_time("20 apples", "ms")
    (1500.0, 20.0, None)
    """
    try:
        return float(text)
    except ValueError:
        amount = _amount(text, _NANOSECONDS)
    return None if amount is None else amount / _NANOSECONDS[unit]


def _amount(text: str, units: Mapping[str, int]) -> float | None:
    """Return a number times its unit, in upper or lower case; None if `text` is anything else, such as a bare number."""
    match = re.fullmatch(r"\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*([a-zA-Z]+)\s*", text)
    try:
        return float(match[1]) * units[match[2].lower()] if match else None
    except (KeyError, ValueError):
        return None


def ms(time: int) -> float:
    """Convert ns to ms."""
    return time / NS_PER_MS


def show_ms(time: int) -> str:
    """Format a time in ns with four significant digits, without trailing zeros: `18.52 ms`."""
    return f"{float(f'{ms(time):.4g}'):,.12g} ms"


def show_percent(share: float) -> str:
    """Format a share with two decimals: `15.93 %`."""
    return f"{100 * share:.2f} %"


def show_bytes(count: int) -> str:
    """Format bytes with the largest suitable decimal prefix and three digits: `1.25 GB`."""
    size = float(count)
    for prefix in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.3g} {prefix}"
        size /= 1000
    return f"{size:.3g} TB"


def show_range(values: Iterable[Number], show: Callable[[Number], str]) -> str:
    """Format the minimum and maximum of `values` with `show`, once if they look the same: `9.8 ms to 10.2 ms`."""
    numbers = list(values)
    if not numbers:
        return "none"
    least, largest = show(min(numbers)), show(max(numbers))
    return least if least == largest else f"{least} to {largest}"


def ticks(end: int, most: int) -> tuple[int, ...]:
    """Return at most `most` round times in ns from 0 to at most `end`, in steps of 1, 2 or 5 times a power of ten."""
    if end <= 0:
        return (0,)
    rough = max(1.0, end / max(1, most - 1))
    power = 10 ** floor(log10(rough))
    step = next(power * digit for digit in (1, 2, 5, 10) if power * digit >= rough)
    return tuple(takewhile(lambda tick: tick <= end, count(0, step)))


def counted(count: float, noun: str) -> str:
    """Format a count with its noun, in the plural unless it is 1: `1 stage`, `2 passes`, `2.5 microbatches`."""
    ending = "" if count == 1 else "es" if noun.endswith(("ch", "ss")) else "s"
    return f"{count:.6g} {noun}{ending}" if isinstance(count, float) else f"{count:,} {noun}{ending}"


def listed(items: Iterable[object]) -> str:
    """Format items as a list: `a, b and c`."""
    *others, last = map(str, items)
    return f"{', '.join(others)} and {last}" if others else last


def first_of(names: Sequence[str], most: int = 3) -> str:
    """Format the first of many names: `a, b, c and 2 more`."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def named(noun: str, numbers: Collection[int]) -> str:
    """Format numbered things: `rank 1`, `ranks 1, 2 and 3`."""
    return f"{noun}{'s' * (len(numbers) > 1)} {listed(numbers)}"
