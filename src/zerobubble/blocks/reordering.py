"""Reordering: passes move into earlier idle slots, as far as their inputs and the memory of their rank allow.

Repeating a block wastes time at both ends, where copies are missing. Moving passes up shortens the warm-up and the cool-down. W is handled
separately, since it only has to follow its B and can fill any idle slot: after the first sweep all W are taken out, the remaining passes
move up further, and the W are put back into the first idle slots. Each row simulates where its W would go, so that memory stays within the
limit.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import accumulate, chain
from typing import NamedTuple

from zerobubble.arguments import takes
from zerobubble.blocks.block import Block, Start, Times, lengths
from zerobubble.blocks.layout import Layout, repeat, squeeze
from zerobubble.errors import InputError
from zerobubble.garbage_pause import garbage_collection_paused
from zerobubble.graph import play, resolve
from zerobubble.ir import Kind, Op
from zerobubble.kinds import ValueKind, kinds_making

_TAKES = {Kind.F: 1, Kind.B: 0, Kind.W: -1, Kind.BW: -1}
"""Change of the stage activations on a rank. B changes nothing, since W still needs them."""


class Steps(NamedTuple):
    """The layouts of the four steps: one copy of the `block`, then `repeated`, `squeezed`, and `reordered`."""

    block: Layout
    repeated: Layout
    squeezed: Layout
    reordered: Layout

    def __repr__(self) -> str:
        return f"<Steps {self.reordered._summary()}: {', '.join(self._fields)}>"


@takes()
def four_steps(block: Block, num_microbatches: int, limit: int | None = None, *, keep_steady_phase: bool = True) -> Steps:
    """Return the four steps from `block` to a schedule of `num_microbatches` microbatches.

    `limit` and `keep_steady_phase` are as in `reorder`.
    """
    repeated = repeat(block, num_microbatches)
    squeezed = squeeze(repeated)
    return Steps(repeat(block, block.num_microbatches), repeated, squeezed, reorder(squeezed, limit, keep_steady_phase=keep_steady_phase))


@takes()
@garbage_collection_paused()
def reorder(layout: Layout, limit: int | None = None, *, keep_steady_phase: bool = True) -> Layout:
    """Return a repeated or squeezed `layout` with passes moved into earlier idle slots.

    No rank holds more than `limit` stage activations, by default the peak of `layout`. Passes move in order of their slots, each to the
    first idle slot after its inputs and after the previous microbatch's pass of the same stage; F only as far as memory allows. Then all W
    are taken out, passes of the cool-down move once more, and the W fill the idle slots. The warm-up ends when the first microbatch is
    finished, and the cool-down begins when the last one has entered. With `keep_steady_phase`, passes in between do not move. Raises
    `InputError` for a limit below the peak of `layout`.
    """
    most = max(layout.peaks) if limit is None else limit
    if most < max(layout.peaks):
        message = "{layout} holds up to {peak} stage activations, more than the limit of {most}"
        raise InputError(
            message, layout=layout.name, peak=max(layout.peaks), most=most, remedy="raise the limit, since reordering does not save memory"
        )
    passes = _MovablePasses(layout)
    _advance(passes, [_held_per_slot(row, passes.horizon, layout.times) for row in layout.rows], most, keep_steady_phase)
    passes.squeeze()
    if layout.schedule.split_stages:
        weights = passes.lift()
        _advance_lifted(passes, [_RowWithWeights(row, layout.times) for row in passes.rows()], most)
        passes.put([start for row in passes.rows() for start in _weights(row, layout.times)], weights)
        passes.squeeze()
    return layout.moved(passes.rows())


class _MovablePasses:
    """The current slots of the passes of a layout, by pass number. `active` are the passes that are not taken out."""

    def __init__(self, layout: Layout) -> None:
        self.graph = resolve(layout.schedule)
        takes = lengths(layout.times)
        self.length = [takes[op.kind] for op in self.graph.ops]
        self.begin = [slot for row in layout.rows for _, slot in row]
        self.active = list(range(len(self.begin)))
        self.horizon = max(map(sum, zip(self.begin, self.length, strict=True)))

    def in_order(self) -> tuple[list[int], int, int]:
        """Return the passes in order of their slots, and the positions where the first microbatch finishes and the last one enters."""
        order, ops = sorted(self.active, key=self.begin.__getitem__), self.graph.ops
        ends = [k for k, number in enumerate(order) if ops[number][1] == 0]
        home = next((k for k in ends if ops[order[k]].kind in kinds_making(ValueKind.GRADIENT)), len(order))
        return order, home, next(k for k in reversed(ends) if ops[order[k]].kind is Kind.F)

    def squeeze(self) -> None:
        """Start every pass as soon as its rank is free and its inputs are ready, keeping the order of slots."""
        order = sorted(self.active, key=self.begin.__getitem__)
        played = play(self.graph, order, self.length)
        for number in order:
            self.begin[number] = played.begin[number]

    def lift(self) -> dict[Op, int]:
        """Take all W out. Return their numbers."""
        ops, weight = self.graph.ops, Kind.W
        self.active = [number for number in self.active if ops[number][0] is not weight]
        return {op: number for number, op in enumerate(ops) if op[0] is weight}

    def put(self, starts: Iterable[Start], numbers: dict[Op, int]) -> None:
        """Put passes back into the given slots; `numbers` are the numbers of the passes."""
        for op, slot in starts:
            self.begin[numbers[op]] = slot
            self.active.append(numbers[op])

    def rows(self) -> list[list[Start]]:
        """Return the passes of each rank, first to last."""
        rows: list[list[Start]] = [[] for _ in self.graph.first[1:]]
        ops, begin, rank = self.graph.ops, self.begin, self.graph.rank
        for number in sorted(self.active, key=begin.__getitem__):
            rows[rank[number]].append(Start(ops[number], begin[number]))
        return rows


class _Sweep:
    """A sweep that places each pass in the first suitable idle slot."""

    def __init__(self, passes: _MovablePasses) -> None:
        self.passes = passes
        self._taken = [bytearray(passes.horizon) for _ in passes.graph.first[1:]]
        self._last: dict[tuple[Kind, int], int] = {}

    def earliest(self, number: int) -> int:
        """Return the earliest slot of a pass, after its inputs and the previous microbatch's pass of the same stage."""
        passes, (kind, stage, _) = self.passes, self.passes.graph.ops[number]
        before = [*passes.graph.needs[number], *[self._last[key] for key in [(kind, stage)] if key in self._last]]
        return max([passes.begin[other] + passes.length[other] for other in before], default=0)

    def idle(self, number: int, earliest: int) -> Iterator[int]:
        """Yield the slots from `earliest` up to its own in which a pass fits between the passes placed so far."""
        gap = bytes(self.passes.length[number])
        taken = self._taken[self.passes.graph.rank[number]]
        slot = taken.find(gap, earliest)
        while 0 <= slot < self.passes.begin[number]:
            yield slot
            slot = taken.find(gap, slot + 1)

    def keep(self, numbers: Sequence[int]) -> None:
        """Place passes, given in order of their slots, where they are."""
        ops, rank, begin, length, taken = self.passes.graph.ops, self.passes.graph.rank, self.passes.begin, self.passes.length, self._taken
        full = {slots: b"\1" * slots for slots in set(length)}
        for number in numbers:
            slot, slots = begin[number], length[number]
            taken[rank[number]][slot : slot + slots] = full[slots]
        self._last.update({ops[number][:2]: number for number in numbers})

    def place(self, number: int, slot: int) -> None:
        """Place a pass in its final slot."""
        kind, stage, _ = self.passes.graph.ops[number]
        length = self.passes.length[number]
        self.passes.begin[number] = slot
        self._taken[self.passes.graph.rank[number]][slot : slot + length] = b"\1" * length
        self._last[kind, stage] = number


