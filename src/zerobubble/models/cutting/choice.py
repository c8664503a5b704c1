"""The one place where it is chosen which units lie together in a stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

from zerobubble.arguments import Wanted
from zerobubble.costs import Limits
from zerobubble.errors import InputError
from zerobubble.ir import Placement, Schedule
from zerobubble.partition import Layer, LayerCut, cut_layers
from zerobubble.partition.layers import as_one
from zerobubble.units import BYTE_UNITS, MOST, read_bytes

MEMORY = Wanted(
    f"a number of bytes, or an amount in {BYTE_UNITS}, such as '40GB'",
    lambda given: (type(given) is int or isinstance(given, str)) and 0 < memory_bytes(given) <= MOST,
)


def memory_bytes(given: int | str) -> int:
    """The bytes of an amount of memory, 0 for a text that is none."""
    return given if isinstance(given, int) else read_bytes(given) or 0


class UnitCost(NamedTuple):
    """What a unit costs: the floating-point operations of its forward on an example, 0 where there is none, and its parameters."""

    unit: str
    flops: int
    parameters: int


@dataclass(frozen=True)
class Where:
    """Where stages lie, and what a rank may hold there: `memory` is its bytes, None for no limit.

    Beside parameters it holds what `schedule` keeps at once, or where there is none one microbatch in each stage.
    """

    placement: Placement
    memory: int | None = None
    schedule: Schedule | None = None

    @property
    def limits(self) -> Limits | None:
        """The bytes that each rank may hold."""
        return None if self.memory is None else Limits((self.memory,) * self.placement.num_ranks)

    def cut(self, layers: Sequence[Layer]) -> LayerCut:
        """The best cut of `layers` here; raises `InputError` where none fits."""
        held = self.schedule if self.schedule is not None and self.memory is not None else 1
        return cut_layers(layers, self.placement, self.limits, held)


def choose_cuts(layers: Sequence[Layer], where: Where, other_ways: str = "") -> list[str]:
    """The layers with which the stages behind the first begin, by their names: the cut whose slowest rank takes the least time.

    Where no time is known, parameters count. Raises `InputError` where there are fewer layers than stages, with `other_ways` to cut,
    and where none fits the memory.
    """
    names, num_stages = [layer.full_name for layer in layers], where.placement.num_stages
    if len(names) < num_stages:
        raise InputError(
            f"a model of {len(names)} parts cannot be cut into {num_stages} stages; "
            f"{'its parts are ' + _listed(names) if names else 'it holds no other modules with parameters'}: "
            f"use fewer stages, or a model with more layers; those that take each other's outputs, as in a loop, count as one{other_ways}"
        )
    is_known = any(layer.time for layer in layers)
    weights = [layer.time if is_known else layer.parameters_bytes for layer in layers]
    # + 1, so that what costs nothing is shared out, too
    weighed = [replace(layer, forward=weight + 1, backward=0, weight=0) for layer, weight in zip(layers, weights, strict=True)]
    return [names[first] for first in where.cut(weighed).cuts]


def _listed(names: Sequence[str]) -> str:
    """The names, of many the first and the last ones."""
    shown = [*map(repr, names)]
    return ", ".join(shown if len(shown) <= _FEW else [*shown[: _FEW // 2], "...", *shown[-_FEW // 2 :]])


_FEW = 8
_SMALL = 0.02
"""A part of a block that takes less than this share of it, such as a norm, goes with the next."""


def joined_inside_blocks(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """The layers, of which small ones in a block are one with the next, by the name of the first.

    A cut in front of a norm is as good as one behind it, and fewer places to cut are looked through faster.
    """
    whole = Counter[str]()
    for layer in layers:
        whole[layer.block] += layer.time
    groups: list[list[Layer]] = []
    for layer in layers:
        before = groups[-1] if groups else []
        is_in_block = bool(layer.block) and bool(before) and before[0].block == layer.block
        if is_in_block and sum(each.time for each in before) <= _SMALL * whole[layer.block]:
            before.append(layer)
        else:
            groups.append([layer])
    return tuple(as_one(group, group[0].name, group[0].block) for group in groups)


def joined_in_groups(layers: Sequence[Layer], groups: Sequence[Sequence[str]]) -> tuple[Layer, ...]:
    """The layers in the order of `groups`, of which those whose units are in one of them are one, by the name of the first."""
    place = {unit: (number, within) for number, group in enumerate(groups) for within, unit in enumerate(group)}
    ordered = sorted(layers, key=lambda layer: place[layer.full_name])
    joined = (list(together) for _, together in groupby(ordered, key=lambda layer: place[layer.full_name][0]))
    return tuple(as_one(group, group[0].name, group[0].block) for group in joined)
