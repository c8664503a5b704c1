"""Assigns units to stages, and computes what crosses each boundary between stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from zerobubble.errors import InputError
from zerobubble.models.observation.dataflow import Dataflow, DirectParameter, RandomDraw, Source, UnitCall


@dataclass(frozen=True)
class ModelCut:
    """The stage of each unit, out of `num_stages`, and the additional parameters of each stage that code between the units uses."""

    num_stages: int
    stage_of: Mapping[str, int]
    parameters: tuple[frozenset[str], ...]


@dataclass(frozen=True)
class Crossings:
    """A dataflow cut into stages.

    For each stage, `arriving` lists the earlier calls that this stage or a later stage needs the outputs of, `leaving` the calls up to this
    stage that later stages need, and `last_calls` its last call, None if no unit of the stage is called. `shares_draws` is True if code
    around the units draws random numbers of torch that several stages use or that this code reads.
    """

    flow: Dataflow
    arriving: tuple[tuple[UnitCall, ...], ...]
    leaving: tuple[tuple[UnitCall, ...], ...]
    last_calls: tuple[UnitCall | None, ...]
    shares_draws: bool


def cut_at(
    flow: Dataflow, stages: Sequence[Sequence[str]], parameters: Mapping[str, str], names: Mapping[str, Collection[str]]
) -> ModelCut:
    """Returns the cut in which each of `stages` holds the named units and the parameters that code on it uses.

    `parameters` maps each parameter around the units to the unit whose stage keeps it if no code uses it. `names` maps it to all its names
    around the units; a unit's own parameter used by such code has the name by which it is used.
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
    """Returns what crosses the boundaries of `cut` in a forward with this dataflow.

    Raises `InputError` for a unit that uses an output of a later stage, for units that must be in one stage, and for a missing parameter.
    """
    _refuse_returns(flow, cut.stage_of)
    _refuse_torn(flow, cut.stage_of)
    users = _users(flow, cut.stage_of, cut.num_stages)
    _refuse_missing_parameters(users, cut)
    home = {call: cut.stage_of[call.unit] for call in flow.calls}
    uses: dict[Source, list[int]] = {}
    for stage, sources in users:
        for source in sources:
            uses.setdefault(source, []).append(stage)
    last_use = {source: max(using) for source, using in uses.items()}
    stages = range(cut.num_stages)
    arriving = tuple(tuple(call for call in home if home[call] < stage <= last_use.get(call, 0)) for stage in stages)
    leaving = tuple(tuple(call for call in home if home[call] <= stage < last_use.get(call, 0)) for stage in stages)
    last_calls = {stage: call for call, stage in home.items()}
    are_several = any(isinstance(source, RandomDraw) and min(using) < max(using) for source, using in uses.items())
    return Crossings(flow, arriving, leaving, tuple(map(last_calls.get, stages)), are_several or flow.reads_draws)


def units_in_order(flow: Dataflow) -> list[str]:
    """Returns the called units in topological order of the dataflow, and otherwise in the order of their first calls."""
    return [unit for group in groups_in_order(flow) for unit in group]


def called_again(flow: Dataflow) -> str:
    """Returns the unit that the model loops back to, with a remedy, as the end of a remedy; empty if there is none."""
    counts = Counter(call.unit for call in flow.calls)
    again = [unit for group in groups_in_order(flow) if len(group) > 1 for unit in group if counts[unit] > 1]
    if not again:
        return ""
    return (
        f"; parts in a loop count as one, and the model returns to {again[0]!r}: call another module there, with what the first call keeps "
        "among its arguments"
    )


