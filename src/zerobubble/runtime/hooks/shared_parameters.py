"""Finds the parameters that are one: tied by the user across stages, or held by the copies of a stage on several routes.

Everything is computed from the gathered parameters of all ranks, so every rank gets the same groups or the same faults.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn

from zerobubble.errors import InputError, near, raise_faults

Tied = Sequence[Sequence[tuple[int, str]]]
"""Groups of (stage, name of a parameter or module in it, "" for the whole stage)."""


@runtime_checkable
class KnowsTied(Protocol):
    """A function that builds stages and knows their tied parameters, such as the result of `zb.split`."""

    def tied(self, num_stages: int) -> Tied:
        """Returns the tied groups of the model cut into `num_stages` stages."""
        ...


@runtime_checkable
class HasTied(Protocol):
    """The module of a stage that was cut from a model, with those tied groups of the model that include this stage."""

    tied_in_the_model: Sequence[Sequence[tuple[int, str]]]


class ParameterName(NamedTuple):
    """The name of a parameter, or of a module with parameters, in a stage."""

    stage: int
    name: str

    def __str__(self) -> str:
        return f"({self.stage}, {self.name!r})"


class RankParameter(NamedTuple):
    """A parameter on a rank, by the first of its names in the rank's stages."""

    rank: int
    name: ParameterName

    def __str__(self) -> str:
        return f"{self.name} on rank {self.rank}"


class ParameterInfo(NamedTuple):
    """The properties of a parameter in one of a rank's stages that other ranks need.

    `first_name` is the first name under which the rank holds the same tensor. `special_type` is the class of a tensor subclass, such as
    DTensor, and else empty.
    """

    shape: tuple[int, ...]
    dtype: str
    first_name: ParameterName
    special_type: str
    requires_grad: bool


ParameterInfos = dict[ParameterName, ParameterInfo]
"""The parameters of a rank's stages, in the order of their modules."""


class SharedParameter(NamedTuple):
    """Parameters of several stages or ranks that act as a single parameter.

    `names[rank]` has the names on each rank that holds any, from the last stage to the first. All begin with the values of `source`.
    A norm counts the parameter under its `counted_name`, the name in the first stage that has any.
    """

    names: dict[int, tuple[ParameterName, ...]]
    source: RankParameter
    counted_name: ParameterName

    def others(self, rank: int) -> list[RankParameter]:
        """Returns the parameters on other ranks than `rank`; all parameters if this rank has several."""
        held = [RankParameter(holder, name) for holder, names in self.names.items() for name in names]
        return held if len(self.names[rank]) > 1 else [parameter for parameter in held if parameter.rank != rank]


class SharedGroup(NamedTuple):
    """Shared parameters with the same ranks and stages, whose gradients are summed together.

    `ranks` are in the order of the sum, the rank with the last stage first. The gradients of a rank are complete when the passes of
    `stages[rank]` are over.
    """

    ranks: tuple[int, ...]
    stages: dict[int, frozenset[int]]
    parameters: list[SharedParameter]


def read_tied(tied: Tied, num_stages: int) -> tuple[tuple[ParameterName, ...], ...]:
    """Returns the groups of the user's `tied`. Raises `InputError` with all faults of their form."""
    faults: list[str] = []
    groups = []
    for group in tied:
        names = [ParameterName(*pair) for pair in group if _is_pair(pair)] if isinstance(group, (list, tuple)) else []
        if len(names) < 2 or len(names) < len(group):
            faults.append(f"tied takes groups of at least two (stage, name) pairs, got {group!r}")
        beyond = [name.stage for name in names if not 0 <= name.stage < num_stages]
        faults += [f"tied names stage {stage}, but stages are 0 to {num_stages - 1}" for stage in beyond]
        faults += [f"tied names {name} twice in a group" for name in dict.fromkeys(names) if names.count(name) > 1]
        groups.append(tuple(names))
    raise_faults(faults)
    return tuple(groups)


