"""Cuts by a Megatron layout, such as `E|(t|)*10m|m|m|LL|LL`, in which each letter stands for parts of the model.

E stands for all parts before the first layer, t for a layer, m for a layer of multi-token prediction, in its own list after the other
layers, and L for the parts after the last layer. If several stages have an L, each L is one of the parts that produce the model's output.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate, groupby, pairwise

from zerobubble.errors import InputError
from zerobubble.export.megatron import spelled_stages


def stages_by_layout(layout: str, units: Sequence[str], blocks: Collection[str], heads: Collection[str]) -> list[list[str]]:
    """Returns the units of each stage; `blocks` are the layers, `heads` the units that produce the model's output.

    Raises `InputError` for a layout that does not fit the model, naming its parts.
    """
    stages = spelled_stages(layout)
    _refuse_other_order(layout, stages)
    layers = _layers(layout, stages, units, blocks, heads) if "m" in layout else [unit for unit in units if unit in blocks]
    counts = [stage.count("t") + stage.count("m") for stage in stages]
    if sum("L" in stage for stage in stages) < 2:
        return stages_by_counts(counts, units, layers)
    losses = [stage.count("L") for stage in stages]
    found = _heads(layout, sum(losses), units[units.index(layers[-1]) + 1 :], heads)
    return stages_by_counts([count + more for count, more in zip(counts, losses, strict=True)], units, layers, found)


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
    """Returns the layers t and those of multi-token prediction, which have their own list; raises `InputError` on a mismatch."""
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
    found = [unit for unit in behind if unit in heads]
    if len(found) != num_losses:
        raise InputError(
            "layout {layout!r} distributes {num_losses} losses L over several stages, one for each head of the model, but "
            "its output comes from {num_found} parts after its last layer ({found})",
            layout=layout,
            num_losses=num_losses,
            num_found=len(found),
            found=listed(found),
            remedy="write every L in the last stage, or give each prediction its own head, with the same weight if they share it",
        )
    return found


def listed(units: Sequence[str]) -> str:
    """Lists names; of many, only the first and the last."""
    return ", ".join(map(repr, units)) if len(units) < 8 else f"{units[0]!r}, {units[1]!r} ... {units[-1]!r}"
