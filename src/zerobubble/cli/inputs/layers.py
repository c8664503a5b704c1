"""The layers of `plan --layers`: how they are read from a file, and what cuts inside their blocks would give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import Any

from zerobubble.arguments import require, require_amount, require_ms
from zerobubble.cli.inputs.files import read_json
from zerobubble.errors import ParseError
from zerobubble.partition import Layer, cut_layers
from zerobubble.partition.layers import LINE, NUMBERS, WORDS
from zerobubble.planning.layer_plan import CutSavings
from zerobubble.planning.problem.workload import RANK_BYTES
from zerobubble.units import NS_PER_MS

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


def excess_inside_blocks(found: CutSavings, parts: Sequence[Layer]) -> float | None:
    """How many times an even share the slowest rank would take with the best cuts inside blocks; None where there are no blocks to cut."""
    if len(parts) == len(found.cut.layers):
        return None
    return cut_layers(parts, found.cut.placement, found.limits, speeds=found.cut.speeds).excess
