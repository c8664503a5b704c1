"""Which parameters are one: named by the user in several stages, or held by the copies of a stage on several routes.

Everything here is worked out from what all ranks told, so every rank gets the same groups or the same faults.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from zerobubble.errors import InputError, near

Tied = Sequence[Sequence[tuple[int, str]]]
"""Groups of (stage, name of a parameter or module in it, "" for the whole stage)."""


class Place(NamedTuple):
    """A parameter's or module's name in a stage."""

    stage: int
    name: str

    def __str__(self) -> str:
        return f"({self.stage}, {self.name!r})"


class Member(NamedTuple):
    """A tensor on a rank, by the first place it has there."""

    rank: int
    place: Place


class Held(NamedTuple):
    """What a rank tells of a tensor in one of its stages; `first` is the first place of the rank that holds the same tensor.

    `special` is the class of a parameter that is more than its numbers, such as a DTensor, and else empty.
    """

    shape: tuple[int, ...]
    dtype: str
    first: Place
    special: str
    trains: bool


Outline = dict[Place, Held]
"""The parameters of a rank's stages, in their modules' order."""


class Row(NamedTuple):
    """Parameters that are one: the members of each rank that has any, from the last stage to the first, and the one all begin as.

    `counted` is the first place in the model, where a norm counts it.
    """

    members: dict[int, tuple[Place, ...]]
    source: Member
    counted: Place


class SharedGroup(NamedTuple):
    """Rows with the same ranks and stages. `ranks` are those that hold any, in the order of the sum: the rank of the last stage first.

    `stages[rank]` are those whose passes must be over before the rank's gradients are whole.
    """

    ranks: tuple[int, ...]
    stages: dict[int, frozenset[int]]
    rows: list[Row]


def read_tied(tied: Tied, num_stages: int) -> tuple[tuple[Place, ...], ...]:
    """The groups of `tied`; raises `InputError` with all faults of their form."""
    faults: list[str] = []
    groups = []
    for group in tied:
        places = [Place(*pair) for pair in group if _is_pair(pair)] if isinstance(group, (list, tuple)) else []
        if len(places) < 2 or len(places) < len(group):
            faults.append(f"tied takes groups of at least two (stage, name) pairs, got {group!r}")
        faults += [f"tied names stage {p.stage}, but stages are 0 to {num_stages - 1}" for p in places if not 0 <= p.stage < num_stages]
        faults += [f"tied names {place} twice in a group" for place in dict.fromkeys(places) if places.count(place) > 1]
        groups.append(tuple(places))
    if faults:
        raise InputError("; ".join(faults))
    return tuple(groups)


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, (list, tuple)) and len(pair) == 2 and type(pair[0]) is int and isinstance(pair[1], str)


def outline(modules: Mapping[int, nn.Module]) -> Outline:
    """What a rank tells of its parameters."""
    first: dict[Tensor, Place] = {}
    held: Outline = {}
    for stage, module in sorted(modules.items()):
        for name, p in module.named_parameters(remove_duplicate=False):
            place = Place(stage, name)
            held[place] = Held(tuple(p.shape), str(p.dtype), first.setdefault(p, place), _special(p), p.requires_grad)
    return held


def _special(parameter: nn.Parameter) -> str:
    return "" if nn.Parameter in type(parameter).__mro__ else type(parameter).__name__


def shared_groups(groups: Iterable[tuple[Place, ...]], told: Sequence[Outline], copied: Mapping[int, tuple[int, ...]]) -> list[SharedGroup]:
    """The shared groups that the `groups` and the `copied` stages make of what each rank `told`,
    in the order in which gradients become whole.

    `copied` has the ranks of stages that several hold, the one whose values count first.

    Raises `InputError` with all faults: names that no stage has, tied modules that differ, shapes, dtypes, or some that do not train.
    """
    faults: list[str] = []
    homes: dict[Place, list[Member]] = defaultdict(list)
    for rank, held in enumerate(told):
        for place, entry in held.items():
            homes[place].append(Member(rank, entry.first))
    for place, members in homes.items():
        if place.stage in copied:
            of_rank = {member.rank: member for member in members}
            members[:] = [of_rank[rank] for rank in copied[place.stage]]
    sets: dict[Member, list[Member]] = {}
    for row in [*(row for group in groups for row in _rows(group, homes, faults)), *([place] for place in homes if place.stage in copied)]:
        _join(sets, [member for place in row for member in homes[place]])
    apart = {id(members): members for members in sets.values() if len(members) > 1}.values()
    for members in apart:
        faults += _differences(members, told)
    if faults:
        raise InputError("; ".join(faults))
    places: dict[Member, list[Place]] = defaultdict(list)
    for place, members in homes.items():
        for member in members:
            places[member].append(place)
    found: dict[Any, SharedGroup] = {}
    for members in apart:
        stages, shared = _row(members, places)
        found.setdefault(tuple(stages.items()), SharedGroup(tuple(stages), stages, [])).rows.append(shared)
    return sorted(found.values(), key=lambda shared_group: -min(min(stages) for stages in shared_group.stages.values()))


def _rows(group: tuple[Place, ...], homes: Mapping[Place, Any], faults: list[str]) -> list[list[Place]]:
    """The places that a group makes one, parameter by parameter where it names modules."""
    inner: list[dict[str, Place]] = []
    for stage, name in group:
        prefix = f"{name}." if name else ""
        own = [place for place in homes if place.stage == stage]
        found = {"": Place(stage, name)} if Place(stage, name) in homes else {}
        found = found or {place.name.removeprefix(prefix): place for place in own if place.name.startswith(prefix)}
        if not found:
            hint = near(name, [place.name for place in own]).rstrip()
            faults.append(
                f"tied names {Place(stage, name)}, but that stage has no such parameter or module; {hint or 'see named_parameters()'}"
            )
        inner.append(found)
    if not all(inner):
        return []
    for place, found in zip(group[1:], inner[1:], strict=True):
        apart = sorted(found.keys() ^ inner[0].keys())
        if apart:
            faults.append(
                f"tied {group[0]} and {place} must hold the same parameters, but only one of them has {', '.join(map(repr, apart))}"
            )
    return [[found[name] for found in inner if name in found] for name in inner[0]]


def _join(sets: dict[Member, list[Member]], members: list[Member]) -> None:
    """Make one set of all sets that hold any of `members`, the first one's first."""
    together = list(dict.fromkeys(other for member in members for other in sets.get(member, [member])))
    sets.update(dict.fromkeys(together, together))


