"""Which levels of recomputation the stages of a plan may have, and which they have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement, product
from typing import Any

from zerobubble.arguments import as_tuple, require
from zerobubble.costs import FULL, NONE, SELECTIVE, Costs, Level
from zerobubble.errors import InputError, line, near
from zerobubble.ir import Placement

MODES = ("none", "full", "auto")
"""What a plan may compute again: nothing, every forward in full, or what pays."""

LEVELS = (SELECTIVE, FULL)
"""The levels that a plan chooses from where none are given."""

MOST_FREE_LEGS = 2
"""Stages on a rank up to which each may have any level, whatever the others have; of more, earlier ones keep no more than later ones."""


@dataclass(frozen=True, slots=True)
class Recomputation:
    """The levels `offered`, of which each forward of a stage has that of its stage or, where it is offered, none; `chosen` by stage.

    Raises `InputError` for levels that have one name, and for chosen ones that are not offered.
    """

    offered: tuple[Level, ...]
    chosen: tuple[Level, ...]

    def __post_init__(self) -> None:
        for name in ("offered", "chosen"):
            object.__setattr__(self, name, as_tuple(f"{name} levels of recomputation", getattr(self, name)))
            for level in getattr(self, name):
                require(f"each of the {name} levels of recomputation", level, Level)
        names = Counter(level.name for level in self.offered)
        double = [name for name, count in names.items() if count > 1]
        if double:
            raise InputError(f"two levels of recomputation are called {double[0]!r}: give each a name of its own")
        foreign = [level.name for level in self.chosen if level not in self.offered]
        if foreign:
            raise InputError(f"a stage has level {foreign[0]!r}, but those that may be chosen are {', '.join(names)}")

    def require_fit(self, costs: Costs) -> None:
        """Raise `InputError` unless the levels are for as many stages as `costs`, whose columns are those of the chosen ones."""
        for level in self.offered:
            level.require_fit(costs.num_stages)
        if costs != costs.with_recompute(self.chosen):
            raise InputError(
                "times of R and bytes of kept inputs in the costs are not those of the levels of their stages: see with_recompute"
            )

    @property
    def may_leave_out(self) -> bool:
        """Whether forwards of stages that compute again may be left alone."""
        return NONE in self.offered

    def to_dict(self) -> dict[str, Any]:
        """The JSON form: the levels that may be chosen, and the name of that of each stage; `from_dict` reads it back."""
        offered = [{"name": level.name, "extra": _plain(level.extra), "kept": _plain(level.kept)} for level in self.offered]
        return {"offered": offered, "chosen": [level.name for level in self.chosen]}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Recomputation:
        """Read the JSON form, within the form of a plan; raises `InputError` or what a missing part raises."""
        offered = [Level(line(each["name"]), _shares(each["extra"]), _shares(each["kept"])) for each in data["offered"]]
        known = {level.name: level for level in offered}
        return cls(tuple(offered), tuple(known[line(name)] for name in data["chosen"]))


def _plain(shares: float | tuple[float, ...]) -> float | list[float]:
    return list(shares) if isinstance(shares, tuple) else shares


def _shares(given: Any) -> float | tuple[float, ...]:
    return tuple(map(float, given)) if isinstance(given, list) else float(given)


def levels_for(mode: str, levels: Sequence[Level] | None) -> tuple[Level, ...]:
    """The levels that a plan of this mode may choose from, none where nothing is computed again.

    Raises `InputError` for an unknown mode, for levels that the mode does not take, and for `full` without a level of that name.
    """
    if mode not in MODES:
        raise InputError(f"there is no mode of recomputation {mode!r}: {near(mode, MODES)}give {', '.join(MODES)}")
    given = LEVELS if levels is None else as_tuple("levels of recomputation", levels)
    for level in given:
        require("each of the levels of recomputation", level, Level)
    named = [level.name for level in given]
    if NONE.name in named:
        raise InputError(f"the level {NONE.name!r} is always there and stands for nothing computed again: leave it out or rename it")
    if mode == "none":
        if levels is not None:
            raise InputError("levels are for plans that compute forwards again: ask for recompute full or auto, or leave them out")
        return ()
    if not given:
        raise InputError("a plan that computes again needs a level of recomputation, got none: leave levels out for the usual ones")
    if mode == "auto":
        return (NONE, *given)
    if FULL.name not in named:
        raise InputError(f"recompute='full' needs the level 'full' among the levels, which are {', '.join(named)}: add it, or give 'auto'")
    return (given[named.index(FULL.name)],)


def parse_levels(text: str) -> tuple[Level, ...]:
    """Levels as text, such as `selective:0.03:0.588,full:1:0.06`: name, time as a share of F, bytes kept after F as a share.

    Raises `InputError` for any other form.

    >>> parse_levels("full:1:0.06")
    (Level(name='full', extra=1.0, kept=0.06),)
    """
    return tuple(map(_parsed_level, text.split(",")))


def _parsed_level(text: str) -> Level:
    name, *numbers = text.strip().split(":")
    try:
        extra, kept = map(float, numbers)
    except ValueError:
        raise InputError(f"a level is name:time:bytes, as shares of F and of what it keeps, such as full:1:0.06, got {text!r}") from None
    if not name:
        raise InputError(f"the level {text!r} has no name: give one, such as selective:0.03:0.588")
    return Level(name, extra, kept)


def show_levels(levels: Sequence[Level]) -> str:
    """Levels as text that `parse_levels` reads.

    >>> show_levels(LEVELS)
    'selective:0.03:0.588,full:1:0.06'
    """
    return ",".join(f"{level.name}:{level.extra:g}:{level.kept:g}" for level in levels)


def choices_by_leg(placement: Placement, offered: Sequence[Level]) -> Iterator[tuple[Level, ...]]:
    """Levels for all stages where those that microbatches come by as the n-th of their rank have one, for a start of a search.

    What an earlier stage of a rank holds it holds for longer, so of many stages the earlier ones keep no more than the later ones.
    """
    legs, leg = max(placement.stages_per_rank, 1), _legs(placement)
    leanest_first = sorted(offered, key=lambda level: level.mean_kept)
    several = product(leanest_first, repeat=legs) if legs <= MOST_FREE_LEGS else combinations_with_replacement(leanest_first, legs)
    for levels in several:
        yield tuple(levels[leg[stage]] for stage in range(placement.num_stages))


def _legs(placement: Placement) -> list[int]:
    """For each stage, how many stages of its rank come before it."""
    seen: Counter[int] = Counter()
    legs = []
    for rank in placement.routes[0]:
        legs.append(seen[rank])
        seen[rank] += 1
    return legs


def lean_costs(costs: Costs) -> Costs:
    """`costs` as if R were a part of B and nothing were held meanwhile, for what knows nothing of R."""
    backward = map(sum, zip(costs.backward, costs.column("recompute"), strict=True))
    return replace(costs, backward=tuple(backward), held_after_f=costs.column("held_input"), further=())
