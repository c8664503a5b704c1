"""Closed forms of the bubble and peak memory of each schedule, with the conditions under which they hold.

Symbols: p ranks, m microbatches, v stages per rank; F, B, W are the times of a rank and microbatch, c is the time of a message. The bubble
is the longest span of a rank minus its work. Sources: Zero Bubble (arXiv 2401.10241) Table 2 and section 6, Megatron-LM (arXiv 2104.04473)
section 2.2, and the docstrings of `schedules`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from zerobubble.costs import Costs
from zerobubble.ir import Schedule


class FormulaInput(NamedTuple):
    """The arguments of a closed form; times in ns."""

    p: int
    m: int
    v: int
    f: int
    b: int
    w: int
    c: int

    @property
    def whole(self) -> int:
        """F + B + W."""
        return self.f + self.b + self.w


@dataclass(frozen=True, slots=True)
class Formula:
    """A closed form as `text` and as a function of a `FormulaInput`, and `when` it holds, as text and as a test."""

    text: str
    value: Callable[[FormulaInput], float]
    when: str = "always"
    holds: Callable[[FormulaInput], bool] = lambda s: True


@dataclass(frozen=True, slots=True)
class Formulas:
    """The closed forms of one schedule: bubbles in ns, the general one first, and the peak over ranks in stage activations.

    Memory held from B to W counts in full.
    """

    bubbles: tuple[Formula, ...]
    peak: Formula

    def bubble(self, setting: FormulaInput) -> Formula:
        """Return the bubble that holds in `setting`, or the general one if none does."""
        return next((form for form in self.bubbles if form.holds(setting)), self.bubbles[0])


def setting(schedule: Schedule, costs: Costs) -> FormulaInput:
    """Return the setting of `schedule` under costs of equal stages; v counts the stages of a rank that a microbatch passes.

    Raises `InputError` for costs with shares.
    """
    costs.require_alike("a closed form")
    v = schedule.num_stages // schedule.num_ranks
    link = costs.comm[0] if costs.comm else 0
    times = costs.forward[0] * v, costs.backward[0] * v, costs.weight[0] * v
    return FormulaInput(schedule.num_ranks, schedule.num_microbatches, v, *times, link)


def _quiet(
    text: str, value: Callable[[FormulaInput], float], when: str = "", holds: Callable[[FormulaInput], bool] = lambda s: True
) -> Formula:
    """Return a form that holds if messages take no time."""
    return Formula(text, value, f"c = 0, {when}" if when else "c = 0", lambda s: s.c == 0 and holds(s))


def _unit(s: FormulaInput) -> bool:
    return s.f == s.b == s.w


def _short_w(s: FormulaInput) -> bool:
    return s.w <= min(s.f, s.b)


def _long_backward(s: FormulaInput) -> bool:
    return s.f <= s.b + s.w


def _close(s: FormulaInput) -> bool:
    return abs(s.f - s.b) <= s.w <= max(s.f, s.b)


def _sizes(s: FormulaInput, count: int) -> tuple[int, int]:
    """Return the sizes of the first and the last of `count` groups of microbatches of nearly equal size."""
    return -(-s.m // count), s.m // count


def _wide(s: FormulaInput) -> tuple[int, int]:
    """Groups of at least p."""
    return _sizes(s, max(1, s.m // s.p))


def _narrow(s: FormulaInput) -> tuple[int, int]:
    """Groups of at most p."""
    return _sizes(s, -(-s.m // s.p))


def _half(s: FormulaInput) -> tuple[int, int]:
    """Groups of at least p/2."""
    return _sizes(s, max(1, s.m // -(-s.p // 2)))


def _refill(s: FormulaInput, first: int, last: int) -> int:
    """Return the idle time between a rank's stages due to groups smaller than p: the first group in forward, the last in backward."""
    return (s.v - 1) * ((s.p - first) * s.f + max((s.p - last) * s.b - last * s.w, 0))


