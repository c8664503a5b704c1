"""Layers, and the costs of slices of them as stages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import groupby, pairwise
from typing import Any

from zerobubble.arguments import Wanted, each, optional, require, require_amount, takes
from zerobubble.costs import FUSED, KEPT, Costs, Limits
from zerobubble.errors import InputError, reading, whole
from zerobubble.ir import Placement
from zerobubble.partition.speeds import Speeds, as_links, as_speeds, at_links, at_speed, speed_of

FORM = "zerobubble layers 1"
"""The format of the JSON form of layers."""
Cuts = tuple[int, ...]
"""The first layer of each stage except the first: S - 1 ascending numbers in 1 to L - 1 for S stages of L layers."""
ADAM_BYTES, MASTER_BYTES = 8, 4
"""Bytes per trained element: Adam's two moments in float32, and the float32 copy that is trained instead of an element with 16 bits."""


def adam_bytes(element: int) -> int:
    """Returns the bytes of Adam for an element of a parameter that is stored in `element` bytes."""
    return ADAM_BYTES + (MASTER_BYTES if element < MASTER_BYTES else 0)


@takes()
@dataclass(frozen=True, slots=True)
class Layer:
    """The costs of a layer, for one microbatch.

    Attributes:
        forward: Time of F in ns.
        backward: Time of B in ns.
        weight: Time of W in ns.
        held_after_f: Bytes held from F until B.
        held_after_b: Bytes held from B until W.
        parameters_bytes: Bytes that are always held: parameters, gradients, optimizer state.
        output_comm: Time in ns of the message with the output, or the gradient back, if the next layer is on another rank.
        name: The name of the module, as in `zb.split(cuts=...)`.
        block: The block of which the layer is a part, such as attention or MLP; empty for a whole layer. Consecutive layers with the same
            `block` have names relative to it; `join_blocks` joins them.
        fused: Time of BW in ns if it takes less than B and W, as under tensor parallelism (see `Costs.fused`), else 0.
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
        """Returns the ns of F, B and W on a rank of relative `speed`. Each is rounded, so the times of a stage are sums over its layers."""
        return at_speed(self.forward, speed) + at_speed(self.backward, speed) + at_speed(self.weight, speed)

    @property
    def both(self) -> int:
        """ns of B and W in one pass."""
        return self.fused or self.backward + self.weight

    @property
    def full_name(self) -> str:
        """The name in the model, such as `layers.0.mlp` of `mlp` in block `layers.0`; empty without a name."""
        return f"{self.block}.{self.name}" if self.block and self.name else self.name


NUMBERS = tuple(column.name for column in fields(Layer) if column.type == "int")
"""The fields of a `Layer` that are numbers of ns or bytes."""
WORDS = tuple(column.name for column in fields(Layer) if column.type == "str")
"""The fields of a `Layer` that are text."""
LINE = Wanted("one line of printable text", lambda value: isinstance(value, str) and value.isprintable())


@takes(layers=each(Layer))
def join_blocks(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """Joins the parts of each block among `layers` into one layer, named after the block. Other layers are unchanged."""
    grouped = groupby(enumerate(layers), key=lambda numbered: numbered[1].block or numbered[0])
    blocks = ([layer for _, layer in parts] for _, parts in grouped)
    return tuple(as_one(parts, parts[0].block) if parts[0].block else parts[0] for parts in blocks)


def as_one(layers: Sequence[Layer], name: str, block: str = "") -> Layer:
    """Joins consecutive layers into one with this name and block, and the message of the last."""
    sums = {column: sum(getattr(layer, column) for layer in layers) for column in NUMBERS}
    return Layer(**sums | {"output_comm": layers[-1].output_comm, FUSED: fused_time(layers)}, name=name, block=block)


def fused_time(layers: Sequence[Layer]) -> int:
    """Returns the ns of BW through all `layers`; 0 if it takes as long as B and W in each."""
    return sum(layer.both for layer in layers) if any(layer.fused for layer in layers) else 0


@takes()
def slices(layers: Sequence[Layer], cuts: Cuts) -> list[Sequence[Layer]]:
    """Returns the `layers` of each stage; `cuts` are the indices at which stages begin, except the first.

    Raises `InputError` unless every stage has at least one layer.
    """
    edges = (0, *cuts, len(layers))
    if any(first >= end for first, end in pairwise(edges)):
        raise InputError(
            "cuts must ascend from 1 to {most}, with at least one layer per stage, got {cuts}", most=len(layers) - 1, cuts=cuts
        )
    return [layers[first:end] for first, end in pairwise(edges)]


@takes(layers=each(Layer), placement=optional(Placement))
def stage_costs(
    layers: Sequence[Layer],
    cuts: Cuts,
    placement: Placement | None = None,
    speeds: Sequence[float] = (),
    links: Sequence[float] = (),
) -> Costs:
    """Returns the costs of the stages into which `cuts` divide `layers`: sums over layers, including parameters.

    The message of a stage is the message of its last layer.

    With `speeds` of the ranks of `placement`, as in `cut_layers`, or `links` between them, as in `zb.plan`, the costs hold on that
    placement only. Raises `InputError` for a stage without layers, for invalid speeds, and for speeds without a placement.
    """
    stages = slices(layers, cuts)
    for argument, values in (("speeds", speeds), ("links", links)):
        if values and placement is None:
            raise InputError(
                "{argument} {got!v} need a placement", argument=argument, got=values, remedy="give the placement of the stages"
            )
    home: Sequence[int] = range(len(stages))
    relative: Speeds = ()
    if placement is not None:
        home, relative = placement.routes[0], as_speeds(speeds, placement.num_ranks)
    of_stages = [speed_of(rank, relative) for rank in home]

    def column(name: str) -> tuple[int, ...]:
        return tuple(sum(getattr(layer, name) for layer in stage) for stage in stages)

    def times(name: str) -> tuple[int, ...]:
        paired = zip(stages, of_stages, strict=True)
        return tuple(sum(at_speed(getattr(layer, name), speed) for layer in stage) for stage, speed in paired)

    comm = tuple(stage[-1].output_comm for stage in stages[:-1])
    kept = column(KEPT)
    passes = (times("forward"), times("backward"), times("weight"), comm, column("held_after_f"), column("held_after_b"))
    costs = Costs(*passes, placement=placement if relative else None, further=((KEPT, kept),) if any(kept) else ())
    costs = costs.with_columns(fused=times("both")) if fused_time(layers) else costs
    return costs if placement is None else at_links(costs, placement, as_links(links, placement.num_ranks))


@takes()
def parameter_bytes(layers: Sequence[Layer], cuts: Cuts, placement: Placement) -> tuple[int, ...]:
    """Returns the bytes that `layers`, cut into stages by `cuts` and put on ranks by `placement`, always hold on each rank."""
    kept = [0] * placement.num_ranks
    for rank, stage in zip(placement.routes[0], slices(layers, cuts), strict=True):
        kept[rank] += sum(layer.parameters_bytes for layer in stage)
    return tuple(kept)


@takes()
def activation_limits(layers: Sequence[Layer], cuts: Cuts, placement: Placement, limits: Limits) -> Limits:
    """Returns the memory that `limits` on all memory leave for activations next to the parameters of `layers`.

    `cuts` divide the layers into stages and `placement` puts these on ranks. Raises `InputError` with the ranks that have none.
    """
    kept = parameter_bytes(layers, cuts, placement)
    least = int(any(layer.held_after_f or layer.held_after_b for layer in layers))
    left = [limit - held for limit, held in zip(limits.memory, kept, strict=True)]
    if full := [f"rank {rank} by {-free} bytes" for rank, free in enumerate(left) if free < least]:
        raise InputError(
            "parameters alone exceed the memory: {full}; {remedy}", full=", ".join(full), remedy="use more ranks, or move layers to others"
        )
    return Limits(tuple(max(1, free) for free in left))


@takes()
def layers_to_dict(layers: Iterable[Layer]) -> dict[str, Any]:
    """Returns the JSON form of `layers`, in ns and bytes. `layers_from_dict` reads it."""
    # Empty text, and an unset time of BW, are left out.
    fields = ({name: value for name, value in asdict(layer).items() if value or (name in NUMBERS and name != FUSED)} for layer in layers)
    return {"format": FORM, "layers": list(fields)}


@takes()
def layers_from_dict(data: dict[str, Any]) -> tuple[Layer, ...]:
    """Reads `data`, as `layers_to_dict` returns it. Raises `ParseError` if a part is missing or malformed."""
    with reading("layers", data):
        return tuple(Layer(**_fields_of(layer)) for layer in data["layers"])


def _fields_of(layer: Any) -> dict[str, Any]:
    return {name: value if name in WORDS else whole(value) for name, value in dict(layer).items()}
