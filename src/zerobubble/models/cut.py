"""Which stage holds which unit, and what crosses each boundary between stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from zerobubble.errors import InputError
from zerobubble.models.dataflow import Dataflow, DirectParameter, Source, UnitCall


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
    """

    flow: Dataflow
    arriving: tuple[tuple[UnitCall, ...], ...]
    leaving: tuple[tuple[UnitCall, ...], ...]
    last_calls: tuple[UnitCall | None, ...]


def cut_at(flow: Dataflow, stages: Sequence[Sequence[str]], parameters: Mapping[str, str]) -> ModelCut:
    """The cut in which each of `stages` holds the units named there, and each the parameters that code on it uses.

    `parameters` has for each parameter around the units the unit in whose stage it is kept where no code uses it.
    """
    stage_of = {unit: stage for stage, units in enumerate(stages) for unit in units}
    used: list[set[str]] = [set() for _ in stages]
    for stage, sources in _users(flow, stage_of, len(stages)):
        used[stage].update(source.name for source in sources if isinstance(source, DirectParameter))
    for name, unit in parameters.items():
        if not any(name in names for names in used):
            used[stage_of[unit]].add(name)
    return ModelCut(len(stages), stage_of, tuple(map(frozenset, used)))


def crossings(flow: Dataflow, cut: ModelCut) -> Crossings:
    """What crosses the boundaries of `cut` in a forward with this dataflow.

    Raises `InputError` for a unit that is called again after units of a later stage, and for a parameter that a stage needs and lacks.
    """
    _refuse_returns(flow, cut.stage_of)
    users = _users(flow, cut.stage_of, cut.num_stages)
    _refuse_missing_parameters(users, cut)
    home = {call: cut.stage_of[call.unit] for call in flow.calls}
    last_use = {source: stage for stage, sources in sorted(users, key=itemgetter(0)) for source in sources}
    stages = range(cut.num_stages)
    arriving = tuple(tuple(call for call in home if home[call] < stage <= last_use.get(call, 0)) for stage in stages)
    leaving = tuple(tuple(call for call in home if home[call] <= stage < last_use.get(call, 0)) for stage in stages)
    last_calls = {stage: call for call, stage in home.items()}
    return Crossings(flow, arriving, leaving, tuple(map(last_calls.get, stages)))


Users = list[tuple[int, frozenset[Source]]]
"""Stages, each with the sources of something that is used there."""


def _users(flow: Dataflow, stage_of: Mapping[str, int], num_stages: int) -> Users:
    return [(stage_of[call.unit], called.sources) for call, called in flow.calls.items()] + [(num_stages - 1, flow.output)]


def _refuse_returns(flow: Dataflow, stage_of: Mapping[str, int]) -> None:
    reached, by = 0, ""
    for call in flow.calls:
        stage = stage_of[call.unit]
        if stage < reached:
            raise InputError(
                f"{call} of stage {stage} runs after {by!r} of stage {reached}, and a stage runs once in a microbatch; "
                "cut the model where both are in one stage"
            )
        if stage > reached:
            reached, by = stage, call.unit


def _refuse_missing_parameters(users: Users, cut: ModelCut) -> None:
    for stage, sources in users:
        names = {source.name for source in sources if isinstance(source, DirectParameter)}
        missing = sorted(name for name in names - cut.parameters[stage] if cut.stage_of.get(name.rpartition(".")[0]) != stage)
        if missing:
            raise InputError(
                f"with these arguments, code of stage {stage} uses parameter {missing[0]!r}, which it was not given when the model "
                "was cut; give zb.split(model, example=...) arguments like these"
            )
