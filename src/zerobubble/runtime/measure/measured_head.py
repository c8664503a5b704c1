"""Costs of the parts of a divided head, from steps with microbatches one by one, played by both algorithms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median_low
from typing import NamedTuple

from zerobubble.costs import COLLECTIVE, Costs
from zerobubble.ir import Kind
from zerobubble.kinds import head_kinds
from zerobubble.timeline import Span, Timeline


class MeasuredHead(NamedTuple):
    """The steps of one algorithm: one with `metered` memory, and others that were `timed`."""

    metered: Timeline
    timed: Sequence[Timeline]

    def time(self, kind: Kind, stage: int) -> int:
        """Returns the time of passes of this kind in ns: the median over microbatches, and over steps."""
        steps = [[span.duration for span in _spans(timeline, kind) if span.op.stage == stage] for timeline in self.timed]
        return median_low(map(median_low, steps))

    def held(self, kind: Kind) -> Mapping[int, int]:
        """Returns the bytes that a pass of this kind adds on its rank, by the stage of its part: the median over microbatches."""
        added: dict[int, list[int]] = {}
        for row, memory in zip(self.metered.rows, self.metered.memory, strict=True):
            before = [0, *(held for _, held in memory)]
            for span, (_, held), was in zip(row, memory, before, strict=False):
                if span.op.kind is kind:
                    added.setdefault(span.op.stage, []).append(held - was)
        return {stage: max(0, median_low(sizes)) for stage, sizes in added.items()}


def without_head(timeline: Timeline) -> Timeline:
    """Returns `timeline` without passes of a divided head, and without what they hold. Its memory must be recorded pass by pass."""
    rows = tuple(tuple(span for span in row if span.op.kind not in head_kinds()) for row in timeline.rows)
    return replace(timeline, rows=rows, memory=tuple(map(_held_without_head, timeline.rows, timeline.memory)))


def _held_without_head(row: Sequence[Span], memory: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    kept, head_bytes, before = [], 0, 0
    for span, (time, held) in zip(row, memory, strict=True):
        if span.op.kind in head_kinds():
            head_bytes += held - before
        else:
            kept.append((time, held - head_bytes))
        before = held
    return tuple(kept)


def with_measured_head(costs: Costs, algorithm: int, measured: Mapping[int, MeasuredHead]) -> Costs:
    """Returns `costs` with the columns of a divided head, from steps `measured` by algorithms 1 and 2.

    Algorithm 1 measures the forward, and algorithm 2 the weight gradient. The input gradient shares a pass with either of them; it is what
    remains of the passes of `algorithm`, which the pipeline plays. Stages without a part get 0. The time of a collective is the same for
    all, because ranks send equal sizes, except for the few sums of the softmax.
    """
    first, second = measured[1], measured[2]
    held = second.held(Kind.S) if algorithm == 2 else first.held(Kind.SL)
    forward, backward, weight, kept = ([0] * costs.num_stages for _ in range(4))
    for stage, size in held.items():
        forward[stage], weight[stage], kept[stage] = first.time(Kind.SL, stage), second.time(Kind.T, stage), size
        together = second.time(Kind.S, stage) - forward[stage] if algorithm == 2 else first.time(Kind.TX, stage) - weight[stage]
        backward[stage] = max(0, together)
    waits = [wait for timeline in second.timed for wait in collective_times(timeline)]
    collective = [median_low(waits) if waits else 0] * costs.num_stages
    return costs.with_columns(head_forward=forward, head_backward=backward, head_weight=weight, held_head=kept, **{COLLECTIVE: collective})


def collective_times(timeline: Timeline) -> Iterator[int]:
    """Returns, for each microbatch of a step by algorithm 2, the time in ns of a message from one rank to another.

    A rank begins S once it has the output of the last stage, and the backward of the last stage begins once the slowest rank has sent its
    part of the gradient. The clock of that rank is in both times with opposite signs, so their mean is the time of one way, whatever the
    clocks show. Microbatches in which the rank of the last stage was itself the slowest are left out.
    """
    last = 1 + max(span.op.stage for _, span in timeline.spans())
    parts: dict[int, dict[int, Span]] = {}
    outputs, backwards, home = {}, {}, 0
    for rank, span in timeline.spans():
        if span.op.kind is Kind.S:
            parts.setdefault(span.op.microbatch, {})[rank] = span
        elif span.op.stage == last - 1 and span.op.kind is Kind.F:
            outputs[span.op.microbatch], home = span, rank
        elif span.op.stage == last - 1 and span.op.kind is Kind.B:
            backwards[span.op.microbatch] = span
    for microbatch, given in parts.items():
        slowest = max(given, key=lambda rank: given[rank].end)
        if slowest != home:
            part = given[slowest]
            yield max(0, (part.start - outputs[microbatch].end + backwards[microbatch].start - part.end) // 2)


def _spans(timeline: Timeline, kind: Kind) -> Iterator[Span]:
    return (span for _, span in timeline.spans() if span.op.kind is kind)
