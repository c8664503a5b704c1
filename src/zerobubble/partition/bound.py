"""Lower bounds on the time of the slowest rank over all cuts, without a search."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import accumulate
from math import ceil
from sys import maxsize
from typing import NamedTuple

from zerobubble.ir import Placement
from zerobubble.partition.layers import Layer
from zerobubble.partition.speeds import Speeds, speed_of
from zerobubble.units import counted, show_ms


class CutBound(NamedTuple):
    """A lower bound in ns on F, B and W of a microbatch on the slowest rank, with its reason."""

    time: int
    reason: str


def cut_bound(layers: Sequence[Layer], placement: Placement, speeds: Speeds = ()) -> CutBound:
    """Returns the largest lower bound for `layers` on `placement`, with ranks of these speeds."""
    bounds = [_even_share(layers, placement, speeds), _heaviest(layers, placement, speeds)]
    if speeds:
        bounds += [*_fewest(layers, placement, speeds), *_shared_out_by_speed(layers, speeds)]
    else:
        bounds += _shared_out(layers, placement)
    return max(bounds, key=lambda bound: bound.time)


def layer_label(number: int, layer: Layer) -> str:
    """Returns a label such as `layer 33 (lm_head)`."""
    return f"layer {number} ({layer.name})" if layer.name not in ("", str(number)) else f"layer {number}"


def heaviest_layer(layers: Sequence[Layer]) -> int:
    """Returns the index of the layer that takes longest, the last one among equals, as a head is."""
    return max(range(len(layers)), key=lambda number: (layers[number].time, number))


def _even_share(layers: Sequence[Layer], placement: Placement, speeds: Speeds) -> CutBound:
    if not speeds:
        share = -(-sum(layer.time for layer in layers) // placement.num_ranks)
        return CutBound(share, f"an even share of all layers is {show_ms(share)}")
    # Times are rounded to ns on each rank, so each layer counts with the rank on which rounding makes its work least.
    exact = {speed: Fraction(speed) for speed in set(speeds)}
    work = sum(min(layer.time_at(speed) * factor for speed, factor in exact.items()) for layer in layers)
    share = ceil(work / sum(exact[speed] for speed in speeds))
    return CutBound(share, f"a share of all layers by the speeds of the ranks is {show_ms(share)}")


def _heaviest(layers: Sequence[Layer], placement: Placement, speeds: Speeds) -> CutBound:
    """The rank of the heaviest layer has that layer, and at least one of the lightest in each of its other stages."""
    number = heaviest_layer(layers)
    others = [layer for place, layer in enumerate(layers) if place != number]
    times = []
    for stages, speed in _kinds_of_ranks(placement, speeds):
        least = sum(sorted(layer.time_at(speed) for layer in others)[: stages - 1])
        times.append((layers[number].time_at(speed) + least, stages, speed))
    time, stages, speed = min(times)
    where = f" on a rank of speed {speed:g}" if speeds else ""
    alone = f"{layer_label(number, layers[number])} alone takes {show_ms(layers[number].time_at(speed))}{where}"
    return CutBound(time, alone + (f", and its rank has {stages} stages" if stages > 1 else ""))


def _kinds_of_ranks(placement: Placement, speeds: Speeds) -> list[tuple[int, float]]:
    """Returns the distinct pairs of number of stages and speed of a rank."""
    return sorted({(len(placement.stages(rank)), speed_of(rank, speeds)) for rank in range(placement.num_ranks)})


def _shared_out(layers: Sequence[Layer], placement: Placement) -> Iterator[CutBound]:
    """One of p ranks has at least n / p of the n heaviest layers, rounded up."""
    times, ranks = sorted((layer.time for layer in layers), reverse=True), placement.num_ranks
    for count in range(ranks + 1, len(times) + 1, ranks):
        lightest = times[count - 1 - (count - 1) // ranks : count]
        yield CutBound(
            sum(lightest), f"one of {ranks} ranks has {len(lightest)} of the {count} layers that take {show_ms(lightest[-1])} or more"
        )


def _fewest(layers: Sequence[Layer], placement: Placement, speeds: Speeds) -> Iterator[CutBound]:
    """A slow rank also has at least one layer per stage."""
    for stages, speed in _kinds_of_ranks(placement, speeds):
        least = sum(sorted(layer.time_at(speed) for layer in layers)[:stages])
        yield CutBound(least, f"a rank of speed {speed:g} has at least {counted(stages, 'layer')}, of {show_ms(least)}")


def _shared_out_by_speed(layers: Sequence[Layer], speeds: Speeds) -> Iterator[CutBound]:
    """In less time, the ranks cannot do the n heaviest layers, even if each takes the lightest ones first."""
    ranks_of = Counter(speeds)
    times: dict[float, list[int]] = {speed: [] for speed in ranks_of}
    for count, layer in enumerate(sorted(layers, key=lambda layer: layer.time, reverse=True), 1):
        for speed, ascending in times.items():
            insort(ascending, layer.time_at(speed))
        sums = {speed: [*accumulate(ascending)] for speed, ascending in times.items()}
        time = _least_time(sums, ranks_of, count)
        yield CutBound(time, f"in less time, ranks of these speeds cannot run the {count} layers that take {show_ms(layer.time)} or more")


def _least_time(sums: Mapping[float, Sequence[int]], ranks_of: Mapping[float, int], count: int) -> int:
    """Returns the minimum ns in which ranks can run `count` layers; a rank runs the first layers of the `sums` at its speed."""

    def done_in(time: int) -> int:
        return sum(ranks * bisect_right(sums[speed], time) for speed, ranks in ranks_of.items())

    enough = max(at_speed[-1] for at_speed in sums.values())
    return bisect_left(range(min(enough, maxsize)), count, key=done_in)  # the longest possible range; a smaller bound also holds
