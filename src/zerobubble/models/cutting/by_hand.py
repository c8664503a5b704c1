"""Cuts that the user gives: names of the parts with which stages begin, numbers of layers, or Megatron's layout."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from zerobubble.arguments import Wanted
from zerobubble.errors import InputError, near
from zerobubble.models.cutting.by_layout import stages_by_counts, stages_by_layout, told
from zerobubble.planning import Plan

ByHand = Sequence[str] | Sequence[int] | str
"""`["model.layers.4", "model.layers.8"]`: with what every stage but the first begins. `[4, 4, 3]`: how many layers each stage has.
`"Ett|ttt|ttL"`: Megatron's layout."""

CUTS = Wanted(
    "names of parts, numbers of layers, a layout of Megatron or a plan for layers",
    lambda given: isinstance(given, (str, list, tuple, Plan)) and bool(given),
)


def spelled_out(given: ByHand | Plan) -> ByHand:
    """The cuts, those of a plan by their names; raises `InputError` for a plan that holds none."""
    if not isinstance(given, Plan):
        return given
    names = given.problem.first_layers
    if not names and given.placement.num_stages > 1:
        raise InputError(
            "this plan has no names of the parts with which its stages begin: make it of layers that have names, with zerobubble plan "
            "--layers and a file that zerobubble split or zb.split(model).layers() gives"
        )
    return names


def stages_by_hand(given: ByHand, units: Sequence[str], blocks: frozenset[str], heads: frozenset[str] = frozenset()) -> list[list[str]]:
    """The units of each stage, in the order of `units`, each of which is behind those whose output it takes.

    `blocks` are those that are layers, `heads` those that the model's output comes from.

    Units in front of the first layer belong to the first stage, those behind the last to the last stage, and others to the layer before
    them. Raises `InputError` for what fits the model badly, naming its parts.
    """
    if isinstance(given, str):
        return stages_by_layout(given, units, blocks, heads)
    if all(isinstance(each, str) for each in given):
        return _by_names([str(each) for each in given], units)
    if all(type(each) is int and each >= 0 for each in given):
        return stages_by_counts([int(each) for each in given], units, [unit for unit in units if unit in blocks])
    raise InputError(f"cuts are names of parts, numbers of layers or a layout of Megatron, got {given!r:.80}")


def _by_names(names: Sequence[str], units: Sequence[str]) -> list[list[str]]:
    """The units of each stage, where those behind the first begin with these; raises `InputError` where they cannot.

    A block that is cut inside begins with its first part.
    """
    names = [name if name in units else next((unit for unit in units if unit.startswith(f"{name}.")), name) for name in names]
    for name in names:
        if name not in units:
            raise InputError(
                f"a stage cannot begin with {name!r}, which is no part of the model; {near(name, units)}parts are {told(units)}"
            )
    edges = [0, *(units.index(name) for name in names), len(units)]
    if any(first >= end for first, end in pairwise(edges)):
        raise InputError(f"cuts must be in the order of the model, behind its first part {units[0]!r}, and each once, got {list(names)}")
    return [list(units[first:end]) for first, end in pairwise(edges)]
