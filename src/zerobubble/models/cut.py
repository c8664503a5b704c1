"""Which stage holds which unit, and what crosses each boundary between stages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from zerobubble.errors import InputError
from zerobubble.models.dataflow import Called, Dataflow, DirectParameter, Source, UnitCall
from zerobubble.partition import Layer, balance


@dataclass(frozen=True)
class ModelCut:
    """A model cut into `num_stages` stages.

    `stage_of` has the stage of each unit. `crossing` has, for each boundary between two stages, the calls whose outputs the stages behind
    it need from those before it. `parameters` are, for each stage, the model's own parameters that code between the units needs there.
    """

    num_stages: int
    stage_of: Mapping[str, int]
    crossing: tuple[tuple[UnitCall, ...], ...]
    parameters: tuple[frozenset[str], ...]
    calls: Mapping[UnitCall, Called]

    def last_call(self, stage: int) -> UnitCall:
        """The call after which a stage has made all that it makes."""
        return [call for call in self.calls if self.stage_of[call.unit] == stage][-1]


def cut_evenly(flow: Dataflow, num_stages: int) -> ModelCut:
    """The cut whose slowest stage does the fewest floating-point operations; raises `InputError` where there are too few units."""
    order = list(dict.fromkeys(called.call.unit for called in flow.calls))
    if len(order) < num_stages:
        named = ", ".join(map(repr, order))
        raise InputError(f"a model of {len(order)} parts cannot be cut into {num_stages} stages; its parts are {named}")
    flops = dict.fromkeys(order, 0)
    for called in flow.calls:
        flops[called.call.unit] += called.flops
    layers = [Layer(flops[unit] + 1, 0, 0, 0, 0) for unit in order]  # + 1, so that what has no operations counted is shared out, too
    edges = (0, *balance(layers, num_stages), len(order))
    stages = [order[first:end] for first, end in zip(edges, edges[1:], strict=False)]
    return cut_at(flow, stages)


def cut_at(flow: Dataflow, stages: Sequence[Sequence[str]]) -> ModelCut:
    """The cut in which each of `stages` holds the units named there.

    Raises `InputError` for a unit that is called again after units of a later stage, and for a parameter that two stages need.
    """
    stage_of = {unit: stage for stage, units in enumerate(stages) for unit in units}
    _refuse_returns(flow, stage_of)
    last = len(stages) - 1
    users = [(stage_of[called.call.unit], called.sources) for called in flow.calls] + [(last, flow.output)]
    parameters = tuple(frozenset(_parameters(source for at, sources in users if at == stage for source in sources)) for stage in range(last + 1))
    crossing = tuple(_crossing(flow, stage_of, users, boundary) for boundary in range(last))
    return ModelCut(last + 1, stage_of, crossing, parameters, {called.call: called for called in flow.calls})


def _crossing(
    flow: Dataflow, stage_of: Mapping[str, int], users: Sequence[tuple[int, frozenset[Source]]], boundary: int
) -> tuple[UnitCall, ...]:
    """The calls up to stage `boundary` whose outputs are used behind it, in their order."""
    needed = {source for stage, sources in users if stage > boundary for source in sources}
    return tuple(called.call for called in flow.calls if called.call in needed and stage_of[called.call.unit] <= boundary)


def _parameters(sources: Iterable[Source]) -> list[str]:
    return [source.name for source in sources if isinstance(source, DirectParameter)]


def _refuse_returns(flow: Dataflow, stage_of: Mapping[str, int]) -> None:
    reached, by = 0, ""
    for called in flow.calls:
        stage = stage_of[called.call.unit]
        if stage < reached:
            raise InputError(
                f"{called.call} of stage {stage} runs after {by!r} of stage {reached}, and a stage runs once in a microbatch; "
                "cut the model where both are in one stage"
            )
        if stage > reached:
            reached, by = stage, called.call.unit
