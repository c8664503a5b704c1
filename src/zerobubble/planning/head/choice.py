"""Where a heavy head goes: whole onto the last stage, or divided over all ranks by its vocabulary, whichever takes less time and fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zerobubble.arguments import NUMBER, optional, takes
from zerobubble.costs import HEAD_TIMES, Costs, Limits
from zerobubble.display import Displayed
from zerobubble.errors import InputError
from zerobubble.ir import Schedule
from zerobubble.planning.problem.head import Head
from zerobubble.schedules import with_vocabulary
from zerobubble.simulation import metrics, peak_memory
from zerobubble.units import show_bytes, show_ms

NAMES = {0: "whole on the last stage", 1: "divided by algorithm 1", 2: "divided by algorithm 2"}
"""What becomes of the head, by the paper's number of the algorithm, 0 for none."""


@dataclass(frozen=True, slots=True, repr=False)
class HeadWay(Displayed):
    """One way to place the head: by `algorithm` 1 or 2, or 0 for whole on the last stage, with what it takes in ns and in bytes by rank."""

    algorithm: int
    schedule: Schedule
    costs: Costs
    makespan: int
    peaks: tuple[int, ...]
    fits: bool

    @property
    def _room(self) -> str:
        """What is said behind the figures of a way that does not fit."""
        return "" if self.fits else ", which does not fit"

    def _summary(self) -> str:
        return f"{NAMES[self.algorithm]}: {show_ms(self.makespan)}, up to {show_bytes(max(self.peaks))} on a rank{self._room}"


@dataclass(frozen=True, slots=True, repr=False)
class HeadChoice(Displayed):
    """All `ways` to place a head, that on the last stage first; `best` is the quickest that fits, of equal ones the first."""

    ways: tuple[HeadWay, ...]
    best: HeadWay

    @property
    def bought(self) -> str:
        """What dividing the head buys, in a sentence."""
        whole, best = self.ways[0], self.best
        if best is whole:
            others = min(self.ways[1:], key=lambda way: way.makespan)
            against = f"{show_ms(others.makespan)} {NAMES[others.algorithm]}{others._room}"
            return f"The head stays {NAMES[0]}: {show_ms(whole.makespan)}, against {against}."
        if not whole.fits:
            return f"The head {NAMES[best.algorithm]} takes {show_ms(best.makespan)}; {NAMES[0]} it does not fit."
        gain = f"{100 * (1 - best.makespan / whole.makespan):.1f} % less than {show_ms(whole.makespan)} with it {NAMES[0]}"
        held = f"ranks hold up to {show_bytes(max(best.peaks))} instead of {show_bytes(max(whole.peaks))}"
        return f"The head {NAMES[best.algorithm]} takes {show_ms(best.makespan)}, {gain}; {held}."

    def _summary(self) -> str:
        return self.bought.removesuffix(".")

    def _details(self) -> Iterator[str]:
        yield from (way._summary() for way in self.ways)


@takes(schedule=Schedule, costs=Costs, head=HEAD_TIMES, held=NUMBER, collective=NUMBER, slowdown=NUMBER, limits=optional(Limits))
def place_head(
    schedule: Schedule,
    costs: Costs,
    head: Sequence[float],
    *,
    held: float = 0.0,
    collective: float = 0.0,
    slowdown: float = 1.0,
    limits: Limits | None = None,
) -> HeadChoice:
    """Whether the head goes whole onto the last stage of `schedule` or is divided over its ranks, played in all ways and compared.

    Each rank's part of a divided head takes an even share of its times, times `slowdown`: parts of a small matrix run less well. Published
    are 1.07 to 1.24 for algorithm 1, and 1.13 to 1.32 for algorithm 2, on 8 to 32 GPUs (arXiv 2411.05288, table 3). Raises as
    `with_vocabulary` does, and `InputError` for what is negative or not finite, a slowdown below 1, and where no way fits the limits.

    Arguments:
        schedule: what trains the stages, such as 1F1B or V-Half.
        costs: what the stages take, the last one without the head.
        head: what the whole head takes for a microbatch, in ms: its forward with the loss, the gradients for its input and its weights.
        held: the bytes that the whole head keeps from its forward to its backward.
        collective: ms until what one rank gives of a divided head has reached the others.
        slowdown: by how much a part takes longer than its even share.
        limits: the bytes that each rank may hold.

    >>> import zerobubble as zb
    >>> choice = zb.planning.place_head(zb.make("1f1b", 4, 8), zb.Costs.uniform(4, times=(10, 10, 10)), (10, 10, 10), slowdown=1.2)
    >>> choice.best
    <HeadWay divided by algorithm 2: 402 ms, up to 5 MB on a rank>
    """
    placed = Head((head[0], head[1], head[2]), held, collective, slowdown)
    divided = placed.divided(costs, schedule.num_ranks)
    ways = [(0, schedule, placed.whole(costs))]
    ways += [(algorithm, with_vocabulary(schedule, algorithm, costs), divided) for algorithm in (1, 2)]
    played = tuple(_played(*way, limits) for way in ways)
    fitting = [way for way in played if way.fits]
    if not fitting:
        least = min(played, key=lambda way: max(way.peaks))
        raise InputError(f"no way to place the head fits the limits; the least that ranks hold is {least._summary()}: raise the limits")
    return HeadChoice(played, min(fitting, key=lambda way: way.makespan))


def _played(algorithm: int, schedule: Schedule, costs: Costs, limits: Limits | None) -> HeadWay:
    peaks = peak_memory(schedule, costs)
    if limits is not None and len(limits.memory) != schedule.num_ranks:
        raise InputError(f"schedule {schedule.name!r} has {schedule.num_ranks} ranks, the limits describe {len(limits.memory)}")
    fits = limits is None or all(peak <= limit for peak, limit in zip(peaks, limits.memory, strict=True))
    return HeadWay(algorithm, schedule, costs, metrics(schedule, costs).makespan, peaks, fits)
