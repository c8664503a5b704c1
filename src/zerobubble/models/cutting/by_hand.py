"""Cuts given by the user: names of the first parts of stages, layer counts, or a Megatron layout."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from zerobubble.arguments import Wanted, wrong
from zerobubble.errors import InputError, near
from zerobubble.models.cutting.by_layout import listed, stages_by_counts, stages_by_layout
from zerobubble.planning import Plan

ByHand = Sequence[str] | Sequence[int] | str
"""`["model.layers.4", "model.layers.8"]`: the first part of every stage after the first. `[4, 4, 3]`: the number of layers of each stage.
`"Ett|ttt|ttL"`: Megatron's layout."""

CUTS = Wanted(
    "names of parts, numbers of layers, a layout of Megatron or a plan for layers",
    lambda given: isinstance(given, (str, list, tuple, Plan)) and bool(given),
)


def spelled_out(given: ByHand | Plan) -> ByHand:
    """Returns the cuts, those of a plan by name; raises `InputError` for a plan without names."""
    if not isinstance(given, Plan):
        return given
    names = given.problem.first_layers
    if not names and given.placement.num_stages > 1:
        raise InputError(
            "this plan has no names of the first parts of its stages",
            remedy="create it from named layers, with zerobubble plan --layers and a file written by zerobubble split or "
            "zb.split(model).layers()",
        )
    return names


def stages_by_hand(given: ByHand, units: Sequence[str], blocks: frozenset[str], heads: frozenset[str] = frozenset()) -> list[list[str]]:
    """Returns the units of each stage, in the order of `units`, in which every unit follows those whose output it takes.

    `blocks` are the layers, `heads` the units that produce the model's output.

    Units before the first layer belong to the first stage, those after the last layer to the last stage, and others to the layer before
    them. Raises `InputError` for cuts that do not fit the model, naming its parts.
    """
    if isinstance(given, str):
        return stages_by_layout(given, units, blocks, heads)
    if all(isinstance(each, str) for each in given):
        return _by_names([str(each) for each in given], units)
    if all(type(each) is int and each >= 0 for each in given):
        return stages_by_counts([int(each) for each in given], units, [unit for unit in units if unit in blocks])
    raise wrong("cuts", given, "names of parts, numbers of layers or a Megatron layout")


def _by_names(names: Sequence[str], units: Sequence[str]) -> list[list[str]]:
    """Returns the units of each stage, given the first part of every stage after the first; raises `InputError` if a name is unsuitable.

    The name of a block that is cut inside stands for its first part.
    """
    names = [name if name in units else next((unit for unit in units if unit.startswith(f"{name}.")), name) for name in names]
    for name in names:
        if name not in units:
            raise InputError(
                "a stage cannot begin with {name!r}, which is no part of the model; {nearest}parts are {known}",
                name=name,
                nearest=near(name, units),
                known=listed(units),
            )
    edges = [0, *(units.index(name) for name in names), len(units)]
    if any(first >= end for first, end in pairwise(edges)):
        raise wrong("cuts", list(names), f"in the order of the model, after its first part {units[0]!r}, each once")
    return [list(units[first:end]) for first, end in pairwise(edges)]