def refuse_forgotten(modules: Mapping[int, nn.Module]) -> None:
    """Raises `InputError` if the cut model shares parameters between this rank's stages and others that `tied` does not name.

    This happens if `Pipeline` gets a function around the split, or the modules that it returned. Such parameters would diverge.
    """
    groups = [group for module in modules.values() if isinstance(module, HasTied) for group in module.tied_in_the_model]
    apart = next((group for group in groups if any(stage not in modules for stage, _ in group)), None)
    if apart is not None:
        (stage, name), (other_stage, other), *_ = apart
        raise InputError(
            (
                "the model that was cut has one parameter as {name!r} of stage {stage} and {other!r} of stage "
                "{other_stage}, which Pipeline does not know"
            ),
            name=name,
            stage=stage,
            other=other,
            other_stage=other_stage,
            remedy="pass zb.split(model) itself, or tied=split.tied(num_stages) with modules made from it",
        )


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, (list, tuple)) and len(pair) == 2 and type(pair[0]) is int and isinstance(pair[1], str)


def parameter_infos(modules: Mapping[int, nn.Module]) -> ParameterInfos:
    """Returns the parameters of a rank's `modules`, which are by stage."""
    first_names: dict[Tensor, ParameterName] = {}
    infos: ParameterInfos = {}
    for stage, module in sorted(modules.items()):
        for text, parameter in module.named_parameters(remove_duplicate=False):
            name = ParameterName(stage, text)
            first = first_names.setdefault(parameter, name)
            special = "" if nn.Parameter in type(parameter).__mro__ else type(parameter).__name__
            infos[name] = ParameterInfo(tuple(parameter.shape), str(parameter.dtype), first, special, parameter.requires_grad)
    return infos


def shared_groups(
    tied: Iterable[tuple[ParameterName, ...]],
    infos: Sequence[ParameterInfos],
    copied: Mapping[int, tuple[int, ...]],
    numbers: Sequence[int] = (),
) -> list[SharedGroup]:
    """Returns the groups of shared parameters, from the parameters `infos` of each rank, `tied` and the `copied` stages.

    `numbers` are the numbers of the ranks in errors; empty for 0, 1, ...
    `copied` has the ranks of each stage with several copies, first the rank whose values count. Groups are in the order in which their
    gradients become complete in a backward pass: the group with the latest first stage comes first.

    Raises `InputError` with all faults: unknown names, tied modules that differ, different shapes or dtypes, frozen and trained members,
    and tensor subclasses.
    """
    faults: list[str] = []
    holders = _holders(infos, copied)
    one_parameter = [names for group in tied for names in _names_of_one(group, holders, faults)]
    one_parameter += [[name] for name in holders if name.stage in copied]
    sets = _merged([[holder for name in names for holder in holders[name]] for names in one_parameter])
    for members in sets:
        named = [member._replace(rank=numbers[member.rank] if numbers else member.rank) for member in members]
        faults += _differences(named, [infos[member.rank][member.name] for member in members])
    raise_faults(faults)
    groups = _grouped(sets, holders)
    return sorted(groups, key=lambda group: -min(min(stages) for stages in group.stages.values()))


def _holders(infos: Sequence[ParameterInfos], copied: Mapping[int, tuple[int, ...]]) -> dict[ParameterName, list[RankParameter]]:
    """Returns the parameters of each name: one, or in a copied stage one of each rank, in the order of `copied`."""
    holders: dict[ParameterName, list[RankParameter]] = defaultdict(list)
    for rank, of_names in enumerate(infos):
        for name, info in of_names.items():
            holders[name].append(RankParameter(rank, info.first_name))
    for name, members in holders.items():
        if name.stage in copied:
            of_rank = {member.rank: member for member in members}
            members[:] = [of_rank[rank] for rank in copied[name.stage]]
    return holders


