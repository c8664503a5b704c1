"""The best cuts where each rank takes its layers from the ends of what is left: one stage a rank, or the two of a vee."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from zerobubble.partition.layers import Cuts, Layer

Left = tuple[int, int]
"""The layers that no rank has taken: from the first number up to the second."""

Accumulate = Callable[[int, Sequence[int]], int]
"""The worth of a split so far and the stage times of the next rank make the worth of the split with that rank."""


@dataclass(frozen=True)
class Loads:
    """Time in ns and memory in bytes of the layers before each layer, and of all."""

    time: list[int]
    memory: list[int]

    @classmethod
    def of(cls, layers: Sequence[Layer], in_flight: int) -> Loads:
        """The loads of `layers` with the activations of `in_flight` microbatches."""
        times = (layer.time for layer in layers)
        held = (layer.parameters_bytes + in_flight * layer.held_after_f for layer in layers)
        return cls([0, *accumulate(times)], [0, *accumulate(held)])


@dataclass(frozen=True)
class CutProblem:
    """Layers to cut for the ranks in this order, stages from the front alone, or also from the back (`folded`).

    `memory_limits` is the memory of each of the ranks in bytes, None for no limit.
    """

    loads: Loads
    num_ranks: int
    folded: bool
    memory_limits: Sequence[int] | None = None

    def takes(self, left: Left, rank: int, limit: int) -> Iterator[tuple[Left, tuple[int, ...]]]:
        """What may be left once `rank` has taken its stages of at most `limit` ns together, and the times of these."""
        time, memory = self.loads.time, self.loads.memory
        room = memory[-1] if self.memory_limits is None else self.memory_limits[rank]
        begin, end = left
        for front in range(begin + 1, end + 1):
            first, held = time[front] - time[begin], memory[front] - memory[begin]
            if first > limit or held > room:
                return
            if not self.folded:
                yield (front, end), (first,)
                continue
            for back in range(end - 1, front - 1, -1):
                second = time[end] - time[back]
                if first + second > limit or held + memory[end] - memory[back] > room:
                    break
                yield (front, back), (first, second)


def exact_cuts(chain: CutProblem) -> Cuts | None:
    """The cuts with the smallest largest rank time, among them those with the smoothest stage times; None where none fits."""
    time = chain.loads.time
    total, heaviest = time[-1], max(after - before for before, after in pairwise(time))
    limit = min(total, total // chain.num_ranks + heaviest)
    slowest = _best(chain, limit, _slowest)
    while slowest is None and limit < total:
        limit = min(2 * limit, total)
        slowest = _best(chain, limit, _slowest)
    smoothest = slowest and _best(chain, slowest[0], _roughness)
    return smoothest and smoothest[1]


def _slowest(worth: int, times: Sequence[int]) -> int:
    return max(worth, sum(times))


def _roughness(worth: int, times: Sequence[int]) -> int:
    return worth + sum(time * time for time in times)


def _best(chain: CutProblem, limit: int, accumulate_worth: Accumulate) -> tuple[int, Cuts] | None:
    """The least worth of a split whose ranks take at most `limit` ns each, and its cuts."""
    time = chain.loads.time
    everything = (0, len(time) - 1)
    front: dict[Left, tuple[int, frozenset[int]]] = {everything: (0, frozenset())}
    for rank in range(chain.num_ranks):
        reached: dict[Left, tuple[int, frozenset[int]]] = {}
        rest = limit * (chain.num_ranks - 1 - rank)
        for left, (worth, cuts) in front.items():
            for now, times in chain.takes(left, rank, limit):
                joined = accumulate_worth(worth, times)
                if time[now[1]] - time[now[0]] <= rest and (now not in reached or joined < reached[now][0]):
                    reached[now] = joined, cuts.union(now)
        front = reached
    ends = [found for (begin, end), found in front.items() if begin == end]
    worth, cuts = min(ends, key=lambda found: found[0], default=(0, frozenset(everything)))
    return (worth, tuple(sorted(cuts.difference(everything)))) if ends else None
