"""How fast the slowest rank can be at most, however layers are cut: proofs that need no search."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from zerobubble.ir import Placement
from zerobubble.partition.layers import Layer
from zerobubble.units import show_ms


class CutBound(NamedTuple):
    """No cut has a slowest rank that takes less than `time` ns of F, B and W for a microbatch, and why."""

    time: int
    reason: str


def cut_bound(layers: Sequence[Layer], placement: Placement) -> CutBound:
    """The largest of the bounds that hold for any cut of `layers` on `placement`."""
    return max(
        [_even_share(layers, placement), _heaviest(layers, placement), *_shared_out(layers, placement)], key=lambda bound: bound.time
    )


def layer_label(number: int, layer: Layer) -> str:
    """The layer as people call it: `layer 33 (lm_head)`."""
    return f"layer {number} ({layer.name})" if layer.name else f"layer {number}"


def heaviest_layer(layers: Sequence[Layer]) -> int:
    """The number of the layer that takes longest, the last of equals, as a head is."""
    return max(range(len(layers)), key=lambda number: (layers[number].time, number))


def _even_share(layers: Sequence[Layer], placement: Placement) -> CutBound:
    share = -(-sum(layer.time for layer in layers) // placement.num_ranks)
    return CutBound(share, f"an even share of all layers is {show_ms(share)}")


def _heaviest(layers: Sequence[Layer], placement: Placement) -> CutBound:
    """The rank of the heaviest layer has that and the least that its other stages can be, a layer each."""
    number = heaviest_layer(layers)
    stages = min(len(placement.stages(rank)) for rank in range(placement.num_ranks))
    others = sorted(layer.time for place, layer in enumerate(layers) if place != number)[: stages - 1]
    alone = f"{layer_label(number, layers[number])} alone takes {show_ms(layers[number].time)}"
    return CutBound(layers[number].time + sum(others), alone + (f", and its rank has {stages} stages" if others else ""))


def _shared_out(layers: Sequence[Layer], placement: Placement) -> Iterator[CutBound]:
    """Of the n heaviest layers, one of p ranks has n / p or more, rounded up."""
    times, ranks = sorted((layer.time for layer in layers), reverse=True), placement.num_ranks
    for count in range(ranks + 1, len(times) + 1, ranks):
        lightest = times[count - 1 - (count - 1) // ranks : count]
        yield CutBound(
            sum(lightest), f"one of {ranks} ranks has {len(lightest)} of the {count} layers that take {show_ms(lightest[-1])} or more"
        )
