"""Weights that lie in shards, as a part of what is planned: what they take gathered, the room for them, and how fast they come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from zerobubble.arguments import NUMBER, WHOLE, each, either, optional, require, require_amount
from zerobubble.display import Displayed
from zerobubble.errors import InputError, reading, whole
from zerobubble.ir import Placement
from zerobubble.partition import Cuts, Layer
from zerobubble.units import show_bytes

NS_PER_S = 10**9


@dataclass(frozen=True, slots=True, repr=False)
class Sharded(Displayed):
    """Weights that FSDP2 divides, for a plan: `weights` are bytes when gathered, of a rank, whose stages share them, or of each stage.

    `memory` is what a rank has for gathered weights, None where all its stages may stay; activations have memory of their own. A rank
    gathers `bytes_per_second`; None stands for gathers that take no time. Of the schedules that take at most the share `within` longer
    than the quickest, the one that gathers least is chosen.

    >>> import zerobubble as zb
    >>> zb.planning.Sharded(weights=12 * 10**9, memory=6 * 10**9, bytes_per_second=50e9)
    <Sharded weights of 12 GB a rank: 6 GB have room, 50 GB come in a second>
    """

    weights: int | tuple[int, ...]
    memory: int | None = None
    bytes_per_second: float | None = None
    within: float = 0.02

    def __post_init__(self) -> None:
        require("weights of Sharded, in bytes,", self.weights, either(WHOLE, each(WHOLE)))
        require("memory of Sharded, in bytes,", self.memory, optional(WHOLE))
        require("bytes_per_second of Sharded", self.bytes_per_second, optional(NUMBER))
        require("within of Sharded", self.within, NUMBER)
        if not isinstance(self.weights, int):
            object.__setattr__(self, "weights", tuple(self.weights))
        for size in self.weights if isinstance(self.weights, tuple) else (self.weights,):
            require_amount("weights of Sharded, in bytes,", size)
        if self.bytes_per_second is not None and not 0 < self.bytes_per_second < float("inf"):
            raise InputError(f"bytes_per_second of Sharded must be a finite number above 0, got {self.bytes_per_second}")
        if not 0 <= self.within <= 1:
            raise InputError(f"within of Sharded must be a share in 0 to 1, got {self.within}")

    def _summary(self) -> str:
        sizes = f"{show_bytes(self.weights)} a rank" if isinstance(self.weights, int) else f"{show_bytes(sum(self.weights))} in all stages"
        room = "all" if self.memory is None else show_bytes(self.memory)
        comes = "no time" if self.bytes_per_second is None else f"{show_bytes(round(self.bytes_per_second))} come in a second"
        return f"weights of {sizes}: {room} have room, " + (comes if self.bytes_per_second is not None else f"gathers take {comes}")

    def sizes(self, placement: Placement) -> tuple[int, ...]:
        """The bytes of each stage's weights; raises `InputError` where they are given for other stages."""
        if isinstance(self.weights, int):
            home = placement.routes[0]
            return tuple(self.weights // home.count(rank) for rank in home)
        if len(self.weights) != placement.num_stages:
            raise InputError(
                f"the placement {placement.name!r} has {placement.num_stages} stages, weights are given for {len(self.weights)}: "
                "give those of a rank, or name a placement with as many stages"
            )
        return self.weights

    def of_layers(self, layers: Sequence[Layer], cuts: Cuts, placement: Placement) -> Sharded:
        """The same for the stages of a cut: `weights` of a rank are an equal part of those of all layers, or there is one for each layer.

        Of a rank's, each layer has as large a part as it has parameters; the same for all if none says. Raises `InputError` for as
        many numbers as there are neither layers nor stages.
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
                f"weights of layers in shards are those of a rank, or of each of {len(layers)} layers, got {len(self.weights)}"
            )
        edges = (0, *cuts, len(layers))
        return replace(self, weights=tuple(sum(weights[first:end]) for first, end in pairwise(edges)))

    def times(self, placement: Placement) -> tuple[int, ...]:
        """The ns that it takes to gather each stage's weights."""
        rate = self.bytes_per_second
        return tuple(0 if rate is None else round(size * NS_PER_S / rate) for size in self.sizes(placement))

    def to_dict(self) -> dict[str, Any]:
        """The JSON form, in bytes; `from_dict` reads it back."""
        weights = self.weights if isinstance(self.weights, int) else list(self.weights)
        return {"weights": weights, "memory": self.memory, "bytes_per_second": self.bytes_per_second, "within": self.within}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Sharded:
        """Read the JSON form; raises `ParseError` when a part is missing, and `InputError` for one that cannot be."""
        with reading("weights in shards", data):
            weights, memory = data["weights"], data["memory"]
            sizes = tuple(map(whole, weights)) if isinstance(weights, list) else whole(weights)
            return cls(sizes, None if memory is None else whole(memory), data["bytes_per_second"], data["within"])
