"""Sharded weights as an axis of a plan: their gathered bytes, the memory for them, and the rate of gathers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from zerobubble.arguments import NUMBER, WHOLE, each, either, optional, require, require_amount, takes, wrong
from zerobubble.display import Displayed
from zerobubble.errors import InputError, reading, whole
from zerobubble.ir import Placement
from zerobubble.limits import MAX_LIMIT
from zerobubble.partition import Layer
from zerobubble.partition.layers import Cuts
from zerobubble.units import NS_PER_S, show_bytes


@takes()
@dataclass(frozen=True, slots=True, repr=False)
class Sharded(Displayed):
    """Weights that FSDP2 shards.

    Attributes:
        weights: Gathered bytes of a rank, shared equally by its stages; or of each stage.
        memory: A rank's memory for gathered weights in bytes; None if all its stages may stay. Activations have their own memory.
        bytes_per_second: How much a rank gathers per second; None if gathers take no time.
        within: The fraction by which a schedule may be longer than the quickest; among these, the one that gathers least is chosen.

    >>> import zerobubble as zb
    >>> zb.planning.Sharded(weights=12 * 10**9, memory=6 * 10**9, bytes_per_second=50e9)
    <Sharded weights of 12 GB a rank: 6 GB may stay gathered, gathered at 50 GB per second>
    """

    weights: int | tuple[int, ...]
    memory: int | None = None
    bytes_per_second: float | None = None
    within: float = 0.02

    def __post_init__(self) -> None:
        require("weights of Sharded, in bytes,", self.weights, either(WHOLE, each(WHOLE)))
        require("memory of Sharded, in bytes,", self.memory, optional(WHOLE))
        if self.memory is not None:
            require_amount("memory of Sharded, in bytes,", self.memory, MAX_LIMIT)
        require("bytes_per_second of Sharded", self.bytes_per_second, optional(NUMBER))
        require("within of Sharded", self.within, NUMBER)
        if not isinstance(self.weights, int):
            object.__setattr__(self, "weights", tuple(self.weights))
        for size in self.weights if isinstance(self.weights, tuple) else (self.weights,):
            require_amount("weights of Sharded, in bytes,", size)
        if self.bytes_per_second is not None and not 0 < self.bytes_per_second < float("inf"):
            raise wrong("bytes_per_second of Sharded", self.bytes_per_second, "a finite number above 0")
        if not 0 <= self.within <= 1:
            raise wrong("within of Sharded", self.within, "a share in 0 to 1")

    def _summary(self) -> str:
        sizes = f"{show_bytes(self.weights)} a rank" if isinstance(self.weights, int) else f"{show_bytes(sum(self.weights))} in all stages"
        capacity = "all" if self.memory is None else show_bytes(self.memory)
        if self.bytes_per_second is None:
            return f"weights of {sizes}: {capacity} may stay gathered, gathers take no time"
        return f"weights of {sizes}: {capacity} may stay gathered, gathered at {show_bytes(round(self.bytes_per_second))} per second"

    def sizes(self, placement: Placement) -> tuple[int, ...]:
        """The bytes of the weights of each stage of `placement`; raises `InputError` if they are given for other stages."""
        if isinstance(self.weights, int):
            home = placement.routes[0]
            return tuple(self.weights // home.count(rank) for rank in home)
        if len(self.weights) != placement.num_stages:
            raise InputError(
                "the placement {placement!v} has {expected} stages, weights are given for {got}",
                argument="weights",
                got=len(self.weights),
                expected=placement.num_stages,
                placement=placement.name,
                remedy="give those of a rank, or a placement with as many stages",
            )
        return self.weights

    def for_layers(self, layers: Sequence[Layer], cuts: Cuts, placement: Placement) -> Sharded:
        """The same for the stages into which `cuts` divide `layers`, on `placement`.

        `weights` of a rank are an equal share of those of all layers, or there is one number per layer.
        Of a rank's weights, each layer has a part in proportion to its parameters, or the same part if no layer has any. Raises
        `InputError` unless there is one number per layer or per stage.
        """
        if isinstance(self.weights, int):
            sizes = [layer.parameters_bytes for layer in layers]
            known = sizes if any(sizes) else [1] * len(layers)
            total = self.weights * placement.num_ranks
            weights = [total * size // sum(known) for size in known]
        elif len(self.weights) == len(layers):
            weights = list(self.weights)
        else:
            raise InputError(
                "sharded weights of layers are one number per rank, or one for each of {num_layers} layers, got {num_weights}",
                num_layers=len(layers),
                num_weights=len(self.weights),
            )
        edges = (0, *cuts, len(layers))
        return replace(self, weights=tuple(sum(weights[first:end]) for first, end in pairwise(edges)))

    def times(self, placement: Placement) -> tuple[int, ...]:
        """The ns to gather the weights of each stage of `placement`."""
        rate = self.bytes_per_second
        return tuple(0 if rate is None else round(size * NS_PER_S / rate) for size in self.sizes(placement))

    def to_dict(self) -> dict[str, Any]:
        """The JSON form, in bytes, which `from_dict` reads."""
        weights = self.weights if isinstance(self.weights, int) else list(self.weights)
        return {"weights": weights, "memory": self.memory, "bytes_per_second": self.bytes_per_second, "within": self.within}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Sharded:
        """Reads `data`, as `to_dict` returns it; raises `ParseError` for a missing part, and `InputError` for a bad value."""
        with reading("weights in shards", data):
            weights, memory = data["weights"], data["memory"]
            sizes = tuple(map(whole, weights)) if isinstance(weights, list) else whole(weights)
            return cls(sizes, None if memory is None else whole(memory), data["bytes_per_second"], data["within"])
