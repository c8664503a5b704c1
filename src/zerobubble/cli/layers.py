"""The layers of `plan --layers`: how they are read from a file, the memory limits of ranks that share them, and their cut in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, fields
from itertools import pairwise
from typing import Any

from zerobubble.arguments import NUMBER, WHOLE
from zerobubble.cli.files import read_json
from zerobubble.costs import Limits
from zerobubble.errors import ParseError
from zerobubble.partition import Cuts, Layer
from zerobubble.planning import LayersPlan
from zerobubble.planning.problem import RANK_BYTES
from zerobubble.planning.reasons import percent
from zerobubble.units import MOST, MOST_MS, NS_PER_MS, bounded

_TIMES = ("forward", "backward", "weight")
_KEYS = tuple(column.name for column in fields(Layer))
_REQUIRED = tuple(column.name for column in fields(Layer) if column.default is MISSING)


def read_layers(file: str, comm: float, held: float) -> tuple[Layer, ...]:
    """The layers in `file`: their JSON form, in ns and bytes, or a list of [F, B, W] in ms, each layer saving as much as any other.

    `comm` in ms and `held` are for such a list. Raises `InputError` naming the file, and the layer that is wrong.
    """
    return read_json(file, "layers", lambda data: _layers(data, comm, held))


def _layers(data: Any, comm: float, held: float) -> tuple[Layer, ...]:
    if isinstance(data, list):
        return tuple(_from_times(number, row, comm, held) for number, row in enumerate(data))
    if not isinstance(data, dict) or not isinstance(data.get("layers"), list):
        raise ParseError("give a list of [F, B, W] in ms, a row per layer, or the JSON form of layers")
    return tuple(_from_form(number, layer) for number, layer in enumerate(data["layers"]))


def _from_times(number: int, row: Any, comm: float, held: float) -> Layer:
    if not isinstance(row, list) or len(row) != len(_TIMES):
        raise ParseError(f"layer {number} needs three times in ms, [F, B, W], got {row!r:.60}")
    for name, value in zip(_TIMES, row, strict=True):
        if not NUMBER.accepts(value) or not 0 <= value <= MOST_MS:
            raise ParseError(f"{name} of layer {number} must be {bounded('a finite number of ms >= 0', value, MOST_MS)}, got {value!r:.60}")
    forward, backward, weight, link = (round(value * NS_PER_MS) for value in (*row, comm))
    return Layer(forward, backward, weight, RANK_BYTES, round(held * RANK_BYTES), output_comm=link)


def _from_form(number: int, data: Any) -> Layer:
    if not isinstance(data, dict):
        raise ParseError(f"layer {number} must be an object, got {data!r:.60}")
    lacking, unknown = [key for key in _REQUIRED if key not in data], [key for key in data if key not in _KEYS]
    if lacking or unknown:
        raise ParseError(f"layer {number} {f'lacks {lacking[0]!r}' if lacking else f'has {unknown[0]!r}, which no layer has'}")
    for name, value in data.items():
        if not WHOLE.accepts(value) or not 0 <= value <= MOST:
            limit = bounded("a whole number >= 0 of ns or bytes", value, MOST)
            raise ParseError(f"{name} of layer {number} must be {limit}, got {value!r:.60}")
    return Layer(**data)


def equal_limits(layers: Sequence[Layer], num_ranks: int, memory: float) -> Limits:
    """What each rank may hold, in bytes: an equal share of all parameters, and of the activations of `memory` microbatches."""
    parameters, held = (sum(getattr(layer, name) for layer in layers) for name in ("parameters_bytes", "held_after_f"))
    return Limits((max(1, round((parameters + memory * held) / num_ranks)),) * num_ranks)


def cuts_dict(found: LayersPlan) -> dict[str, object]:
    """Both cuts, the gain as a share of the time of the best plan on balanced cuts, and which placements cannot be cut."""
    return {"cuts": found.cuts, "balanced_cuts": found.balanced_cuts, "gain": found.gain, "left_out": found.left_out}


def cuts_text(found: LayersPlan, num_layers: int) -> str:
    """Where the winner is cut and what that gains, and which placements cannot be cut."""
    cut = f"The winner has stages of {_sizes(found.cuts, num_layers)} layers"
    if found.cuts == found.balanced_cuts:
        searched_on = f"; searching on saved {percent(found.gain)}" if found.gain > 0 else ""
        gain = f"no plan on other cuts was found to be shorter than on these balanced ones{searched_on}"
    else:
        gain = f"{percent(found.gain)} shorter than the best plan on balanced cuts, stages of {_sizes(found.balanced_cuts, num_layers)}"
    rest = "Other placements have balanced cuts. The bound and the reason of a placement hold for its cuts."
    return "\n".join([f"{cut}: {gain}.", rest, *(f"Left out: {reason}" for reason in found.left_out)])


def _sizes(cuts: Cuts, num_layers: int) -> str:
    return " ".join(str(end - first) for first, end in pairwise((0, *cuts, num_layers)))
