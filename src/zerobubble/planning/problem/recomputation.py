"""Recomputation as an axis of a plan: the levels that are offered, and those that the stages have."""

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
"""The modes of recomputation in a plan: no forward, every forward in full, or the forwards for which it saves time."""

LEVELS = (SELECTIVE, FULL)
"""The default levels to choose from."""

MOST_FREE_STAGES = 2
"""With at most this many stages per rank, each may have any level. With more, earlier stages keep no more than later ones."""


@dataclass(frozen=True, slots=True)
class Recomputation:
    """The levels `offered` and the one `chosen` for each stage; each forward has that of its stage or, if `NONE` is offered, none.

    Raises `InputError` for levels with the same name, and for chosen ones that are not offered.
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
            raise InputError("two recompute levels have the name {twice!r}", twice=double[0], remedy="give each its own name")
        foreign = [level.name for level in self.chosen if level not in self.offered]
        if foreign:
            raise InputError(
                "a stage has level {foreign!r}, which is not offered: choose from {names}, or offer it",
                foreign=foreign[0],
                names=", ".join(names),
            )

    def require_fit(self, costs: Costs) -> None:
        """Raises `InputError` unless `costs` have as many stages, and the columns of the chosen levels."""
        for level in self.offered:
            level.require_fit(costs.num_stages)
        if costs != costs.with_recompute(self.chosen):
            raise InputError("the recompute columns of the costs do not match the levels of the stages", remedy="use Costs.with_recompute")

    @property
    def is_optional(self) -> bool:
        """Whether forwards of recomputing stages may skip recomputation."""
        return NONE in self.offered

    def to_dict(self) -> dict[str, Any]:
        """The JSON form: the levels offered and the name of each stage's, which `from_dict` reads."""
        offered = [{"name": level.name, "extra": _plain(level.extra), "kept": _plain(level.kept)} for level in self.offered]
        return {"offered": offered, "chosen": [level.name for level in self.chosen]}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Recomputation:
        """Reads the JSON form, within that of a plan; raises `InputError`, or what a missing part raises."""
        offered = [Level(line(each["name"]), _shares(each["extra"]), _shares(each["kept"])) for each in data["offered"]]
        known = {level.name: level for level in offered}
        return cls(tuple(offered), tuple(known[line(name)] for name in data["chosen"]))


def _plain(shares: float | tuple[float, ...]) -> float | list[float]:
    return list(shares) if isinstance(shares, tuple) else shares


def _shares(given: Any) -> float | tuple[float, ...]:
    return tuple(map(float, given)) if isinstance(given, list) else float(given)


def levels_for(mode: str, levels: Sequence[Level] | None) -> tuple[Level, ...]:
    """The levels that a plan of this mode may choose from; empty without recomputation.

    Raises `InputError` for an unknown mode, for levels that do not suit the mode, and for `full` without a level of that name.
    """
    if mode not in MODES:
        remedy = f"{near(mode, MODES)}give {', '.join(MODES)}"
        raise InputError("there is no recompute mode {got!v}", argument="recompute", got=mode, expected=MODES, remedy=remedy)
    given = LEVELS if levels is None else as_tuple("levels of recomputation", levels)
    for level in given:
        require("each of the levels of recomputation", level, Level)
    named = [level.name for level in given]
    if NONE.name in named:
        raise InputError("the level name {name!r} is reserved for no recomputation", name=NONE.name, remedy="leave it out or rename it")
    if mode == "none":
        if levels is not None:
            raise InputError("levels need recomputation", remedy="give recompute 'full' or 'auto', or leave levels out")
        return ()
    if not given:
        raise InputError("a plan with recomputation needs a level, got none", remedy="leave levels out for the default ones")
    if mode == "auto":
        return (NONE, *given)
    if FULL.name not in named:
        raise InputError(
            "recompute='full' needs a level 'full', the levels are {named}", named=", ".join(named), remedy="add it, or give 'auto'"
        )
    return (given[named.index(FULL.name)],)


def parse_levels(text: str) -> tuple[Level, ...]:
    """Parses levels such as `selective:0.03:0.588,full:1:0.06`: name, time as a share of F, bytes kept after F as a share.

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
        form = "name:time:bytes, as shares of F and of what it keeps, such as full:1:0.06"
        raise InputError("a level must be {expected}, got {got!v}", argument="levels", got=text, expected=form, remedy="") from None
    if not name:
        raise InputError("the level {text!r} has no name", text=text, remedy="give one, such as selective:0.03:0.588")
    return Level(name, extra, kept)


def show_levels(levels: Sequence[Level]) -> str:
    """Levels in the form that `parse_levels` reads.

    >>> show_levels(LEVELS)
    'selective:0.03:0.588,full:1:0.06'
    """
    return ",".join(f"{level.name}:{level.extra:g}:{level.kept:g}" for level in levels)


def level_choices(placement: Placement, offered: Sequence[Level]) -> Iterator[tuple[Level, ...]]:
    """Levels for all stages, the same for the n-th stages of all ranks: where a search starts.

    An earlier stage of a rank holds activations for longer, so with many stages per rank the earlier ones keep no more than the later ones.
    """
    per_rank, number = max(placement.stages_per_rank, 1), _places_on_rank(placement)
    least_kept_first = sorted(offered, key=lambda level: level.mean_kept)
    several = (
        product(least_kept_first, repeat=per_rank)
        if per_rank <= MOST_FREE_STAGES
        else combinations_with_replacement(least_kept_first, per_rank)
    )
    for levels in several:
        yield tuple(levels[number[stage]] for stage in range(placement.num_stages))


def _places_on_rank(placement: Placement) -> list[int]:
    """For each stage, the number of earlier stages on its rank."""
    seen: Counter[int] = Counter()
    numbers = []
    for rank in placement.routes[0]:
        numbers.append(seen[rank])
        seen[rank] += 1
    return numbers


def costs_with_recompute_in_backward(costs: Costs) -> Costs:
    """`costs` with R as a part of B and only inputs kept, for algorithms that cannot order R."""
    backward = map(sum, zip(costs.backward, costs.column("recompute"), strict=True))
    return replace(costs, backward=tuple(backward), held_after_f=costs.column("held_input"), further=())
