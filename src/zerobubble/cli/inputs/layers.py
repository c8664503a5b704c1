"""The layers of `plan --layers`: how they are read from a file, the memory limits of ranks that share them, and their cut in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, fields
from itertools import pairwise
from typing import Any

from zerobubble.arguments import require, require_amount, require_ms
from zerobubble.cli.inputs.files import read_json
from zerobubble.costs import Limits
from zerobubble.errors import ParseError
from zerobubble.partition import Cuts, Layer, cut_layers
from zerobubble.partition.layers import LINE, NUMBERS, WORDS
from zerobubble.planning import LayersPlan
from zerobubble.planning.problem.workload import RANK_BYTES
from zerobubble.planning.reasons import percent
from zerobubble.units import NS_PER_MS, ms, show_bytes, show_ms

_TIMES = ("forward", "backward", "weight")
_KEYS = tuple(column.name for column in fields(Layer))
_REQUIRED = tuple(column.name for column in fields(Layer) if column.default is MISSING)


def read_layers(file: str, comm: float, held: float, *, need_bytes: bool = False) -> tuple[Layer, ...]:
    """The layers in `file`: their JSON form, in ns and bytes, or a list of [F, B, W] in ms, each layer saving as much as any other.

    `comm` in ms and `held` are for such a list. Raises `InputError` naming the file, and the layer that is wrong; for such a list where
    bytes are needed.
    """
    return read_json(file, "layers", lambda data: _layers(data, comm, held, need_bytes))


def _layers(data: Any, comm: float, held: float, need_bytes: bool) -> tuple[Layer, ...]:
    if isinstance(data, list) and need_bytes:
        raise ParseError("a list of times tells no bytes: give --memory in microbatches, or the JSON form of layers, which has their bytes")
    if isinstance(data, list):
        return tuple(_from_times(number, row, comm, held) for number, row in enumerate(data))
    if not isinstance(data, dict) or not isinstance(data.get("layers"), list):
        raise ParseError("give a list of [F, B, W] in ms, a row per layer, or the JSON form of layers")
    return tuple(_from_form(number, layer) for number, layer in enumerate(data["layers"]))


def _from_times(number: int, row: Any, comm: float, held: float) -> Layer:
    if not isinstance(row, list) or len(row) != len(_TIMES):
        raise ParseError(f"layer {number} needs three times in ms, [F, B, W], got {row!r:.60}")
    for name, value in zip(_TIMES, row, strict=True):
        require_ms(f"{name} of layer {number}", value, "a finite number of ms >= 0")
    forward, backward, weight, link = (round(value * NS_PER_MS) for value in (*row, comm))
    return Layer(forward, backward, weight, RANK_BYTES, round(held * RANK_BYTES), output_comm=link)


def _from_form(number: int, data: Any) -> Layer:
    if not isinstance(data, dict):
        raise ParseError(f"layer {number} must be an object, got {data!r:.60}")
    lacking, unknown = [key for key in _REQUIRED if key not in data], [key for key in data if key not in _KEYS]
    if lacking or unknown:
        raise ParseError(f"layer {number} {f'lacks {lacking[0]!r}' if lacking else f'has {unknown[0]!r}, which no layer has'}")
    for name, value in data.items():
        if name in WORDS:
            require(f"{name} of layer {number}", value, LINE)
        if name in NUMBERS:
            require_amount(f"{name} of layer {number}", value)
    return Layer(**data)


def equal_limits(layers: Sequence[Layer], num_ranks: int, memory: float) -> Limits:
    """What each rank may hold, in bytes: an equal share of all parameters, and of the activations of `memory` microbatches."""
    parameters, held = (sum(getattr(layer, name) for layer in layers) for name in ("parameters_bytes", "held_after_f"))
    return Limits((max(1, round((parameters + memory * held) / num_ranks)),) * num_ranks)


def cuts_dict(found: LayersPlan, parts: Sequence[Layer], limits: Limits | None) -> dict[str, object]:
    """Both cuts, the gain as a share of the time of the best plan on balanced cuts, which placements have none, and the winner's cut."""
    figures = {
        "slowest_ms": ms(found.cut.slowest),
        "excess": found.cut.excess,
        "bound_ms": ms(found.cut.bound),
        "reason": found.cut.reason,
        "heaviest": found.cut.heaviest_text,
        "excess_inside_blocks": _excess_inside(found, parts, limits),
        "rank_bytes": found.rank_bytes,
    }
    told = {"cuts": found.cuts, "balanced_cuts": found.balanced_cuts, "gain": found.gain, "left_out": found.left_out}
    return {**told, "cut": figures}


def cuts_text(found: LayersPlan, parts: Sequence[Layer], limits: Limits | None) -> str:
    """Where the winner is cut and what that gains, how good the cut is, what cuts inside blocks would give, and who cannot be cut."""
    return "\n".join(
        [
            f"The winner has stages of {_sizes(found.cuts, len(found.cut.layers))} layers: {_gain(found)}.",
            f"Its slowest rank takes {show_ms(found.cut.slowest)} for a microbatch, {found.cut.excess:.3f} x an even share; no cut on this "
            f"placement is below {found.cut.least_excess:.3f} x: {found.cut.reason}.",
            f"{found.cut.heaviest_text}.",
            *_inside(found, parts, limits),
            *_bytes(found, limits),
            "Other placements have balanced cuts. The bound and the reason of a placement hold for its cuts.",
            *(f"Left out: {reason}" for reason in found.left_out),
        ]
    )


def _gain(found: LayersPlan) -> str:
    if found.cuts != found.balanced_cuts:
        sizes = _sizes(found.balanced_cuts, len(found.cut.layers))
        return f"{percent(found.gain)} shorter than the best plan on balanced cuts, stages of {sizes}"
    searched_on = f"; searching on saved {percent(found.gain)}" if found.gain > 0 else ""
    return f"no plan on other cuts was found to be shorter than on these balanced ones{searched_on}"


def _excess_inside(found: LayersPlan, parts: Sequence[Layer], limits: Limits | None) -> float | None:
    """How many times an even share the slowest rank would take with the best cuts inside blocks; None where there are no blocks to cut."""
    if len(parts) == len(found.cut.layers):
        return None
    return cut_layers(parts, found.cut.placement, limits).excess


def _inside(found: LayersPlan, parts: Sequence[Layer], limits: Limits | None) -> list[str]:
    excess = _excess_inside(found, parts, limits)
    if excess is None or excess >= found.cut.excess:
        return []
    return [f"Cuts inside blocks bring the slowest rank to {excess:.3f} x an even share: give --inside-blocks."]


def _bytes(found: LayersPlan, limits: Limits | None) -> list[str]:
    """What the fullest rank holds, where bytes are limited."""
    if limits is None or not any(layer.parameters_bytes for layer in found.cut.layers):
        return []
    rank, (parameters, activations) = max(enumerate(found.rank_bytes), key=lambda held: sum(held[1]))
    room = f"of {show_bytes(limits.memory[rank])}, {show_bytes(parameters)} of them for parameters"
    return [f"The fullest rank, {rank}, holds {show_bytes(parameters + activations)} {room} with gradients and optimizer state."]


def _sizes(cuts: Cuts, num_layers: int) -> str:
    return " ".join(str(end - first) for first, end in pairwise((0, *cuts, num_layers)))
