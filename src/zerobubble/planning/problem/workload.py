"""The work of each rank, independent of the placement; the stages of a rank share it equally."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from math import isfinite
from typing import Any

from zerobubble.arguments import NUMBER, WHOLE, amount_fault, as_tuple, optional, require_ms, takes, wrong
from zerobubble.costs import FUSED, MOST_BUCKETS, NS_PER_MS, STAGES, TIMES, UNIT_BYTES, Costs, Limits
from zerobubble.display import Displayed
from zerobubble.errors import InputError, raise_all, reading, whole
from zerobubble.ir import Placement
from zerobubble.partition.speeds import Links, at_speed, link_between
from zerobubble.units import MOST, counted, show_ms, show_range

RANK_BYTES = 12 * UNIT_BYTES
"""Bytes of a rank's activation of one microbatch if only ratios matter; divisible by 2, 3, 4 and 6 stages."""
MOST_MICROBATCHES = 1e6
"""The most memory in microbatches. Larger numbers are taken for bytes without a unit."""


@takes()
@dataclass(frozen=True, slots=True, repr=False)
class Workload(Displayed):
    """The work of each rank on any placement: times in ns and bytes held, per rank and microbatch, shared equally by its stages.

    Every tuple has one entry per rank. Times are sums over the stages of a rank, for one microbatch.

    Attributes:
        forward: Times of F in ns.
        backward: Times of B in ns.
        weight: Times of W in ns.
        comm: Times of a message between rank r and the next one in ns; in the last entry, between the last rank and the first.
        held_after_f: Bytes held from the end of F until the end of B or BW.
        held_after_b: Bytes held from the end of B until the end of W.
        reduce: Times in ns to sum the gradients of a rank over replicas; empty for none.
        buckets: Numbers of buckets in which these are sent while the last W's of their stages run, shared by the stages of a rank, each at
            least one; empty for none.
        fused: Times of BW in ns, if they are less than those of B and W together; empty if they are not.

    >>> import zerobubble as zb
    >>> zb.Workload.uniform(8, times=(18.5, 18.1, 9.3), comm=0.6)
    <Workload of 8 ranks: F 18.5 ms, B 18.1 ms, W 9.3 ms, messages 0.6 ms>
    >>> zb.Workload.from_ms([10, 12], [10, 12], [8, 9], comm=[0.5, 0.5]).costs(zb.Placement.vee(2))
    <Costs of 4 stages: F 5 ms to 6 ms, B 5 ms to 6 ms, W 4 ms to 4.5 ms, messages 0.5 ms>
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    weight: tuple[int, ...]
    comm: tuple[int, ...]
    held_after_f: tuple[int, ...]
    held_after_b: tuple[int, ...]
    reduce: tuple[int, ...] = ()
    buckets: tuple[int, ...] = ()
    fused: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for column in fields(self):
            object.__setattr__(self, column.name, as_tuple(f"{column.name} of the workload", getattr(self, column.name)))
        ranks = len(self.forward)
        for name in _SUMS:
            object.__setattr__(self, name, getattr(self, name) or (0,) * ranks)
        if ranks == 0:
            raise InputError("a workload needs at least one rank")
        raise_all(fault for column in fields(self) for fault in self._faults_of_column(column.name))

    def _faults_of_column(self, name: str) -> Iterator[InputError | None]:
        values = getattr(self, name)
        if name == FUSED and not values:
            return
        if len(values) != self.num_ranks:
            yield wrong(f"the number of values of {name} in a workload", len(values), f"{self.num_ranks}, one per rank")
        for rank, value in enumerate(values):
            yield amount_fault(f"{name} of rank {rank}", value, MOST_BUCKETS if name == "buckets" else MOST)

    def _summary(self) -> str:
        return f"of {counted(self.num_ranks, 'rank')}: {self.times_text}"

    @property
    def times_text(self) -> str:
        """The times of passes, messages and sums, each as the range over all ranks."""
        times = "F {}, B {}, W {}".format(*(show_range(column, show_ms) for column in (self.forward, self.backward, self.weight)))
        sums = f", sums over replicas {show_range(self.reduce, show_ms)}" if any(self.reduce) else ""
        times += f", BW {show_range(self.fused, show_ms)}" if self.fused else ""
        return f"{times}, messages {show_range(self.comm, show_ms)}{sums}"

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return len(self.forward)

    @classmethod
    @takes(num_ranks=STAGES, times=TIMES, comm=NUMBER, held=NUMBER, reduce=NUMBER, buckets=WHOLE, fused=optional(NUMBER))
    def uniform(
        cls,
        num_ranks: int,
        times: tuple[float, float, float],
        comm: float = 0.0,
        held: float = 1.0,
        reduce: float = 0.0,
        buckets: int = 0,
        fused: float | None = None,
    ) -> Workload:
        """Returns the work of `num_ranks` equal ranks, with times in ms.

        Args:
            num_ranks: The number of ranks.
            times: The times of F, B and W of a rank, for one microbatch.
            comm: The time of a message between neighbors.
            held: What W needs relative to F's bytes; above 1 if B adds more than it frees.
            reduce: The time to sum the gradients of a rank over replicas.
            buckets: The number of buckets of a rank in which they leave during its last W passes; with 0 they leave after these.
            fused: The time of BW, if it takes less than B and W.

        Raises `InputError` as `Costs` does.
        """
        costs = Costs.uniform(1, times, held=held, reduce=reduce, fused=fused)
        link = Costs.uniform(2, times, comm).comm[0]
        columns = (
            costs.forward[0],
            costs.backward[0],
            costs.weight[0],
            link,
            RANK_BYTES,
            round(held * RANK_BYTES),
            costs.reduce[0],
            buckets,
        )
        return replace(cls(*((value,) * num_ranks for value in columns)), fused=costs.fused * num_ranks)

    @classmethod
    def from_ms(
        cls,
        forward: Sequence[float],
        backward: Sequence[float],
        weight: Sequence[float],
        comm: Sequence[float],
        held: float = 1.0,
        reduce: Sequence[float] | None = None,
        buckets: Sequence[int] = (),
        fused: Sequence[float] | None = None,
    ) -> Workload:
        """Returns the work of ranks from columns with one value per rank, times in ms.

        Args:
            forward, backward, weight: The times of F, B and W, for one microbatch.
            comm: The times of messages between rank r and the next one and, last, between the last rank and the first.
            held: What W needs relative to F's bytes, on every rank.
            reduce: The times to sum the gradients of a rank over replicas; 0 by default.
            buckets: The numbers of buckets in which they leave during the last W passes; by default, they leave after these.
            fused: The times of BW; by default, those of B and W.

        Raises `InputError` for a time that is missing, negative or not finite, with its rank.
        """
        ranks = len(as_tuple("forward of the workload", forward))
        sums = [0.0] * ranks if reduce is None else reduce
        named = {"forward": forward, "backward": backward, "weight": weight, "comm": comm, "held": [held] * ranks, "reduce": sums}
        named |= {} if fused is None else {FUSED: fused}
        for name, values in named.items():
            if len(as_tuple(f"{name} of the workload", values)) < ranks:
                raise wrong(f"the number of values of {name} in a workload", len(values), f"{ranks}, one per rank")
            for rank, value in enumerate(values):
                require_ms(f"{name} of rank {rank}", value)
        times = (forward, backward, weight, comm, sums, fused or ())
        f, b, w, c, r, bw = (tuple(round(value * NS_PER_MS) for value in values) for values in times)
        after_f, after_b = (RANK_BYTES,) * ranks, (round(held * RANK_BYTES),) * ranks
        return cls(f, b, w, c, after_f, after_b, r, as_tuple("buckets of the workload", buckets), bw)

    @takes(placement=Placement)
    def costs(self, placement: Placement) -> Costs:
        """Returns the costs of each stage on `placement`, which has one route. Raises `InputError` for a placement over other ranks."""
        if placement.num_ranks != self.num_ranks:
            raise wrong("the number of ranks of the placement", placement.num_ranks, f"{self.num_ranks}, as in the workload")
        home = placement.routes[0]
        count = [home.count(rank) for rank in range(self.num_ranks)]
        parts = (self.forward, self.backward, self.weight, self.held_after_f, self.held_after_b, self.reduce)
        forward, backward, weight, after_f, after_b, sums = (tuple(part[r] // count[r] for r in home) for part in parts)
        comm = tuple(self.comm[link_between(here, there, self.num_ranks)] for here, there in pairwise(home))
        buckets = tuple(-(-self.buckets[r] // count[r]) for r in home)
        costs = Costs(forward, backward, weight, comm, after_f, after_b, reduce=sums, buckets=buckets)
        return costs.with_columns(fused=[self.fused[r] // count[r] for r in home]) if self.fused else costs

    def at_links(self, links: Links) -> Workload:
        """Returns the same work with messages over `links`, relative speeds: of each rank to the next, and of the last one to the first."""
        return replace(self, comm=tuple(at_speed(time, speed) for time, speed in zip(self.comm, links, strict=True))) if links else self

    @takes(microbatches=NUMBER)
    def limits(self, microbatches: float) -> Limits:
        """Returns limits that fit activations of this many `microbatches` on every rank, each with what F saves or B leaves, if more.

        Raises `InputError` for a number that is not a finite one above 0, or so large that bytes are meant.
        """
        return limits_for(microbatches, list(map(max, self.held_after_f, self.held_after_b)))

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON form, in ns and bytes; `from_dict` reads it."""
        columns = {column.name: list(getattr(self, column.name)) for column in fields(self) if column.name != FUSED or self.fused}
        return {"format": "zerobubble workload 1", **columns}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Workload:
        """Reads `data`, as `to_dict` returns it; raises `ParseError` if a part is missing or malformed."""
        with reading("workload", data):
            return cls(*(tuple(map(whole, (_OPTIONAL | data)[column.name])) for column in fields(cls)))


def limits_for(microbatches: float, sizes: Sequence[int]) -> Limits:
    """Returns limits that fit this many microbatches of these bytes. Raises `InputError` unless it is in 0 to `MOST_MICROBATCHES`."""
    if not isfinite(microbatches) or microbatches <= 0:
        raise wrong("memory", microbatches, "a finite number of microbatches above 0")
    if microbatches > MOST_MICROBATCHES:
        raise wrong("memory", microbatches, f"at most {MOST_MICROBATCHES:,.0f} microbatches", "bytes have a unit, such as '40GB'")
    return Limits(tuple(max(1, round(microbatches * size)) for size in sizes))


_SUMS: dict[str, tuple[int, ...]] = {"reduce": (), "buckets": ()}
"""Optional columns whose default is zeros."""
_OPTIONAL: dict[str, tuple[int, ...]] = {**_SUMS, FUSED: ()}
"""These and the times whose default is that of other columns."""
