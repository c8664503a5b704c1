"""Cuts that the user gives: names of the parts with which stages begin, numbers of layers, or Megatron's layout."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from zerobubble.arguments import Wanted
from zerobubble.errors import InputError, near
from zerobubble.export.megatron import spelled_stages

ByHand = Sequence[str] | Sequence[int] | str
"""`["model.layers.4", "model.layers.8"]`: with what every stage but the first begins. `[4, 4, 3]`: how many layers each stage has.
`"Ett|ttt|ttL"`: Megatron's layout."""

CUTS = Wanted(
    "names of parts, numbers of layers or a layout of Megatron", lambda given: isinstance(given, (str, list, tuple)) and bool(given)
)


def stages_by_hand(given: ByHand, units: Sequence[str], blocks: frozenset[str]) -> list[list[str]]:
    """The units of each stage, in the order of `units`, which is that of their calls; `blocks` are those that are layers.

    Units in front of the first layer belong to the first stage, those behind the last to the last stage, and others to the layer before
    them. Raises `InputError` for what fits the model badly, naming its parts.
    """
    if isinstance(given, str):
        return _by_layout(given, units, blocks)
    if all(isinstance(each, str) for each in given):
        return _by_names([str(each) for each in given], units)
    if all(type(each) is int and each >= 0 for each in given):
        return _by_counts([int(each) for each in given], units, blocks)
    raise InputError(f"cuts are names of parts, numbers of layers or a layout of Megatron, got {given!r:.80}")


def _by_names(names: Sequence[str], units: Sequence[str]) -> list[list[str]]:
    for name in names:
        if name not in units:
            raise InputError(
                f"a stage cannot begin with {name!r}, which is no part of the model; {near(name, units)}parts are {_told(units)}"
            )
    edges = [0, *(units.index(name) for name in names), len(units)]
    if any(first >= end for first, end in pairwise(edges)):
        raise InputError(f"cuts must be in the order of the model, behind its first part {units[0]!r}, and each once, got {list(names)}")
    return [list(units[first:end]) for first, end in pairwise(edges)]


def _by_counts(counts: Sequence[int], units: Sequence[str], blocks: frozenset[str]) -> list[list[str]]:
    layers = [unit for unit in units if unit in blocks]
    if sum(counts) != len(layers):
        raise InputError(f"cuts have {sum(counts)} layers together, and the model has {len(layers)}: {_told(layers)}")
    first, ends = units.index(layers[0]), list(accumulate(counts))
    edges = [units.index(layers[end]) if end < len(layers) else units.index(layers[-1]) + 1 for end in ends[:-1]]
    edges = [max(edge, first) for edge in edges]
    stages = [list(units[start:end]) for start, end in pairwise([0, *edges, len(units)])]
    for stage, held in enumerate(stages):
        if not held:
            raise InputError(f"stage {stage} would hold no part of the model; only the first and the last stage can be without a layer")
    return stages


def _by_layout(layout: str, units: Sequence[str], blocks: frozenset[str]) -> list[list[str]]:
    stages = spelled_stages(layout)
    if "m" in layout:
        raise InputError(
            f"layout {layout!r} has layers m, which predict further tokens, and zb.split knows layers of one kind; leave them out"
        )
    return _by_counts([stage.count("t") for stage in stages], units, blocks)


def _told(units: Sequence[str]) -> str:
    return ", ".join(map(repr, units)) if len(units) < 8 else f"{units[0]!r}, {units[1]!r} ... {units[-1]!r}"