def _differences(members: list[Member], told: Sequence[Outline]) -> list[str]:
    """What keeps members from being one parameter with the first of them."""
    faults = [_refusal(member, held.special) for member in members if (held := told[member.rank][member.place]).special]
    if faults:
        return faults
    (first, one), *others = [(f"{member.place} on rank {member.rank}", told[member.rank][member.place]) for member in members]
    for place, other in others:
        if (other.shape, other.dtype) != (one.shape, one.dtype):
            was, got = (f"{entry.shape} {entry.dtype.removeprefix('torch.')}" for entry in (one, other))
            faults.append(f"tied {first} is {was}, but {place} is {got}; give them one shape and dtype, or leave them apart")
        elif other.trains != one.trains:
            faults.append(f"of the tied {first} and {place} only {first if one.trains else place} trains; freeze both or neither")
    return faults


def _refusal(member: Member, special: str) -> str:
    return (
        f"{member.place} on rank {member.rank} is a {special}, of which a rank holds no plain numbers, and several places share it; leave "
        "it out of tied, give it as a plain parameter, or where a bidirectional schedule copies its stage, choose one with one route"
    )


def _row(members: list[Member], places: Mapping[Member, list[Place]]) -> tuple[dict[int, frozenset[int]], Row]:
    """The row of these members, and by rank, in the order of the sum, the stages that hold them."""
    ordered = sorted(members, key=lambda member: (-max(place.stage for place in places[member]), member.rank))
    held: dict[int, tuple[Place, ...]] = {}
    stages: dict[int, frozenset[int]] = {}
    for rank, place in ordered:
        held[rank] = (*held.get(rank, ()), place)
        stages[rank] = stages.get(rank, frozenset()).union(other.stage for other in places[Member(rank, place)])
    counted = min((place for member in members for place in places[member]), key=lambda place: place.stage)
    return stages, Row(held, members[0], counted)
