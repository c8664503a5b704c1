"""Fitting costs to a measured timeline: the times of each stage's passes and the bytes that they hold."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from statistics import median_low
from typing import NamedTuple, TypeVar

from zerobubble.arguments import NUMBER, each, takes
from zerobubble.costs import FUSED, MOST_BUCKETS, NS_PER_MS, UNIT_BYTES, Costs
from zerobubble.errors import InputError
from zerobubble.kinds import HELD, SENT_BETWEEN_STAGES, Kind, ValueKind, head_kinds, kinds_making, makes_if_recomputed, traits_of
from zerobubble.listing import listing
from zerobubble.rules import makers, recomputed, uses
from zerobubble.timeline import Span, Timeline, steps_of

__all__ = ["fit_comm", "fit_costs", "late_messages"]

__dir__ = listing(__all__)

T = TypeVar("T")

Durations = dict[tuple[tuple[str, ...], int], list[int]]
"""Measured durations, by the columns of `Costs` whose sum they are, and by stage."""

BETWEEN_PASSES = 50_000
"""Longest gap, in ns, between two passes of a rank that does not wait."""

MemoryChanges = dict[tuple[Kind, int, Kind | None], list[int]]
"""Measured changes of the bytes held by a rank, by kind, stage, and the kind of the pass that recomputes the forward."""


@takes(timeline=Timeline, comm_ms=NUMBER, shares=each(NUMBER))
def fit_costs(timeline: Timeline, comm_ms: float = 0.0, shares: Sequence[float] = ()) -> Costs:
    """Return the costs of a measured timeline: for each stage the median times of F, B and W, and the median bytes held after F and B.

    A stage that ran only BW gets its time as `backward` and 0 as `weight`, and holds the same bytes until W as until BW. Overlapped passes
    only determine `hidden`. If a stage ran BW as well as B and W, and BW took less, the costs have the column `fused`, with B + W for
    stages that did not run both. `reduce` is the total time of a stage's gradient sums, the median over ranks that share it. Columns of
    added kinds are fitted in the same way, with 0 for stages without such passes.

    Raises `InputError` for a stage without F or without a backward pass, for memory that was not recorded after each pass, for a divided
    head, and for shares of another number of microbatches.

    Arguments:
        timeline: a measured training step. Without memory, all bytes are `UNIT_BYTES`.
        comm_ms: the time of every message, in ms.
        shares: one factor for each microbatch, as in `Costs`; times and bytes are then those of a microbatch of share 1.
    """
    _check_shares(timeline, shares)
    if any(span.op.kind in head_kinds() for _, span in timeline.spans()):
        raise InputError("costs can only be fitted to timelines with the head on the last stage, but this one has passes of a divided head")
    times = _times(timeline, shares)
    num_stages = _num_stages(timeline, times)
    stages, changes = range(num_stages), _memory_changes(timeline, shares)
    forward = tuple(_median(times, ("forward",), stage) for stage in stages)
    backward = tuple(
        _median(times, ("backward",) if (("backward",), stage) in times else ("backward", "weight"), stage) for stage in stages
    )
    weight = tuple(_median(times, ("weight",), stage) for stage in stages)
    saved = tuple(_held(changes, ValueKind.SAVED, stage, UNIT_BYTES) for stage in stages)
    work = tuple(_held(changes, ValueKind.WEIGHT_WORK, stage, saved[stage]) for stage in stages)
    apart = Costs(forward, backward, weight, (round(comm_ms * NS_PER_MS),) * (num_stages - 1), saved, work)
    fused = _fused(times, apart)
    apart = replace(apart.with_columns(**_further(times, changes, stages), **fused), shares=tuple(shares))
    sums = tuple(_reduce(timeline, stage) for stage in stages)
    buckets = tuple(_buckets(timeline, stage) for stage in stages)
    return replace(apart, hidden=tuple(_hidden(timeline, apart)), reduce=sums, buckets=buckets)


def _further(times: Durations, changes: MemoryChanges, stages: range) -> dict[str, list[int]]:
    """Return the further columns of the kinds in the timeline."""
    alone = {columns[0] for columns, _ in times if len(columns) == 1} - {"forward", "backward", "weight"}
    medians = {name: [_median(times, (name,), stage) for stage in stages] for name in sorted(alone)}
    value_kinds = {
        value_kind for kind, _, recomputed_by in changes for value_kind in makes_if_recomputed(kind, recomputed_by) if value_kind in HELD
    }
    for value_kind in value_kinds - {ValueKind.SAVED, ValueKind.WEIGHT_WORK}:
        medians[HELD[value_kind]] = [_held(changes, value_kind, stage, 0) for stage in stages]
    return medians


def _fused(times: Durations, apart: Costs) -> dict[str, list[int]]:
    """Return the column with the times of BW if some stage ran BW, B and W, and BW took less than B and W; otherwise no column."""
    both = [b + w for b, w in zip(apart.backward, apart.weight, strict=True)]
    columns = [traits_of(kind).times for kind in (Kind.B, Kind.W, Kind.BW)]
    fused = list(both)
    for stage, time in enumerate(both):
        if all((kind_columns, stage) in times for kind_columns in columns):
            fused[stage] = min(time, _median(times, columns[-1], stage))
    return {} if fused == both else {FUSED: fused}


@takes(timeline=Timeline)
def fit_comm(timeline: Timeline) -> tuple[int, ...]:
    """Return, for each link of `timeline`, the ns from the end of the pass that sends a message to the start of the pass that waits for it.

    Only messages for which a rank had to wait idle count, and overlapped passes are left out. The result is the mean of the medians in both
    directions, so that differences between clocks cancel. A link between stages of one rank has 0.

    Raises `InputError` for a link for whose messages no rank had to wait.
    """
    times = link_times(timeline)
    for link, time in enumerate(times):
        if time is None:
            message = "no rank had to wait for a message between stages {link} and {next_stage}, so its time is not known"
            raise InputError(message, link=link, next_stage=link + 1, remedy="run microbatches one by one")
    return tuple(time for time in times if time is not None)


def link_times(timeline: Timeline) -> tuple[int | None, ...]:
    """Return the time of each link as `fit_comm` does, None if no rank had to wait for a message."""
    links = range(_num_stages(timeline, _times(timeline, ())) - 1)
    delays = _delays(timeline, len(links) + 1)
    return tuple(
        _link_time([delays[value_kind, link] for value_kind in sorted(SENT_BETWEEN_STAGES) if (value_kind, link) in delays])
        for link in links
    )


@takes(timeline=Timeline, share=NUMBER)
def late_messages(timeline: Timeline, share: float) -> tuple[int | None, ...]:
    """Return, for each link of `timeline`, the time in ns within which all but `share` of its messages arrived; None if unknown.

    The time of a message is only known if a rank waited for it; others count as faster. So the time of a link is unknown if at most `share`
    of its messages were late. The times of both directions are averaged if both are known, so that differences between clocks cancel.
    """
    links = range(_num_stages(timeline, _times(timeline, ())) - 1)
    delays: dict[tuple[ValueKind, int], list[int | None]] = defaultdict(list)
    for message in _messages(timeline, len(links) + 1):
        delays[message.value_kind, message.link].append(message.delay if message.is_late else None)
    times = [
        [_within(delays[value_kind, link], share) for value_kind in sorted(SENT_BETWEEN_STAGES) if (value_kind, link) in delays]
        for link in links
    ]
    measured = [[time for time in directions if time is not None] for directions in times]
    return tuple(round(sum(directions) / len(directions)) if directions else None for directions in measured)


def _within(delays: Sequence[int | None], share: float) -> int | None:
    """Return the smallest time within which all but `share` of the messages arrived; those with None arrived before all others."""
    late = sorted(delay for delay in delays if delay is not None)
    place = len(delays) - int(share * len(delays)) - 1 - (len(delays) - len(late))
    return max(0, late[place]) if place >= 0 else None


def _link_time(ways: Sequence[Sequence[int]]) -> int | None:
    waited = [median_low(delays) for delays in ways if delays]
    if not waited:
        return None if ways else 0
    return max(0, round(sum(waited) / len(waited)))


class _Message(NamedTuple):
    """A message of a measured step, with its link and the time from its send to the start of the pass that uses it.

    `is_first` is true if the receiver was idle when the message was sent, `is_late` if the receiver was idle when it arrived. Both are
    false for messages to overlapped passes.
    """

    value_kind: ValueKind
    link: int
    delay: int
    is_first: bool
    is_late: bool


def _messages(timeline: Timeline, num_stages: int) -> Iterator[_Message]:
    """Yield the messages between ranks."""
    ended = {span.op: (rank, span.end) for rank, span in timeline.spans()}
    for rank, row in enumerate(timeline.rows):
        free = timeline.start
        for spans in steps_of(row):
            for value in (value for value in uses(spans[0].op, num_stages) if value.value_kind in SENT_BETWEEN_STAGES):
                source, sent = next((ended[op] for op in makers(value) if op in ended), (rank, 0))
                if source != rank:
                    begin, link, alone = spans[0].start, min(value.stage, spans[0].op.stage), len(spans) == 1
                    is_late = alone and begin - max(free, sent) > BETWEEN_PASSES
                    yield _Message(value.value_kind, link, begin - sent, alone and free <= sent, is_late)
            free = max(span.end for span in spans)


def _delays(timeline: Timeline, num_stages: int) -> dict[tuple[ValueKind, int], list[int]]:
    """Return the delays of messages for which a pass waited, by value kind and link; empty lists if none waited."""
    delays: dict[tuple[ValueKind, int], list[int]] = defaultdict(list)
    for message in _messages(timeline, num_stages):
        link_delays = delays[message.value_kind, message.link]
        if message.is_first:
            link_delays.append(message.delay)
    return dict(delays)


def _check_shares(timeline: Timeline, shares: Sequence[float]) -> None:
    count = 1 + max((span.op.microbatch for _, span in timeline.spans()), default=-1)
    if shares and len(shares) != count:
        message = "the timeline has {count} microbatches, but there are {num_shares} shares"
        raise InputError(message, count=count, num_shares=len(shares), remedy="give one for each")
    if wrong := [share for share in shares if not share > 0]:
        raise InputError("the share of a microbatch must be a number above 0, got {got}", got=wrong[0])


def _times(timeline: Timeline, shares: Sequence[float]) -> Durations:
    alone = (span for row in timeline.rows for span in _alone(row))
    return _collect(((traits_of(span.op.kind).times, span.op.stage), _of_share_1(span.duration, span, shares)) for span in alone)


def _of_share_1(amount: int, span: Span, shares: Sequence[float]) -> int:
    """Return the ns or bytes of a pass, scaled to a microbatch of share 1."""
    return round(amount / shares[span.op.microbatch]) if shares else amount


def _alone(row: Sequence[Span]) -> list[Span]:
    return [spans[0] for spans in steps_of(row) if len(spans) == 1]


def _hidden(timeline: Timeline, apart: Costs) -> Iterator[int]:
    """Yield for each stage the time that its overlapped steps save, compared with running their two passes in turn."""
    saved: dict[int, list[int]] = defaultdict(list)
    for row in timeline.rows:
        for first, second in (spans for spans in steps_of(row) if len(spans) == 2):
            both = apart.step_time((first.op,)) + apart.step_time((second.op,))
            smaller = min(first, second, key=lambda span: apart.shares[span.op.microbatch] if apart.shares else 1)
            saved[first.op.stage].append(_of_share_1(both - (max(first.end, second.end) - first.start), smaller, apart.shares))
    for stage in range(apart.num_stages):
        yield max(0, median_low(saved.get(stage, [0])))


def _reduce(timeline: Timeline, stage: int) -> int:
    """Return the total time of a stage's sums on a rank, the median over ranks that have any."""
    of_ranks = [sum(reduction.duration for reduction in row if reduction.stage == stage) for row in timeline.reductions]
    return median_low(list(filter(None, of_ranks)) or [0])


