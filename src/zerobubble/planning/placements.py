"""Families of placements by name, from which a plan can choose."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from zerobubble.arguments import instance, require
from zerobubble.errors import InputError, near
from zerobubble.ir import Placement

FAMILIES = ("linear", "vee", "looped-2", "looped-3", "looped-4", "wave-3", "wave-4")
"""The placements that `any` includes: one to four stages on each rank."""

ANY = "any"

_CUT = re.compile(r"(looped|wave)-([1-9][0-9]?)")


def family(name: str, num_ranks: int) -> Placement:
    """The placement `name` over `num_ranks` ranks: `linear`, `vee`, `looped-3` (3 times around) or `wave-3` (3 sweeps: down, back, down).

    Raises `InputError` for an unknown name, with the nearest known one.
    """
    if name == "linear":
        return Placement.linear(num_ranks)
    if name == "vee":
        return Placement.vee(num_ranks)
    cut = _CUT.fullmatch(name)
    if cut is None:
        remedy = f"{near(name, FAMILIES)}known are {', '.join(FAMILIES)}, {ANY} for all of these, and others such as looped-8"
        raise InputError("there is no placement {got!v}", argument="placements", got=name, expected=(*FAMILIES, ANY), remedy=remedy)
    return Placement.looped(num_ranks, int(cut[2])) if cut[1] == "looped" else _wave(num_ranks, int(cut[2]))


def _wave(num_ranks: int, sweeps: int) -> Placement:
    """Alternating sweeps down and back; an odd number ends on the last rank."""
    waves, odd = divmod(sweeps, 2)
    down_and_back = Placement.wave(num_ranks, waves).routes[0] if waves else ()
    return Placement.custom(down_and_back + tuple(range(num_ranks))) if odd else Placement.wave(num_ranks, waves)


Placements = str | Placement | Iterable[str | Placement] | Mapping[str, Placement]
"""Placements to try: names of families, placements, or placements by names of the caller's own."""


def placements_to_try(placements: Placements, num_ranks: int) -> dict[str, Placement]:
    """The placements to try by name, each layout once: names of families, `any` for all of them, or placements, named or not.

    Raises `InputError` for an unknown name, for anything that is not a placement, and for an empty list.
    """
    require("placements", placements, instance(str, Placement, Iterable))
    if isinstance(placements, Mapping):
        for name, placement in placements.items():
            require(f"placement {name!r}", placement, Placement)
        return dict(placements)
    wanted = [placements] if isinstance(placements, (str, Placement)) else list(placements)
    for each in wanted:
        require("each of the placements", each, instance(str, Placement))
    named: dict[str, Placement] = {}
    for want in wanted:
        for name in FAMILIES if want == ANY else [want]:
            made = name if isinstance(name, Placement) else family(name, num_ranks)
            if made.routes not in {other.routes for other in named.values()}:
                named[_unused(name.name if isinstance(name, Placement) else name, named)] = made
    if not named:
        raise InputError("a plan needs at least one placement to try; {any_placement!r} tries them all", any_placement=ANY)
    return named


def _unused(name: str, taken: dict[str, Placement]) -> str:
    return next(free for free in (name, *(f"{name} ({n})" for n in range(2, len(taken) + 3))) if free not in taken)
