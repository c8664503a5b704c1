"""From a measured timeline back to costs: what each stage's passes took, and what they held."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from statistics import median_low
from typing import TypeVar

from zerobubble.arguments import NUMBER, takes
from zerobubble.costs import NS_PER_MS, UNIT_BYTES, Costs
from zerobubble.errors import InputError
from zerobubble.kinds import HELD, MOVES, Kind, Stuff, kinds_making, traits_of
from zerobubble.rules import makers, uses
from zerobubble.timeline import Span, Timeline, steps_of

__all__ = ["fit_comm", "fit_costs"]

T = TypeVar("T")

Durations = dict[tuple[tuple[str, ...], int], list[int]]
"""Measured durations by the columns of `Costs` that they are the sum of, and the stage."""

MemoryChanges = dict[tuple[Kind, int], list[int]]
"""By how many bytes passes changed what their rank held, by kind and stage."""


@takes(timeline=Timeline, comm_ms=NUMBER)
def fit_costs(timeline: Timeline, comm_ms: float = 0.0) -> Costs:
    """The costs that `timeline` was measured under: per stage the median time of F, B and W, and the median bytes held after F and B.

    A stage that ran only BW gets its time as `backward` and 0 as `weight`, and counts as holding until W what it held until BW.
    A timeline without memory gives `UNIT_BYTES` everywhere. Messages are taken to last `comm_ms`. Overlapped passes tell what
    overlapping hides and are left out of the rest. The further columns that added kinds of passes ask for are fitted alike, with 0 for
    stages without such passes.

    Raises `InputError` for a stage without F or without a backward pass, and for memory that was not recorded pass by pass.
    """
    times = _times(timeline)
    num_stages = _num_stages(timeline, times)
    stages, changes = range(num_stages), _memory_changes(timeline)
    forward = tuple(_median(times, ("forward",), stage) for stage in stages)
    backward = tuple(
        _median(times, ("backward",) if (("backward",), stage) in times else ("backward", "weight"), stage) for stage in stages
    )
    weight = tuple(_median(times, ("weight",), stage) for stage in stages)
    saved = tuple(_held(changes, Stuff.SAVED, stage, UNIT_BYTES) for stage in stages)
    work = tuple(_held(changes, Stuff.WORK, stage, saved[stage]) for stage in stages)
    apart = Costs(forward, backward, weight, (round(comm_ms * NS_PER_MS),) * (num_stages - 1), saved, work)
    apart = apart.with_columns(**_further(times, changes, stages))
    return replace(apart, hidden=tuple(_hidden(timeline, apart)))


def _further(times: Durations, changes: MemoryChanges, stages: range) -> dict[str, list[int]]:
    """The columns of the kinds in the timeline that not all costs have."""
    alone = {columns[0] for columns, _ in times if len(columns) == 1} - {"forward", "backward", "weight"}
    found = {name: [_median(times, (name,), stage) for stage in stages] for name in sorted(alone)}
    made = {stuff for kind, _ in changes for stuff in traits_of(kind).makes if stuff in HELD}
    for stuff in made - {Stuff.SAVED, Stuff.WORK}:
        found[HELD[stuff]] = [_held(changes, stuff, stage, 0) for stage in stages]
    return found


@takes(timeline=Timeline)
def fit_comm(timeline: Timeline) -> tuple[int, ...]:
    """Per link, the time in ns from the end of the pass that sends a message to the start of the pass that waits for it.

    Counts the messages that a rank had nothing to do but wait for, overlapped passes left out: the mean of their medians either way, so
    that what clocks are apart cancels. A link between stages of one rank has 0.

    Raises `InputError` for a link whose messages nobody had to wait for.
    """
    links = range(_num_stages(timeline, _times(timeline)) - 1)
    delays = _delays(timeline, len(links) + 1)
    return tuple(_link_time([delays[stuff, link] for stuff in sorted(MOVES) if (stuff, link) in delays], link) for link in links)


def _link_time(ways: Sequence[Sequence[int]], link: int) -> int:
    waited = [median_low(delays) for delays in ways if delays]
    if ways and not waited:
        raise InputError(
            f"no rank had to wait for a message between stages {link} and {link + 1}, so its time is not known: run microbatches one by one"
        )
    return max(0, round(sum(waited) / len(waited))) if waited else 0


def _delays(timeline: Timeline, num_stages: int) -> dict[tuple[Stuff, int], list[int]]:
    """By what a message carries and its link, how long after it was sent the pass that waited for it began; empty where none waited."""
    ended = {span.op: (rank, span.end) for rank, span in timeline.spans()}
    delays: dict[tuple[Stuff, int], list[int]] = defaultdict(list)
    for rank, row in enumerate(timeline.rows):
        free = timeline.start
        for spans in steps_of(row):
            for value in (value for value in uses(spans[0].op, num_stages) if value.stuff in MOVES):
                source, sent = next((ended[op] for op in makers(value) if op in ended), (rank, 0))
                if source == rank:
                    continue
                found = delays[value.stuff, min(value.stage, spans[0].op.stage)]
                if len(spans) == 1 and free <= sent:
                    found.append(spans[0].start - sent)
            free = max(span.end for span in spans)
    return dict(delays)


def _times(timeline: Timeline) -> Durations:
    alone = (span for row in timeline.rows for span in _alone(row))
    return _collect(((traits_of(span.op.kind).times, span.op.stage), span.duration) for span in alone)


def _alone(row: Sequence[Span]) -> list[Span]:
    return [spans[0] for spans in steps_of(row) if len(spans) == 1]


def _hidden(timeline: Timeline, apart: Costs) -> Iterator[int]:
    """Per stage, what the overlapped steps that begin with a pass of it take less than their passes apart."""
    saved: dict[int, list[int]] = defaultdict(list)
    for row in timeline.rows:
        for first, second in (spans for spans in steps_of(row) if len(spans) == 2):
            both = apart.step_time((first.op,)) + apart.step_time((second.op,))
            saved[first.op.stage].append(both - (max(first.end, second.end) - first.start))
    for stage in range(apart.num_stages):
        yield max(0, median_low(saved.get(stage, [0])))


def _memory_changes(timeline: Timeline) -> MemoryChanges:
    """How many bytes each pass added to what its rank held; empty for a timeline without memory."""
    found = []
    for rank, steps in enumerate(timeline.memory):
        row = timeline.rows[rank]
        if len(steps) != len(row):
            raise InputError(
                f"rank {rank} ran {len(row)} passes but has {len(steps)} memory steps; costs are fitted to one step after each pass"
            )
        before, alone = [0, *(held for _, held in steps)], set(_alone(row))
        changes = zip(row, steps, before, strict=False)
        found += [((span.op.kind, span.op.stage), held - was) for span, (_, held), was in changes if span in alone]
    return _collect(found)


def _collect(measurements: Iterable[tuple[T, int]]) -> dict[T, list[int]]:
    samples: dict[T, list[int]] = defaultdict(list)
    for key, value in measurements:
        samples[key].append(value)
    return dict(samples)


def _num_stages(timeline: Timeline, times: Durations) -> int:
    """The number of stages, each with the passes it needs."""
    if not times:
        raise InputError("a timeline without passes tells no costs; measure a training step")
    num_stages = 1 + max(stage for _, stage in times)
    ran = {span.op[:2] for row in timeline.rows for span in _alone(row)}
    for stage in range(num_stages):
        for stuff, direction in ((Stuff.ACTIVATION, "forward"), (Stuff.GRADIENT, "backward")):
            if not any((kind, stage) in ran for kind in kinds_making(stuff)):
                raise InputError(f"stage {stage} of the timeline has no {direction} pass; costs need a whole training step")
    return num_stages


def _median(times: Durations, columns: tuple[str, ...], stage: int) -> int:
    return median_low(times.get((columns, stage), [0]))


def _held(changes: MemoryChanges, stuff: Stuff, stage: int, default: int) -> int:
    """The bytes of `stuff`: what passes that make it add, and what they use up; `default` where none was measured."""
    for kind in kinds_making(stuff):
        if (kind, stage) in changes:
            used = [other for other, hop in traits_of(kind).uses if hop == 0 and other in HELD]
            return max(0, median_low(changes[kind, stage]) + sum(_held(changes, other, stage, 0) for other in used))
    return default