def _buckets(timeline: Timeline, stage: int) -> int:
    """Return the number of a stage's sums, the median over ranks on which the first began before the stage's last pass ended."""
    of_ranks = []
    for row, sums in zip(timeline.rows, timeline.reductions, strict=False):
        starts = [reduction.start for reduction in sums if reduction.stage == stage]
        if starts and min(starts) < max(span.end for span in row if span.op.stage == stage):
            of_ranks.append(len(starts))
    return min(MOST_BUCKETS, median_low(of_ranks or [0]))


def _memory_changes(timeline: Timeline, shares: Sequence[float]) -> MemoryChanges:
    """Return the bytes that each pass added on its rank; empty for a timeline without memory."""
    measured = []
    for rank, steps in enumerate(timeline.memory):
        row = timeline.rows[rank]
        if len(steps) != len(row):
            message = "rank {rank} ran {num_row} passes but has {num_steps} memory steps; fitting costs needs one after each pass"
            raise InputError(message, rank=rank, num_row=len(row), num_steps=len(steps))
        before, alone = [0, *(held for _, held in steps)], set(_alone(row))
        recomputed_by = recomputed(span.op for span in row)
        changes = zip(row, steps, before, strict=False)
        for span, (_, held), was in changes:
            if span in alone:
                measured.append(((*span.op[:2], recomputed_by.get(span.op[1:])), _of_share_1(held - was, span, shares)))
    return _collect(measured)


