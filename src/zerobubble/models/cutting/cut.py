"""Which stage holds which unit, and what crosses each boundary between stages."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from zerobubble.errors import InputError
from zerobubble.models.observation.dataflow import Dataflow, DirectParameter, RandomDraw, Source, UnitCall


@dataclass(frozen=True)
class ModelCut:
    """Which of `num_stages` stages holds each unit, and which parameters, used by code between the units, each stage holds beside them."""

    num_stages: int
    stage_of: Mapping[str, int]
    parameters: tuple[frozenset[str], ...]


@dataclass(frozen=True)
class Crossings:
    """A dataflow cut into stages.

    `arriving` has for each stage the calls before it whose outputs it or a later one needs, `leaving` those up to it that later ones need.
    `last_calls` has for each stage the call after which it has made all that it makes, None for one whose units are not called.
    `shares_draws` tells that several stages use random numbers which code around the units draws.
    """

    flow: Dataflow
    arriving: tuple[tuple[UnitCall, ...], ...]
    leaving: tuple[tuple[UnitCall, ...], ...]
    last_calls: tuple[UnitCall | None, ...]
    shares_draws: bool


def cut_at(
    flow: Dataflow, stages: Sequence[Sequence[str]], parameters: Mapping[str, str], names: Mapping[str, Collection[str]]
) -> ModelCut:
    """The cut in which each of `stages` holds the units named there, and each the parameters that code on it uses.

    `parameters` has for each parameter around the units the unit in whose stage it is kept where no code uses it, `names` has for each
    all names of that parameter around the units; a part's own, which such code uses, has the one it is used by.
    """
    stage_of = {unit: stage for stage, units in enumerate(stages) for unit in units}
    used: list[set[str]] = [set() for _ in stages]
    for stage, sources in _users(flow, stage_of, len(stages)):
        used[stage].update(*(names.get(source.name, [source.name]) for source in sources if isinstance(source, DirectParameter)))
    for name, unit in parameters.items():
        if not any(name in names for names in used):
            used[stage_of[unit]].update(names[name])
    return ModelCut(len(stages), stage_of, tuple(map(frozenset, used)))


def crossings(flow: Dataflow, cut: ModelCut) -> Crossings:
    """What crosses the boundaries of `cut` in a forward with this dataflow.

    Raises `InputError` for a unit that takes what a later stage gives, for units that only one stage can run, and for a parameter that a
    stage needs and lacks.
    """
    _refuse_returns(flow, cut.stage_of)
    _refuse_torn(flow, cut.stage_of)
    users = _users(flow, cut.stage_of, cut.num_stages)
    _refuse_missing_parameters(users, cut)
    home = {call: cut.stage_of[call.unit] for call in flow.calls}
    last_use = {source: stage for stage, sources in sorted(users, key=itemgetter(0)) for source in sources}
    stages = range(cut.num_stages)
    arriving = tuple(tuple(call for call in home if home[call] < stage <= last_use.get(call, 0)) for stage in stages)
    leaving = tuple(tuple(call for call in home if home[call] <= stage < last_use.get(call, 0)) for stage in stages)
    last_calls = {stage: call for call, stage in home.items()}
    first_use = {source: stage for stage, sources in sorted(users, key=itemgetter(0), reverse=True) for source in sources}
    shares_draws = any(isinstance(source, RandomDraw) and first_use[source] < stage for source, stage in last_use.items())
    return Crossings(flow, arriving, leaving, tuple(map(last_calls.get, stages)), shares_draws)


def units_in_order(flow: Dataflow) -> list[str]:
    """The units that are called, each behind those whose output it takes, and else in the order of their first calls."""
    return [unit for group in groups_in_order(flow) for unit in group]


def groups_in_order(flow: Dataflow) -> list[list[str]]:
    """The units that are called, in groups that must lie in one stage each, each group behind those whose output it takes.

    Units are in one group where each takes, by way of others or not, what the other gives: the model goes back to an earlier one.
    """
    before = _units_before(flow)
    groups: dict[int, list[str]] = {}
    for unit, mask in before.items():
        groups.setdefault(mask, []).append(unit)
    number = {unit: place for place, unit in enumerate(before)}
    own = {mask: sum(1 << number[unit] for unit in units) for mask, units in groups.items()}
    ordered: dict[int, list[str]] = {}
    placed = 0
    for mask in groups:  # in the order of first calls
        lacking = mask & ~placed
        masks = [mask] if lacking == own[mask] else [other for other in groups if own[other] & lacking]
        for other in sorted(masks, key=int.bit_count):  # who needs another needs all that the other needs, and has more bits
            ordered[other] = groups[other]
            placed |= own[other]
    return list(ordered.values())


def parts_of_the_output(flow: Dataflow) -> frozenset[str]:
    """The units whose outputs the model's own is made of, such as its heads."""
    return frozenset(source.unit for source in flow.output if isinstance(source, UnitCall))


def _units_before(flow: Dataflow) -> dict[str, int]:
    """For each unit, in the order of first calls, itself and all whose output it needs, as bits by that order."""
    bits = {unit: 1 << place for place, unit in enumerate(flow.units)}
    found, known = dict(bits), dict[str, int]()
    while found != known:  # more than twice only where the model goes back to units
        known = dict(found)
        for call, called in flow.calls.items():
            for source in called.sources:
                if isinstance(source, UnitCall):
                    found[call.unit] |= found[source.unit]
    return found


Users = list[tuple[int, frozenset[Source]]]
"""Stages, each with the sources of something that is used there."""


def _users(flow: Dataflow, stage_of: Mapping[str, int], num_stages: int) -> Users:
    return [(stage_of[call.unit], called.sources) for call, called in flow.calls.items()] + [(num_stages - 1, flow.output)]


def _refuse_returns(flow: Dataflow, stage_of: Mapping[str, int]) -> None:
    for call, called in flow.calls.items():
        stage = stage_of[call.unit]
        later = [source for source in called.sources if isinstance(source, UnitCall) and stage_of[source.unit] > stage]
        if later:
            raise InputError(
                f"{call} of stage {stage} takes what {min(later)} of stage {stage_of[min(later).unit]} gives, and a stage runs once in a "
                "microbatch; cut the model where both are in one stage, or let it call the part once and use again what that gave"
            )


def _refuse_torn(flow: Dataflow, stage_of: Mapping[str, int]) -> None:
    for units, reason in flow.together:
        first, *_, last = sorted(units, key=stage_of.__getitem__)
        if stage_of[first] != stage_of[last]:
            raise InputError(f"{first!r} of stage {stage_of[first]} and {last!r} of stage {stage_of[last]} must be in one stage: {reason}")


def _refuse_missing_parameters(users: Users, cut: ModelCut) -> None:
    for stage, sources in users:
        names = {source.name for source in sources if isinstance(source, DirectParameter)}
        missing = sorted(name for name in names - cut.parameters[stage] if cut.stage_of.get(name.rpartition(".")[0]) != stage)
        if missing:
            raise InputError(
                f"with these arguments, code of stage {stage} uses parameter {missing[0]!r}, which it was not given when the model "
                "was cut; give zb.split(model, example=...) arguments like these"
            )
