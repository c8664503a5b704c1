"""The one place where it is chosen which units lie together in a stage."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from zerobubble.errors import InputError
from zerobubble.partition import Layer, balance


class UnitCost(NamedTuple):
    """What a unit costs: the floating-point operations of its forward on an example, 0 where there is none, and its parameters."""

    unit: str
    flops: int
    parameters: int


def choose_stages(layers: Sequence[Layer], num_stages: int) -> list[list[str]]:
    """The units of each stage, which are the `layers` by their names: those whose slowest stage takes the least time.

    Where no time is known, parameters count. Raises `InputError` where there are fewer units than stages.
    """
    units = [layer.name for layer in layers]
    if len(units) < num_stages:
        raise InputError(
            f"a model of {len(units)} parts cannot be cut into {num_stages} stages; "
            f"{'its parts are ' + ', '.join(map(repr, units)) if units else 'it holds no other modules with parameters'}: "
            "use fewer stages, or a model with more layers"
        )
    is_known = any(layer.time for layer in layers)
    weights = [layer.time if is_known else layer.parameters_bytes for layer in layers]
    weighed = [Layer(weight + 1, 0, 0, 0, 0) for weight in weights]  # + 1, so that what costs nothing is shared out, too
    edges = (0, *balance(weighed, num_stages), len(units))
    return [units[first:end] for first, end in pairwise(edges)]