def groups_in_order(flow: Dataflow) -> list[list[str]]:
    """Returns the called units in groups that must each be in one stage, in topological order of the dataflow.

    Units form a group if each depends, directly or indirectly, on the other's output: the model loops back to an earlier unit.
    """
    before = _units_before(flow)
    groups: dict[int, list[str]] = {}
    for unit, mask in before.items():
        groups.setdefault(mask, []).append(unit)
    number = {unit: place for place, unit in enumerate(before)}
    mask_of = {mask: sum(1 << number[unit] for unit in units) for mask, units in groups.items()}
    ordered: dict[int, list[str]] = {}
    placed = 0
    for mask in groups:  # in the order of first calls
        lacking = mask & ~placed
        masks = [mask] if lacking == mask_of[mask] else [other for other in groups if mask_of[other] & lacking]
        for other in sorted(masks, key=int.bit_count):  # a unit depends on all dependencies of its dependencies, so it has more bits
            ordered[other] = groups[other]
            placed |= mask_of[other]
    return list(ordered.values())


def parts_of_the_output(flow: Dataflow) -> frozenset[str]:
    """Returns the units whose outputs form the model's output, such as its heads."""
    return frozenset(source.unit for source in flow.output if isinstance(source, UnitCall))


def calls_before(flow: Dataflow) -> dict[UnitCall, set[UnitCall]]:
    """Returns, for each call, the calls that its arguments depend on, directly or indirectly."""
    before: dict[UnitCall, set[UnitCall]] = {}
    for call, called in flow.calls.items():
        direct = [source for source in called.sources if isinstance(source, UnitCall)]
        before[call] = set(direct).union(*(before[source] for source in direct))
    return before


def _units_before(flow: Dataflow) -> dict[str, int]:
    """Returns for each unit, in the order of first calls, a bit mask of itself and its dependencies, by that order."""
    bits = {unit: 1 << place for place, unit in enumerate(flow.units)}
    masks, previous = dict(bits), dict[str, int]()
    while masks != previous:  # more than twice only if the model loops back to units
        previous = dict(masks)
        for call, called in flow.calls.items():
            for source in called.sources:
                if isinstance(source, UnitCall):
                    masks[call.unit] |= masks[source.unit]
    return masks


Users = list[tuple[int, frozenset[Source]]]
"""Stages, with the sources of a value used there."""


def _users(flow: Dataflow, stage_of: Mapping[str, int], num_stages: int) -> Users:
    return [(stage_of[call.unit], called.sources) for call, called in flow.calls.items()] + [(num_stages - 1, flow.output)]


def _refuse_returns(flow: Dataflow, stage_of: Mapping[str, int]) -> None:
    for call, called in flow.calls.items():
        stage = stage_of[call.unit]
        later = [source for source in called.sources if isinstance(source, UnitCall) and stage_of[source.unit] > stage]
        if later:
            raise InputError(
                "{call} of stage {stage} uses the output of {later} of stage {later_stage}, but a stage runs once per microbatch",
                call=str(call),
                stage=stage,
                later=str(min(later)),
                later_stage=stage_of[min(later).unit],
                remedy="cut the model so that both are in one stage, or call the part once and reuse its output",
            )


def _refuse_torn(flow: Dataflow, stage_of: Mapping[str, int]) -> None:
    for units, reason in flow.together:
        first, *_, last = sorted(units, key=stage_of.__getitem__)
        if stage_of[first] != stage_of[last]:
            raise InputError(
                "{first!r} of stage {first_stage} and {last!r} of stage {last_stage} must be in one stage: {reason}",
                first=first,
                first_stage=stage_of[first],
                last=last,
                last_stage=stage_of[last],
                reason=reason,
            )


def _refuse_missing_parameters(users: Users, cut: ModelCut) -> None:
    for stage, sources in users:
        names = {source.name for source in sources if isinstance(source, DirectParameter)}
        missing = sorted(name for name in names - cut.parameters[stage] if cut.stage_of.get(name.rpartition(".")[0]) != stage)
        if missing:
            raise InputError(
                "with these arguments, code of stage {stage} uses parameter {missing!r}, which it did not get when the model was cut",
                stage=stage,
                missing=missing[0],
                remedy="give zb.split(model, example=...) arguments like these",
            )
