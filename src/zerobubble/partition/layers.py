"""Layers and what a slice of them costs as a stage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import groupby, pairwise
from typing import Any

from zerobubble.arguments import Wanted, each, optional, require, require_amount, takes
from zerobubble.costs import FUSED, KEPT, Costs, Limits
from zerobubble.errors import InputError, reading, shown, whole
from zerobubble.ir import Placement
from zerobubble.partition.speeds import as_links, as_speeds, at_links, at_speed, speed_of

Cuts = tuple[int, ...]
"""Where a model of L layers is cut into S stages: the first layer of each stage but the first, S - 1 ascending numbers in 1 to L - 1."""


@dataclass(frozen=True, slots=True)
class Layer:
    """What one layer costs: ns of F, B and W for a microbatch, bytes held from F until B and from B until W.

    `parameters_bytes` stay on the layer's rank throughout: parameters, gradients, optimizer state. `output_comm` is the time in ns
    of the message with its output, or with the gradient back, when the next layer is on another rank. `name` is what the model calls it,
    as in `zb.split(cuts=...)`. Layers in a row with the same `block` are parts of one, such as its attention and its MLP, and `name` is
    what the block calls them; `join_blocks` puts them together. `fused` is the time in ns of a BW, if it takes less than B and W, as under
    tensor parallelism (see `Costs.fused`); 0 if it takes as long.
    """

    forward: int
    backward: int
    weight: int
    held_after_f: int
    held_after_b: int
    parameters_bytes: int = 0
    output_comm: int = 0
    name: str = ""
    block: str = ""
    fused: int = 0

    def __post_init__(self) -> None:
        for column in NUMBERS:
            require_amount(f"{column} of a layer", getattr(self, column))
        for word in WORDS:
            require(f"{word} of a layer", getattr(self, word), LINE)

    @property
    def time(self) -> int:
        """ns of F, B and W together."""
        return self.forward + self.backward + self.weight

    def time_at(self, speed: float) -> int:
        """ns of F, B and W together on a rank of this speed. Each is rounded, so that the times of a stage are sums over its layers."""
        return at_speed(self.forward, speed) + at_speed(self.backward, speed) + at_speed(self.weight, speed)

    @property
    def both(self) -> int:
        """ns of B and W in one pass."""
        return self.fused or self.backward + self.weight

    @property
    def full_name(self) -> str:
        """The name in the whole model, such as `layers.0.mlp` of `mlp` in block `layers.0`; empty where there is none."""
        return f"{self.block}.{self.name}" if self.block and self.name else self.name


NUMBERS = tuple(column.name for column in fields(Layer) if column.type == "int")
"""What of a `Layer` is a number, of ns or bytes."""
WORDS = tuple(column.name for column in fields(Layer) if column.type == "str")
"""What of a `Layer` is text."""
LINE = Wanted("one line of printable text", lambda value: isinstance(value, str) and value.isprintable())


@takes(layers=each(Layer))
def join_blocks(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """The layers with the parts of each block as one layer, named as the block; a layer that is no part of one stays as it is."""
    grouped = groupby(enumerate(layers), key=lambda numbered: numbered[1].block or numbered[0])
    blocks = ([layer for _, layer in parts] for _, parts in grouped)
    return tuple(as_one(parts, parts[0].block) if parts[0].block else parts[0] for parts in blocks)


def as_one(layers: Sequence[Layer], name: str, block: str = "") -> Layer:
    """Layers in a row as one of this name and block, whose message is that of the last."""
    sums = {column: sum(getattr(layer, column) for layer in layers) for column in NUMBERS}
    return Layer(**sums | {"output_comm": layers[-1].output_comm, FUSED: fused_time(layers)}, name=name, block=block)


def fused_time(layers: Sequence[Layer]) -> int:
    """ns of a BW through all `layers`; 0 if it takes as long as B and W in each."""
    return sum(layer.both for layer in layers) if any(layer.fused for layer in layers) else 0


def slices(layers: Sequence[Layer], cuts: Cuts) -> list[Sequence[Layer]]:
    """The layers of each stage; raises `InputError` unless every stage gets at least one."""
    edges = (0, *cuts, len(layers))
    if any(first >= end for first, end in pairwise(edges)):
        raise InputError(f"cuts must ascend from 1 to {len(layers) - 1}, one layer to a stage at least, got {cuts}")
    return [layers[first:end] for first, end in pairwise(edges)]


@takes(layers=each(Layer), placement=optional(Placement))
def stage_costs(
    layers: Sequence[Layer],
    cuts: Cuts,
    placement: Placement | None = None,
    speeds: Sequence[float] = (),
    links: Sequence[float] = (),
) -> Costs:
    """The costs of the stages: sums over their layers, parameters included; a stage's messages are those of its last layer.

    If the ranks of `placement` have `speeds`, as in `cut_layers`, or the `links` between them, as in `zb.plan`, the costs are
    those of the stages there, and for that placement only. Raises `InputError` for cuts that leave a stage without a layer, for bad speeds,
    and for speeds without a placement.
    """
    stages = slices(layers, cuts)
    if speeds and placement is None:
        raise InputError(f"speeds are those of ranks, got {shown(speeds)} without a placement: give the placement of the stages, too")
    if links and placement is None:
        raise InputError(f"links are those between ranks, got {shown(links)} without a placement: give the placement of the stages, too")
    known = () if placement is None else as_speeds(speeds, placement.num_ranks)
    home = range(len(stages)) if placement is None else placement.routes[0]
    of_stages = [speed_of(rank, known) for rank in home]

    def column(name: str) -> tuple[int, ...]:
        return tuple(sum(getattr(layer, name) for layer in stage) for stage in stages)

    def times(name: str) -> tuple[int, ...]:
        paired = zip(stages, of_stages, strict=True)
        return tuple(sum(at_speed(getattr(layer, name), speed) for layer in stage) for stage, speed in paired)

    comm = tuple(stage[-1].output_comm for stage in stages[:-1])
    kept = column(KEPT)
    passes = (times("forward"), times("backward"), times("weight"), comm, column("held_after_f"), column("held_after_b"))
    costs = Costs(*passes, placement=placement if known else None, further=((KEPT, kept),) if any(kept) else ())
    costs = costs.with_columns(fused=times("both")) if fused_time(layers) else costs
    return costs if placement is None else at_links(costs, placement, as_links(links, placement.num_ranks))


def parameter_bytes(layers: Sequence[Layer], cuts: Cuts, placement: Placement) -> tuple[int, ...]:
    """What the layers of each rank keep there throughout, in bytes."""
    kept = [0] * placement.num_ranks
    for rank, stage in zip(placement.routes[0], slices(layers, cuts), strict=True):
        kept[rank] += sum(layer.parameters_bytes for layer in stage)
    return tuple(kept)


def activation_limits(layers: Sequence[Layer], cuts: Cuts, placement: Placement, limits: Limits) -> Limits:
    """What `limits` on all memory leave for activations; raises `InputError` naming the ranks where nothing is left."""
    kept = parameter_bytes(layers, cuts, placement)
    least = int(any(layer.held_after_f or layer.held_after_b for layer in layers))
    left = [limit - held for limit, held in zip(limits.memory, kept, strict=True)]
    if full := [f"rank {rank} by {-room} bytes" for rank, room in enumerate(left) if room < least]:
        raise InputError(f"parameters alone fill the memory: {', '.join(full)}; use more ranks, or give their layers to others")
    return Limits(tuple(max(1, room) for room in left))


def layers_to_dict(layers: Iterable[Layer]) -> dict[str, Any]:
    """The JSON form, in ns and bytes; `layers_from_dict` reads it back."""
    return {"format": "zerobubble layers 1", "layers": [_layer_dict(layer) for layer in layers]}


def _layer_dict(layer: Layer) -> dict[str, Any]:
    """The layer by its fields, without the text and the time of BW that it does not have."""
    return {name: value for name, value in asdict(layer).items() if value or (name in NUMBERS and name != FUSED)}


def layers_from_dict(data: dict[str, Any]) -> tuple[Layer, ...]:
    """Read the JSON form; raises `ParseError` when a part is missing or malformed."""
    with reading("layers", data):
        return tuple(Layer(**_fields_of(layer)) for layer in data["layers"])


def _fields_of(layer: Any) -> dict[str, Any]:
    return {name: value if name in WORDS else whole(value) for name, value in dict(layer).items()}
