"""Slices of a sequence: the share of a microbatch's times and bytes that each slice has.

Most work is linear in the tokens of a slice. Causal attention is not: a token at position x of a sequence of length 1 attends to x of it.
So attention of the slice from x to y takes y^2 - x^2 of the time for the whole sequence, and later slices take longer than earlier ones of
the same length.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import isclose, sqrt
from typing import Any, NamedTuple

from zerobubble.arguments import NUMBER, as_tuple, wrong
from zerobubble.errors import InputError, raise_all

MOST_SLICES = 100_000
"""The largest number of slices of a microbatch."""


class SliceShares(NamedTuple):
    """Shares of a slice in its microbatch: of the tokens, and of the times of F, B and W. Bytes and messages go by tokens."""

    tokens: float
    forward: float
    backward: float
    weight: float

    def share(self, column: str) -> float:
        """Return the share of the slice in a column of `Costs`."""
        if column == "recompute" or column.startswith("recompute "):
            return self.forward
        return getattr(self, column) if column in ("forward", "backward", "weight") else self.tokens


def slices_of(lengths: Sequence[float], forward: float = 0.0, backward: float = 0.0) -> tuple[SliceShares, ...]:
    """Return slices of the given lengths, in shares of the tokens, which must sum to 1.

    `forward` and `backward` are the shares of F and of B that attention between tokens takes. W has no attention.

    >>> [piece.forward for piece in slices_of((0.5, 0.5), forward=0.5)]
    [0.375, 0.625]
    """
    lengths = as_tuple("lengths of slices", lengths)
    raise_all(
        wrong(f"the length of slice {place}", length, "a share of the tokens, above 0 and at most 1")
        for place, length in enumerate(lengths)
        if not NUMBER.accepts(length) or not 0 < length <= 1
    )
    if not isclose(sum(lengths), 1, rel_tol=1e-6):
        raise InputError("the lengths of slices are shares of the tokens and sum to 1, got {got:g}", got=sum(lengths))
    raise_all(
        wrong(f"the share of attention in {name}", share, "a number from 0 to 1")
        for name, share in (("forward", forward), ("backward", backward))
        if not NUMBER.accepts(share) or not 0 <= share <= 1
    )
    edges = pairwise([0.0, *accumulate(lengths)])
    return tuple(SliceShares(end - begin, _time(begin, end, forward), _time(begin, end, backward), end - begin) for begin, end in edges)


def equal_slices(count: int) -> tuple[SliceShares, ...]:
    """Return `count` slices of equal length without attention between tokens; none for 1."""
    return slices_of((1 / count,) * count) if count > 1 else ()


def attention_in(slices: Sequence[SliceShares]) -> tuple[float, float]:
    """Return the shares of F and of B that attention between tokens takes in at least two slices made by `slices_of`.

    >>> attention_in(slices_of((0.5, 0.25, 0.25), forward=0.5, backward=0.25))
    (0.5, 0.25)
    """
    last = slices[-1]
    more = 1 - (1 - last.tokens) ** 2 - last.tokens
    return (last.forward - last.tokens) / more, (last.backward - last.tokens) / more


def _time(begin: float, end: float, attention: float) -> float:
    return (1 - attention) * (end - begin) + attention * (end**2 - begin**2)


def equal_lengths(count: int, attention: float = 0.0) -> tuple[float, ...]:
    """Return the lengths of `count` slices of equal time, in shares of the tokens, if attention takes the share `attention` of all passes.

    >>> equal_lengths(2)
    (0.5, 0.5)
    >>> first, last = equal_lengths(2, attention=1.0)
    >>> round(first, 3), round(last, 3)
    (0.707, 0.293)
    """
    edges = [_edge(number / count, attention) for number in range(count + 1)]
    return tuple(end - begin for begin, end in pairwise(edges))


def _edge(time: float, attention: float) -> float:
    """Return the share of the tokens whose passes take the share `time`: x with (1 - attention) x + attention x^2 = time."""
    if not attention:
        return time
    linear = 1 - attention
    return (sqrt(linear**2 + 4 * attention * time) - linear) / (2 * attention)


def slices_from(data: Any) -> tuple[SliceShares, ...]:
    """Read the JSON form of slices: a list of four shares for each. Raises `InputError`, or what a missing part raises."""
    return tuple(SliceShares(*map(float, piece)) for piece in data)
