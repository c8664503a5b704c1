"""Turns a block into a schedule: repeats it, then squeezes out idle time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

from zerobubble.arguments import WHOLE, takes, wrong
from zerobubble.blocks.block import UNIT, Block, Start, Times, lengths
from zerobubble.blocks.conflicts import collision_sentence, early_sentence, find_collisions, find_early_starts
from zerobubble.costs import NS_PER_MS, UNIT_BYTES, Costs
from zerobubble.display import Displayed
from zerobubble.errors import InputError, ScheduleError
from zerobubble.garbage_pause import garbage_collection_paused
from zerobubble.graph import play, resolve, walk
from zerobubble.ir import Op, Placement, Schedule
from zerobubble.simulation import memory_steps, peak_memory
from zerobubble.timeline import Span, Timeline
from zerobubble.units import counted
from zerobubble.verify import checked


@dataclass(frozen=True, repr=False)
class Layout(Displayed):
    """Passes in slots: `rows[rank]` are the passes of that rank with their start slots, first to last.

    `times` are the slots of F, B and W. `name`, `placement` and `num_microbatches` belong to its `schedule`. Each of the four steps from
    a block to a finished schedule produces a layout.
    """

    name: str
    placement: Placement
    num_microbatches: int
    rows: tuple[tuple[Start, ...], ...]
    times: Times = field(default=UNIT)

    def _summary(self) -> str:
        where = f"{counted(self.placement.num_stages, 'stage')} on {counted(self.placement.num_ranks, 'rank')} ({self.placement.name})"
        return f"{self.name}: {where}, {counted(self.num_microbatches, 'microbatch')}, {counted(sum(map(len, self.rows)), 'pass')} in slots"

    def _details(self) -> Iterator[str]:
        for rank, row in enumerate(self.rows):
            yield f"rank {rank}: {' '.join(map(str, row))}"

    @cached_property
    def schedule(self) -> Schedule:
        """The order of the passes, without slots."""
        return Schedule(self.name, self.placement, self.num_microbatches, tuple(tuple(op for op, _ in row) for row in self.rows))

    @property
    def costs(self) -> Costs:
        """Costs with 1 ms per slot and one unit of memory per stage."""
        return Costs.uniform(self.placement.num_stages, self.times)

    @cached_property
    def timeline(self) -> Timeline:
        """The timeline, with 1 ms per slot. Its spans have no causes, since idle slots of a layout need none."""
        costs, slots = self.costs, lengths(self.times)
        rows = tuple(tuple(Span(op, slot * NS_PER_MS, (slot + slots[op.kind]) * NS_PER_MS) for op, slot in row) for row in self.rows)
        return Timeline(self.name, rows, tuple(memory_steps(row, costs) for row in rows))

    @cached_property
    def peaks(self) -> tuple[int, ...]:
        """The peak stage activations of each rank."""
        return tuple(peak // UNIT_BYTES for peak in peak_memory(self.schedule, self.costs))

    @property
    def bubble(self) -> int:
        """The idle slots between the first and the last pass of a rank, maximum over ranks."""
        return max(rank.gaps for rank in self.timeline.ranks) // NS_PER_MS

    def moved(self, rows: Iterable[Iterable[Start]]) -> Layout:
        """Return this layout with other `rows`, each in any order."""
        return replace(self, rows=tuple(tuple(sorted(row, key=lambda start: start.slot)) for row in rows))


@takes(block=Block, num_microbatches=WHOLE)
@garbage_collection_paused()
def repeat(block: Block, num_microbatches: int) -> Layout:
    """Return copies of `block`, each `interval` slots after the one before, for `num_microbatches` microbatches.

    Raises `InputError` if copies collide, naming the two passes, or if a pass starts before its inputs are ready, and `ScheduleError` if a
    pass is missing or misplaced.
    """
    check_repeatable(block)
    if num_microbatches < 1:
        raise wrong("num_microbatches", num_microbatches, "at least 1")
    size = block.num_microbatches
    copies = range(-(-num_microbatches // size))
    rows = (
        [
            Start(Op(kind, stage, j + k * size), slot + k * block.interval)
            for k in copies
            for (kind, stage, j), slot in row
            if j + k * size < num_microbatches
        ]
        for row in block.starts
    )
    return Layout(block.name, block.placement, num_microbatches, (), block.times).moved(rows)


def check_repeatable(block: Block) -> None:
    """Raise the errors of `repeat` if `block` cannot be repeated."""
    for collision in find_collisions(block):
        raise InputError("block {block!r}: {fault}", block=block.name, fault=collision_sentence(block, collision))
    alone = Schedule(block.name, block.placement, block.num_microbatches, tuple(tuple(start.op for start in row) for row in block.starts))
    try:
        checked(alone)
    except ScheduleError as error:
        raise ScheduleError(error.faults, f"{block.name} (one block)") from None
    for early in find_early_starts(block):
        raise InputError("block {block!r}: {fault}", block=block.name, fault=early_sentence(early))


@takes()
@garbage_collection_paused()
def squeeze(layout: Layout) -> Layout:
    """Return `layout` with the same order on every rank and every pass as early as possible.

    Raises `ScheduleError` if the order cannot run.
    """
    graph = resolve(layout.schedule)
    order = walk(graph, graph.needs, graph.first[:-1])
    if len(order) < len(graph.ops):  # a cycle ended the walk: `checked` raises with its faults
        checked(layout.schedule)
    slots = lengths(layout.times)
    played = play(graph, order, [slots[op.kind] for op in graph.ops])
    starts = list(map(Start, graph.ops, played.begin))
    return replace(layout, rows=tuple(tuple(starts[first:end]) for first, end in pairwise(graph.first)))