_LOOPED = _quiet("(p-1 + (v-1)max(p-m,0))(F+B+W)/v", lambda s: (s.p - 1 + (s.v - 1) * max(s.p - s.m, 0)) * s.whole / s.v)

_P = Formula("min(p, m)", lambda s: min(s.p, s.m))
_2P = Formula("min(2p-1, m)", lambda s: min(2 * s.p - 1, s.m))

FORMULAS: dict[str, Formulas] = {
    "gpipe": Formulas((Formula("(p-1)(F+B+W+2c)", lambda s: (s.p - 1) * (s.whole + 2 * s.c)),), Formula("m", lambda s: s.m)),
    "1f1b": Formulas(
        (
            _quiet("(p-1)(F+B+W)", lambda s: (s.p - 1) * s.whole),
            Formula(
                "(p-1)(F+B+W) + 2((p-1)m/p + p-2)c",
                lambda s: (s.p - 1) * s.whole + 2 * ((s.p - 1) * s.m // s.p + s.p - 2) * s.c,
                "1 < p divides m",
                lambda s: s.p > 1 and s.m % s.p == 0,
            ),
        ),
        _P,
    ),
    "eager-1f1b": Formulas(
        (Formula("(p-1)(F+B+W+2c)", lambda s: (s.p - 1) * (s.whole + 2 * s.c), "2c <= F+B+W", lambda s: 2 * s.c <= s.whole),), _2P
    ),
    "interleaved-1f1b": Formulas(
        (_LOOPED,), Formula("(v-1)g + min(2p-1, m), groups of g", lambda s: (s.v - 1) * _wide(s)[0] + min(2 * s.p - 1, s.m))
    ),
    "depth-first": Formulas(
        (
            _quiet("(p-1)(F+B+W)/v", lambda s: (s.p - 1) * s.whole / s.v, "p divides m", lambda s: s.m % s.p == 0),
            _quiet(
                "((p-1)(F+B+W) + (p - m mod p)(B+W))/2",
                lambda s: ((s.p - 1) * s.whole + (s.p - s.m % s.p) * (s.b + s.w)) / 2,
                "v = 2, m > p, p does not divide m, F <= B+W",
                lambda s: s.v == 2 and s.m > s.p and s.m % s.p > 0 and _long_backward(s),
            ),
        ),
        Formula("(v-1)min(p, m) + min(2p-1, m)", lambda s: (s.v - 1) * min(s.p, s.m) + min(2 * s.p - 1, s.m)),
    ),
    "interleaved-lean": Formulas((_LOOPED,), Formula("(v-1)g + min(p, m), groups of g", lambda s: (s.v - 1) * _wide(s)[0] + min(s.p, s.m))),
    "breadth-first": Formulas((_LOOPED,), Formula("mv", lambda s: s.m * s.v)),
    "forward-only": Formulas(
        (_quiet("(v-1)max(p-m,0)F/v", lambda s: (s.v - 1) * max(s.p - s.m, 0) * s.f / s.v),), Formula("0", lambda s: 0)
    ),
    "zb-h1": Formulas(
        (
            Formula(
                "(p-1)(F+B-W+4c)",
                lambda s: (s.p - 1) * (s.f + s.b - s.w + 4 * s.c),
                "m > p, 2c <= W <= min(F, B) + 2c",
                lambda s: s.m > s.p and 2 * s.c <= s.w <= min(s.f, s.b) + 2 * s.c,
            ),
            _quiet(
                "(p-1)(F+B) - (min(p,m)-1)W",
                lambda s: (s.p - 1) * (s.f + s.b) - (min(s.p, s.m) - 1) * s.w,
                "W <= F, W <= B",
                _short_w,
            ),
        ),
        _P,
    ),
    "zb-h2": Formulas(
        (
            Formula(
                "(p-1)(F+B-2W+2c)",
                lambda s: (s.p - 1) * (s.f + s.b - 2 * s.w + 2 * s.c),
                "m >= 2p-1, W <= F, W <= B, 2c <= F+B",
                lambda s: s.m >= 2 * s.p - 1 and _short_w(s) and 2 * s.c <= s.f + s.b,
            ),
            _quiet(
                "(p-1)(F+B) - (min(2p-1,m)-1)W",
                lambda s: (s.p - 1) * (s.f + s.b) - (min(2 * s.p - 1, s.m) - 1) * s.w,
                "W <= F, W <= B",
                _short_w,
            ),
        ),
        _2P,
    ),
    "zb-v": Formulas(
        (_quiet("0", lambda s: 0, "F = B = W, m >= 2p-1", lambda s: _unit(s) and s.m >= 2 * s.p - 1),),
        Formula("min(m+p, 2m, 2p)", lambda s: min(s.m + s.p, 2 * s.m, 2 * s.p)),
    ),
    "v-zb": Formulas(
        (_quiet("0", lambda s: 0, "F = B = W, m >= 2p-1", lambda s: _unit(s) and s.m >= 2 * s.p - 1),),
        Formula("min(2m, 2p)", lambda s: min(2 * s.m, 2 * s.p)),
    ),
    "v-half": Formulas(
        (
            _quiet(
                "(3p-7)F/2 for even p, (3p-4)F/2 for odd p",
                lambda s: (3 * s.p - (4 if s.p % 2 else 7)) * s.f / 2,
                "F = B = W, 3 <= p <= m",
                lambda s: _unit(s) and 3 <= s.p <= s.m,
            ),
        ),
        Formula("min(2m, 2 floor((p+2)/2))", lambda s: min(2 * s.m, 2 * ((s.p + 2) // 2))),
    ),
    "v-min": Formulas(
        (
            _quiet(
                "(4p-5)F/2, (4p-7)F/2 where 3 divides p",
                lambda s: (4 * s.p - (5 if s.p % 3 else 7)) * s.f / 2,
                "F = B = W, 2 <= p <= m, m >= 3",
                lambda s: _unit(s) and s.m >= max(s.p, 3) and s.p >= 2,
            ),
        ),
        Formula("min(2m, 2 floor((p+4)/3))", lambda s: min(2 * s.m, 2 * ((s.p + 4) // 3))),
    ),
    "1f1b-v": Formulas(
        (
            _quiet(
                "5(p-1)F/2",
                lambda s: 5 * (s.p - 1) * s.f / 2,
                "F = B = W, 3 <= p <= m, p mod 3 = 1",
                lambda s: _unit(s) and 3 <= s.p <= s.m and s.p % 3 == 1,
            ),
        ),
        Formula(
            "min(2m, m+1 + floor(3(p-1)/2), 2 floor(2p/3) + 2)",
            lambda s: min(2 * s.m, s.m + 1 + 3 * (s.p - 1) // 2, 2 * (2 * s.p // 3) + 2),
        ),
    ),
    "two-thirds": Formulas(
        (
            _quiet(
                "(2p-3)F for even m; for odd m (2p-2)F, (2p-4)F where 3 divides p",
                lambda s: (2 * s.p - (3 if s.m % 2 == 0 else 2 if s.p % 3 else 4)) * s.f,
                "F = B = W, 2 <= p <= m",
                lambda s: _unit(s) and 2 <= s.p <= s.m,
            ),
        ),
        Formula("min(m, floor((2p+1)/3) + 1)", lambda s: min(s.m, (2 * s.p + 1) // 3 + 1)),
    ),
    "interleaved-zb": Formulas(
        (
            _quiet(
                "(p-1)(F+B-W)/v",
                lambda s: (s.p - 1) * (s.f + s.b - s.w) / s.v,
                "W <= F, W <= B, m >= p",
                lambda s: _short_w(s) and s.m >= s.p,
            ),
            _quiet(
                "((p-1)(F+B) - (m-1)W + (v-1)((p-m)F + max((p-m)B - mW, 0)))/v",
                lambda s: ((s.p - 1) * (s.f + s.b) - (s.m - 1) * s.w + _refill(s, s.m, s.m)) / s.v,
                "W <= F, W <= B, m < p",
                lambda s: _short_w(s) and s.m < s.p,
            ),
        ),
        Formula("min((v-1)g + p, mv), groups of g", lambda s: min((s.v - 1) * _wide(s)[0] + s.p, s.m * s.v)),
    ),
    "gis": Formulas(
        (
            _quiet("(p-1)(F+B)/v", lambda s: (s.p - 1) * (s.f + s.b) / s.v, "p divides m", lambda s: s.m % s.p == 0),
            _quiet(
                "((p-1)(F+B) + (v-1)((p-g)F + max((p-h)B - hW, 0)))/v, groups of g to h",
                lambda s: ((s.p - 1) * (s.f + s.b) + _refill(s, *_narrow(s))) / s.v,
                "|F-B| <= W <= max(F, B)",
                _close,
            ),
        ),
        Formula("min((v-1)g + p, mv), groups of g", lambda s: min((s.v - 1) * _narrow(s)[0] + s.p, s.m * s.v)),
    ),
    "gis-h": Formulas(
        (
            _quiet(
                "(p-1)(F+B)/v + (v-1)p(F+B-W)/(2v)",
                lambda s: ((s.p - 1) * (s.f + s.b) + (s.v - 1) * s.p // 2 * (s.f + s.b - s.w)) / s.v,
                "|F-B| <= W <= B, p even, p/2 divides m",
                lambda s: abs(s.f - s.b) <= s.w <= s.b and s.p % 2 == 0 and s.m % (s.p // 2) == 0,
            ),
            _quiet(
                "((p-1)(F+B) + (v-1)((p-g)F + max((p-g)B - gW, 0)))/v, groups of g",
                lambda s: ((s.p - 1) * (s.f + s.b) + _refill(s, *_half(s))) / s.v,
                "|F-B| <= W <= max(F, B), all groups equal",
                lambda s: _close(s) and len(set(_half(s))) == 1,
            ),
        ),
        Formula("min((v-1)g + p, mv), groups of g", lambda s: min((s.v - 1) * _half(s)[0] + s.p, s.m * s.v)),
    ),
    "hanayo": Formulas(
        (
            _quiet(
                "(2(p-1) + (v-2)(-m mod p))(B+W)/v + max(p-m,0)F",
                lambda s: (2 * (s.p - 1) + (s.v - 2) * (-s.m % s.p)) * (s.b + s.w) / s.v + max(s.p - s.m, 0) * s.f,
                "F <= B+W",
                _long_backward,
            ),
        ),
        Formula("min(vk, (v-2)k + m+p), k = min(p, m)", lambda s: min(s.v * min(s.p, s.m), (s.v - 2) * min(s.p, s.m) + s.m + s.p)),
    ),
    "chimera": Formulas(
        (
            _quiet(
                "(p-2 + m mod 2)(B+W) + max(p-m,0)F",
                lambda s: (s.p - 2 + s.m % 2) * (s.b + s.w) + max(s.p - s.m, 0) * s.f,
                "F <= B+W",
                _long_backward,
            ),
        ),
        Formula(
            "p; less for m < 2p",
            lambda s: max(min(s.p, min(s.p - r, -(-s.m // 2)) + min(r + 1, s.m // 2)) for r in range(s.p)),
        ),
    ),
    "dualpipe": Formulas(
        (_quiet("(p/2-1)(F+2B-W)", lambda s: (s.p // 2 - 1) * (s.f + 2 * s.b - s.w), "F = B >= W", lambda s: s.f == s.b >= s.w),),
        Formula("p+1", lambda s: s.p + 1),
    ),
    "dualpipe-v": Formulas(
        (_quiet("(p-1)(F+2B-W)/2", lambda s: (s.p - 1) * (s.f + 2 * s.b - s.w) / 2, "F = B >= W", lambda s: s.f == s.b >= s.w),),
        Formula("2p+1", lambda s: 2 * s.p + 1),
    ),
}
"""Closed forms by the name of the schedule; schedules without any are left out."""
