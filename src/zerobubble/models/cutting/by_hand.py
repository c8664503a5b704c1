"""Cuts given by the user: names of the first parts of stages, layer counts, or a Megatron layout, such as `E|(t|)*10m|m|m|LL|LL`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate, groupby, pairwise

from zerobubble.arguments import Wanted, wrong
from zerobubble.errors import InputError, near
from zerobubble.export.megatron import spelled_stages
from zerobubble.planning import Plan

ByHand = Sequence[str] | Sequence[int] | str
"""`["model.layers.4", "model.layers.8"]`: the first part of every stage after the first. `[4, 4, 3]`: the number of layers of each stage.
`"Ett|ttt|ttL"`: Megatron's layout."""

CUTS = Wanted(
    "names of parts, numbers of layers, a layout of Megatron or a plan for layers",
    lambda value: isinstance(value, (str, list, tuple, Plan)) and bool(value),
)


def spelled_out(cuts: ByHand | Plan) -> ByHand:
    """Returns the cuts; converts a plan to the names of its first parts, and raises `InputError` if it has no names."""
    if not isinstance(cuts, Plan):
        return cuts
    names = cuts.problem.first_layers
    if not names and cuts.placement.num_stages > 1:
        raise InputError(
            "this plan has no names of the first parts of its stages",
            remedy="create it from named layers, with zerobubble plan --layers and a file written by zerobubble split or "
            "zb.split(model).layers()",
        )
    return names


def stages_by_hand(cuts: ByHand, units: Sequence[str], blocks: frozenset[str], heads: frozenset[str] = frozenset()) -> list[list[str]]:
    """Returns the units of each stage, in the order of `units`, which is topological. `blocks` are the layers, `heads` produce the output.

    Units before the first layer belong to the first stage, those after the last layer to the last stage, and others to the layer before
    them. Raises `InputError` for cuts that do not fit the model, naming its parts.
    """
    if isinstance(cuts, str):
        return stages_by_layout(cuts, units, blocks, heads)
    if all(isinstance(start, str) for start in cuts):
        return _by_names([str(start) for start in cuts], units)
    if all(type(count) is int and count >= 0 for count in cuts):
        return stages_by_counts([int(count) for count in cuts], units, [unit for unit in units if unit in blocks])
    raise wrong("cuts", cuts, "names of parts, numbers of layers or a Megatron layout")


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


def stages_by_layout(layout: str, units: Sequence[str], blocks: Collection[str], heads: Collection[str]) -> list[list[str]]:
    """Returns the units of each stage; `blocks` are the layers, `heads` the units that produce the model's output.

    E stands for all parts before the first layer, t for a layer, m for a layer of multi-token prediction, in its own list after the other
    layers, and L for the parts after the last layer. If several stages have an L, each L is one of the parts that produce the output.
    Raises `InputError` for a layout that does not fit the model, naming its parts.
    """
    stages = spelled_stages(layout)
    _refuse_other_order(layout, stages)
    layers = _layers(layout, stages, units, blocks, heads) if "m" in layout else [unit for unit in units if unit in blocks]
    counts = [stage.count("t") + stage.count("m") for stage in stages]
    if sum("L" in stage for stage in stages) < 2:
        return stages_by_counts(counts, units, layers)
    losses = [stage.count("L") for stage in stages]
    ends = _heads(layout, sum(losses), units[units.index(layers[-1]) + 1 :], heads)
    return stages_by_counts([count + more for count, more in zip(counts, losses, strict=True)], units, layers, ends)


def stages_by_counts(counts: Sequence[int], units: Sequence[str], layers: Sequence[str], heads: Sequence[str] = ()) -> list[list[str]]:
    """Returns the units of each stage, given the number of its layers and of the `heads` after them.

    Units between two layers go with the layer before them, units between two heads with the head after them.
    """
    if sum(counts) != len(layers) + len(heads):
        raise InputError(
            "cuts have {got} layers in total, but the model has {num_layers}: {layers}",
            got=sum(counts) - len(heads),
            num_layers=len(layers),
            layers=listed(layers),
        )
    begins = [units.index(layer) for layer in layers]
    begins += [units.index(before) + 1 for before in (layers[-1], *heads)]
    edges = [0, *(begins[end] for end in list(accumulate(counts))[:-1]), len(units)]
    stages = [list(units[start:end]) for start, end in pairwise(edges)]
    for stage, held in enumerate(stages):
        if not held:
            raise InputError(
                "stage {stage} would hold no part of the model; only the first and the last stage can be without a layer", stage=stage
            )
    return stages


def _refuse_other_order(layout: str, stages: Sequence[str]) -> None:
    letters = "".join(stages)
    if list(letters) != sorted(letters, key="EtmL".index) or letters.count("E") > 1:
        raise InputError("a layout has one E at most, and then t, m and L in this order, got {got!r}", got=layout)


def _layers(layout: str, stages: Sequence[str], units: Sequence[str], blocks: Collection[str], heads: Collection[str]) -> list[str]:
    """Returns the layers t, then the layers m, which have their own list; raises `InputError` if the layout has other numbers of them."""
    letters = "".join(stages)
    num_layers, num_all = letters.count("t"), letters.count("t") + letters.count("m")
    behind = units[next(place for place, unit in enumerate(units) if unit in blocks) :]
    items = [unit for unit in behind if unit in blocks or unit.rpartition(".")[2].isdigit()]
    lists = [(name, len(list(group))) for name, group in groupby(items, key=lambda unit: unit.rpartition(".")[0])]
    if not {num_layers, num_all} <= set(accumulate(count for _, count in lists)) or not set(items[num_all:]) <= set(heads):
        raise InputError(
            "layout {layout!r} has {num_layers} layers t and {num_prediction_layers} layers m of multi-token prediction, "
            "which need a list of their own after the others, but the model's lists are {lists}",
            layout=layout,
            num_layers=num_layers,
            num_prediction_layers=num_all - num_layers,
            lists=", ".join((f"{name!r} of {count}" for name, count in lists)),
            remedy="write t for layers that predict none, or give the names of the parts at which stages begin",
        )
    return items[:num_all]


def _heads(layout: str, num_losses: int, behind: Sequence[str], heads: Collection[str]) -> list[str]:
    """Returns the parts after the last layer that produce the model's output, one per L; raises `InputError` for another number."""
    producers = [unit for unit in behind if unit in heads]
    if len(producers) != num_losses:
        raise InputError(
            "layout {layout!r} distributes {num_losses} losses L over several stages, one for each head of the model, but "
            "its output comes from {num_found} parts after its last layer ({found})",
            layout=layout,
            num_losses=num_losses,
            num_found=len(producers),
            found=listed(producers),
            remedy="write every L in the last stage, or give each prediction its own head, with the same weight if they share it",
        )
    return producers


def listed(units: Sequence[str]) -> str:
    """Lists names; of many, only the first and the last."""
    return ", ".join(map(repr, units)) if len(units) < 8 else f"{units[0]!r}, {units[1]!r} ... {units[-1]!r}"