def _names_of_one(group: tuple[ParameterName, ...], holders: Mapping[ParameterName, Any], faults: list[str]) -> list[list[ParameterName]]:
    """Returns the names that a tied group makes one parameter: several lists if the group names modules."""
    found_in: list[dict[str, ParameterName]] = []
    for name in group:
        inner_names = _parameters_under(name, holders)
        if not inner_names:
            hint = near(name.name, [held.name for held in holders if held.stage == name.stage]).rstrip()
            faults.append(f"tied names {name}, but that stage has no such parameter or module; {hint or 'see named_parameters()'}")
        found_in.append(inner_names)
    if not all(found_in):
        return []
    first, *others = found_in
    for name, inner_names in zip(group[1:], others, strict=True):
        unmatched = sorted(inner_names.keys() ^ first.keys())
        if unmatched:
            only = ", ".join(map(repr, unmatched))
            faults.append(f"tied {group[0]} and {name} must hold the same parameters, but only one of them has {only}")
    return [[by_inner[inner] for by_inner in found_in if inner in by_inner] for inner in first]


def _parameters_under(name: ParameterName, holders: Mapping[ParameterName, Any]) -> dict[str, ParameterName]:
    """Returns the parameters that `name` stands for, by their names within it: a single parameter, or the parameters of a module."""
    if name in holders:
        return {"": name}
    prefix = f"{name.name}." if name.name else ""
    inside = (inside_name for inside_name in holders if inside_name.stage == name.stage and inside_name.name.startswith(prefix))
    return {held.name.removeprefix(prefix): held for held in inside}


def _merged(lists: Iterable[list[RankParameter]]) -> list[list[RankParameter]]:
    """Merges lists with a common member into one, and drops lists of one member. The order of members stays."""
    set_of: dict[RankParameter, list[RankParameter]] = {}
    for members in lists:
        together = list(dict.fromkeys(other for member in members for other in set_of.get(member, [member])))
        set_of.update(dict.fromkeys(together, together))
    distinct = {id(members): members for members in set_of.values()}
    return [members for members in distinct.values() if len(members) > 1]


def _differences(members: list[RankParameter], infos: list[ParameterInfo]) -> list[str]:
    """Returns the reasons why `members` cannot be one parameter with the first of them."""
    special = [_refusal(member, info.special_type) for member, info in zip(members, infos, strict=True) if info.special_type]
    if special:
        return special
    faults = []
    first, info = members[0], infos[0]
    for member, other in zip(members[1:], infos[1:], strict=True):
        if (other.shape, other.dtype) != (info.shape, info.dtype):
            was, got = (f"{compared.shape} {compared.dtype.removeprefix('torch.')}" for compared in (info, other))
            faults.append(f"tied {first} is {was}, but {member} is {got}; give them one shape and dtype, or leave them apart")
        elif other.requires_grad != info.requires_grad:
            trained = first if info.requires_grad else member
            faults.append(f"of the tied {first} and {member} only {trained} trains; freeze both or neither")
    return faults


def _refusal(member: RankParameter, special_type: str) -> str:
    return (
        f"{member} is a {special_type}, of which a rank holds no plain numbers, and several stages or ranks share it; leave it out of "
        "tied, give it as a plain parameter, or where a bidirectional schedule copies its stage, choose one with one route"
    )


def _grouped(sets: Iterable[list[RankParameter]], holders: Mapping[ParameterName, list[RankParameter]]) -> list[SharedGroup]:
    """Returns a shared parameter for each set, in groups with the same ranks and stages."""
    names_of: dict[RankParameter, list[ParameterName]] = defaultdict(list)
    for name, members in holders.items():
        for member in members:
            names_of[member].append(name)
    groups: dict[Any, SharedGroup] = {}
    for members in sets:
        ordered = sorted(members, key=lambda member: (-max(name.stage for name in names_of[member]), member.rank))
        names: dict[int, tuple[ParameterName, ...]] = {}
        stages: dict[int, frozenset[int]] = {}
        for member in ordered:
            names[member.rank] = (*names.get(member.rank, ()), member.name)
            stages[member.rank] = stages.get(member.rank, frozenset()).union(name.stage for name in names_of[member])
        counted = min((name for member in members for name in names_of[member]), key=lambda name: name.stage)
        group = groups.setdefault(tuple(stages.items()), SharedGroup(tuple(stages), stages, []))
        group.parameters.append(SharedParameter(names, members[0], counted))
    return list(groups.values())