def _advance(passes: _MovablePasses, held: list[list[int]], most: int, keep_steady_phase: bool) -> None:
    """Move all passes up, or only warm-up and cool-down; `held` has the stage activations of each rank in each slot."""
    sweep = _Sweep(passes)
    order, home, entry = passes.in_order()
    home, entered = (home, max(home, entry + 1)) if keep_steady_phase else (len(order), len(order))
    for number in order[:home]:
        sweep.place(number, _move_up(sweep, number, held[passes.graph.rank[number]], most))
    sweep.keep(order[home:entered])
    for number in order[entered:]:
        sweep.place(number, _move_up(sweep, number, held[passes.graph.rank[number]], most))


def _move_up(sweep: _Sweep, number: int, held: list[int], most: int) -> int:
    """Return the first slot that a pass can move to, its own if there is none, and update `held` of its rank."""
    passes, earliest = sweep.passes, sweep.earliest(number)
    kind, old = passes.graph.ops[number].kind, passes.begin[number]
    if kind is Kind.F:
        earliest = next((slot + 1 for slot in range(old - 1, earliest - 1, -1) if held[slot] >= most), earliest)
    new = next(sweep.idle(number, earliest), old)
    shift = 0 if kind is Kind.F else passes.length[number]
    for slot in range(new + shift, old + shift):
        held[slot] += _TAKES[kind]
    return new


