"""Chooses which units form a stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

from zerobubble.costs import Limits
from zerobubble.errors import InputError
from zerobubble.ir import Placement, Schedule
from zerobubble.partition import Layer, LayerCut, cut_layers
from zerobubble.partition.layers import as_one
from zerobubble.units import counted


class UnitCost(NamedTuple):
    """The cost of a unit: the FLOPs of its forward on an example, 0 without an example, and its parameters."""

    unit: str
    flops: int
    parameters: int


@dataclass(frozen=True)
class Where:
    """The placement of stages, and the memory limit of a rank: `memory` in bytes, None for no limit.

    In addition to parameters, a rank holds the microbatches that `schedule` keeps in flight; without a schedule, one per stage.
    """

    placement: Placement
    memory: int | None = None
    schedule: Schedule | None = None

    @property
    def limits(self) -> Limits | None:
        """Returns the memory limit of each rank."""
        return None if self.memory is None else Limits((self.memory,) * self.placement.num_ranks)

    def cut(self, layers: Sequence[Layer]) -> LayerCut:
        """Returns the best cut of `layers` for this placement; raises `InputError` if none fits."""
        held = self.schedule if self.schedule is not None and self.memory is not None else 1
        return cut_layers(layers, self.placement, self.limits, held)


def choose_cuts(layers: Sequence[Layer], where: Where, reason: str = "", other_ways: str = "") -> list[str]:
    """Returns the names of the first layers of all stages after the first, for the cut with the fastest slowest rank.

    If no times are known, parameters count. Raises `InputError` if there are fewer layers than stages, with the `reason` for few layers
    and `other_ways` to cut, and if no cut fits the memory.
    """
    names, num_stages = [layer.full_name for layer in layers], where.placement.num_stages
    if len(names) < num_stages:
        raise InputError(
            "a model of {size} cannot be cut into {num_stages} stages; {parts}{reason}",
            size=counted(len(names), "part"),
            num_names=len(names),
            num_stages=num_stages,
            parts=f"its {'part is' if len(names) == 1 else 'parts are'} {_listed(names)}"
            if names
            else "it holds no other modules with parameters",
            reason=reason,
            remedy=f"use fewer stages, or a model with more layers{other_ways}",
        )
    is_known = any(layer.time for layer in layers)
    weights = [layer.time if is_known else layer.parameters_bytes for layer in layers]
    # + 1, so that units of zero cost are distributed too
    weighed = [replace(layer, forward=weight + 1, backward=0, weight=0) for layer, weight in zip(layers, weights, strict=True)]
    return [names[first] for first in where.cut(weighed).cuts]


def _listed(names: Sequence[str]) -> str:
    """Lists names; of many, only the first and the last."""
    shown = [*map(repr, names)]
    return ", ".join(shown if len(shown) <= _FEW else [*shown[: _FEW // 2], "...", *shown[-_FEW // 2 :]])


_FEW = 8
_SMALL = 0.02
"""A part of a block with less than this share of its time, such as a norm, is merged with the next."""


def joined_inside_blocks(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """Merges small layers in a block with the next one, under the name of the first.

    A cut before a norm is as good as one after it, and fewer candidates make the search faster.
    """
    whole = Counter[str]()
    for layer in layers:
        whole[layer.block] += layer.time
    groups: list[list[Layer]] = []
    for layer in layers:
        before = groups[-1] if groups else []
        is_in_block = bool(layer.block) and bool(before) and before[0].block == layer.block
        if is_in_block and sum(part.time for part in before) <= _SMALL * whole[layer.block]:
            before.append(layer)
        else:
            groups.append([layer])
    return tuple(as_one(group, group[0].name, group[0].block) for group in groups)


def joined_in_groups(layers: Sequence[Layer], groups: Sequence[Sequence[str]]) -> tuple[Layer, ...]:
    """Merges the layers of each of `groups` into one, under the name of the first, in the order of `groups`."""
    place = {unit: (number, within) for number, group in enumerate(groups) for within, unit in enumerate(group)}
    ordered = sorted(layers, key=lambda layer: place[layer.full_name])
    joined = (list(together) for _, together in groupby(ordered, key=lambda layer: place[layer.full_name][0]))
    return tuple(as_one(group, group[0].name, group[0].block) for group in joined)
