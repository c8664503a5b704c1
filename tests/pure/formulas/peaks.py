"""The peak memory that each schedule's docstring states, one line each."""

from __future__ import annotations

from collections.abc import Callable

PEAKS: dict[str, Callable[[int, int, int, int], int]] = {
    "gpipe": lambda p, m, v, r: m,
    "1f1b": lambda p, m, v, r: min(p - r, m),
    "eager-1f1b": lambda p, m, v, r: min(2 * (p - r) - 1, m),
    "interleaved-1f1b": lambda p, m, v, r: (v - 1) * -(-m // max(1, m // p)) + min(2 * (p - r) - 1, m),
    "depth-first": lambda p, m, v, r: (v - 1) * min(p, m) + min(2 * (p - r) - 1, m),
    "breadth-first": lambda p, m, v, r: m * v,
    "forward-only": lambda p, m, v, r: 0,
    "zb-h1": lambda p, m, v, r: min(p, m),
    "zb-h2": lambda p, m, v, r: min(2 * p - 1, m),
    "zb-v": lambda p, m, v, r: min(m + r + 1, 2 * m, 2 * p),
    "v-min": lambda p, m, v, r: min(2 * m, 2 * ((p + 4) // 3) - (r == 0 and p % 3 == 2 and m >= 2 * ((p + 4) // 3) - 1)),
    "v-half": lambda p, m, v, r: min(2 * m, 2 * ((p + 2) // 2)),
    "v-zb": lambda p, m, v, r: min(2 * m, 2 * p),
    "1f1b-v": lambda p, m, v, r: min(2 * m, m + 1 + 3 * r // 2, 2 * (2 * p // 3) + 2),
    "interleaved-lean": lambda p, m, v, r: (v - 1) * -(-m // max(1, m // p)) + min(p - r, m),
    "interleaved-zb": lambda p, m, v, r: min((v - 1) * -(-m // max(1, m // p)) + p, m * v),
    "gis": lambda p, m, v, r: min((v - 1) * -(-m // -(-m // p)) + p - r, m * v),
    "gis-h": lambda p, m, v, r: min((v - 1) * -(-m // max(1, m // -(-p // 2))) + p - r, m * v),
    "hanayo": lambda p, m, v, r: min(v * min(m, p), (v - 2) * min(m, p) + m + r + 1),
    "dualpipe": lambda p, m, v, r: p + 1,
    "dualpipe-v": lambda p, m, v, r: 2 * p + 1,
    "chimera": lambda p, m, v, r: min(p, min(p - r, -(-m // 2)) + min(r + 1, m // 2)),
}
"""Stage activations on rank r of p for m microbatches and v stages per rank, what is held from B to W counted in full."""

MOST: dict[str, Callable[[int, int, int], int]] = {
    "two-thirds": lambda p, m, v: min(m, (2 * p + 1) // 3 + 1),
}
"""The same for the rank that holds most, of schedules that state no more."""