def _held_per_slot(row: Iterable[Start], horizon: int, times: Times) -> list[int]:
    """Return the stage activations of a rank in each slot. F allocates at its start, W and BW release at their end."""
    change, takes = [0] * (horizon + 1), lengths(times)
    for (kind, _, _), slot in row:
        change[slot if kind is Kind.F else slot + takes[kind]] += _TAKES[kind]
    return list(accumulate(change))


def _advance_lifted(passes: _MovablePasses, rows_with_weights: list[_RowWithWeights], most: int) -> None:
    """Move up the passes of the cool-down while all W are out, as far as memory allows once W fill the idle slots."""
    sweep = _Sweep(passes)
    order, _, entry = passes.in_order()
    sweep.keep(order[: entry + 1])
    for number in order[entry + 1 :]:
        slot = passes.begin[number]
        row_with_weights, idle = rows_with_weights[passes.graph.rank[number]], sweep.idle(number, sweep.earliest(number))
        sweep.place(number, next((new for new in idle if row_with_weights.move(slot, new, most)), slot))


RowState = tuple[int, int, int]
"""The slot from which a rank is free, the activations that it holds, and the number of its waiting W."""


class _RowWithWeights:
    """The passes of one rank without W, and the state before each pass if W fill every idle slot that they can."""

    def __init__(self, row: Iterable[Start], times: Times) -> None:
        self.takes = lengths(times)
        self.row = list(row)
        self.before: list[RowState] = [(0, 0, 0)]
        for start in self.row:
            self.before.append(self._after(self.before[-1], start))

    def move(self, old: int, new: int, most: int) -> bool:
        """Move the pass in slot `old` to `new` unless the rank would then hold more than `most`. Return whether it moved.

        The states are recomputed from `new` on. Once one equals its old value, all later ones do, so the loop can stop.
        """
        here, there = (bisect_left(self.row, slot, key=lambda start: start.slot) for slot in (new, old))
        moved = [Start(self.row[there].op, new), *self.row[here:there]]
        states = [self.before[here]]
        for start in chain(moved, (self.row[k] for k in range(there + 1, len(self.row)))):
            states.append(self._after(states[-1], start))
            if states[-1][1] > most:
                return False
            if len(states) > len(moved) and states[-1] == self.before[here + len(states) - 1]:
                break
        self.row[here : there + 1] = moved
        self.before[here : here + len(states)] = states
        return True

    def _after(self, state: RowState, start: Start) -> RowState:
        (kind, _, _), slot = start
        free, held, waiting = state
        done = min(waiting, (slot - free) // self.takes[Kind.W])
        return slot + self.takes[kind], held - done + _TAKES[kind], waiting - done + (kind is Kind.B)


def _weights(row: Iterable[Start], times: Times) -> Iterator[Start]:
    """Yield a W for every B of `row` in the first idle slots after it; W of later stages come first."""
    waiting: list[tuple[int, int]] = []
    takes, backward, weight = lengths(times), Kind.B, Kind.W
    free, gap = 0, takes[weight]
    for (kind, stage, microbatch), slot in [*row, Start(Op(Kind.F, 0, 0), sys.maxsize)]:
        while waiting and free + gap <= slot:
            last, first = heappop(waiting)
            yield Start(Op(weight, -last, first), free)
            free += gap
        free = slot + takes[kind]
        if kind is backward:
            heappush(waiting, (-stage, microbatch))