def _collect(measurements: Iterable[tuple[T, int]]) -> dict[T, list[int]]:
    samples: dict[T, list[int]] = defaultdict(list)
    for key, value in measurements:
        samples[key].append(value)
    return dict(samples)


def _num_stages(timeline: Timeline, times: Durations) -> int:
    """Return the number of stages; raises `InputError` if a stage lacks a forward or backward."""
    if not times:
        raise InputError("costs cannot be fitted to a timeline without passes; {remedy}", remedy="measure a training step")
    num_stages = 1 + max(stage for _, stage in times)
    ran = {span.op[:2] for row in timeline.rows for span in _alone(row)}
    for stage in range(num_stages):
        for value_kind, direction in ((ValueKind.ACTIVATION, "forward"), (ValueKind.GRADIENT, "backward")):
            if not any((kind, stage) in ran for kind in kinds_making(value_kind)):
                message = "stage {stage} of the timeline has no {direction} pass; costs need a whole training step"
                raise InputError(message, stage=stage, direction=direction)
    return num_stages


def _median(times: Durations, columns: tuple[str, ...], stage: int) -> int:
    return median_low(times.get((columns, stage), [0]))


def _held(changes: MemoryChanges, value_kind: ValueKind, stage: int, default: int) -> int:
    """Return the bytes of `value_kind`: the bytes that its makers add, plus the bytes that they consume; `default` if not measured."""
    for (kind, at, recomputed_by), added in changes.items():
        if at == stage and value_kind in makes_if_recomputed(kind, recomputed_by):
            used = [other for other, hop in traits_of(kind).uses if hop == 0 and other in HELD]
            return max(0, median_low(added) + sum(_held(changes, other, stage, 0) for other in used))
    return default
