"""Profiles of passes, messages and the parts of a divided head: microbatches go through the model one by one, keeping its state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import median_low
from typing import NamedTuple

import torch
from torch import nn

from zerobubble.costs import COLLECTIVE, Costs
from zerobubble.fit import fit_comm, fit_costs
from zerobubble.ir import Kind, Op, Placement, Schedule
from zerobubble.kinds import Collective, head_kinds, traits_of
from zerobubble.rules import recomputed
from zerobubble.runtime.device import generators_restored, interface
from zerobubble.runtime.values.buffers import buffers_of, changing_weights, put_buffers
from zerobubble.runtime.values.gradients import Gradients
from zerobubble.runtime.values.memory import has_plain_type, local_part
from zerobubble.runtime.values.parameter_hooks import hooks_set_aside
from zerobubble.runtime.values.python_state import PythonState, put_back
from zerobubble.runtime.values.random_state import python_generator_restored
from zerobubble.schedules.vocabulary import PASSES, algorithm_of
from zerobubble.timeline import Span, Timeline

Progress = Callable[[int, int], object]
"""Called after every step with (done, total)."""
_TIMES = ("forward", "backward", "weight", "comm")


def one_by_one(schedule: Schedule, *, recomputes_all: bool = False, algorithm: int | None = None, fuses_backward: bool = False) -> Schedule:
    """Returns a schedule with one microbatch at a time: forward through all stages, backward, then W on each rank.

    With `fuses_backward`, each backward is a BW.

    Stages that recompute any forward in `schedule` recompute all of them, right before their backward; with `recomputes_all`, all stages
    do. If `schedule` divides the head, its parts run between the last forward and the last backward, by `algorithm`, or else by that of
    `schedule`; T, for which no backward waits, comes with W.

    While a rank waits for a message, it computes nothing except W of a microbatch that is on another rank.
    """
    recompute_kinds = {stage: kind for row in schedule.rows for (stage, _), kind in recomputed(row).items()}
    if recomputes_all:
        recompute_kinds = dict.fromkeys(range(schedule.num_stages), Kind.R)
    parts = _parts_of_head(schedule, algorithm)
    rows = tuple(
        tuple(
            op
            for microbatch in range(schedule.num_microbatches)
            for op in _passes(schedule, rank, microbatch, recompute_kinds, parts, Kind.BW if fuses_backward else Kind.B)
        )
        for rank in range(schedule.num_ranks)
    )
    return Schedule(f"{schedule.name} (one by one)", schedule.placement, schedule.num_microbatches, rows, schedule.microbatch_routes)


def _parts_of_head(schedule: Schedule, algorithm: int | None) -> dict[int, list[tuple[Kind, int]]]:
    """Returns the passes of each rank's part of the head, as (kind, stage); none if `schedule` does not divide it."""
    if not schedule.has_divided_head:
        return {}
    kinds = PASSES[algorithm or algorithm_of(schedule)]
    return {schedule.rank_of(stage, 0): [(kind, stage) for kind in kinds] for stage in schedule.head_parts}


def _passes(
    schedule: Schedule,
    rank: int,
    microbatch: int,
    recompute_kinds: Mapping[int, Kind],
    parts: Mapping[int, list[tuple[Kind, int]]],
    backward: Kind,
) -> list[Op]:
    """Returns the passes of `rank` for one microbatch, if stages are recomputed by passes of the kinds in `recompute_kinds`."""
    down = [stage for stage in range(schedule.num_stages) if schedule.rank_of(stage, microbatch) == rank]
    back = [(kind, stage) for stage in down[::-1] for kind in (recompute_kinds.get(stage), backward) if kind is not None]
    part = parts.get(rank, [])
    before = [head_pass for head_pass in part if Collective.GRADIENT in traits_of(head_pass[0]).gives or head_pass == part[0]]
    after = [head_pass for head_pass in part if head_pass not in before]
    order = [*((Kind.F, stage) for stage in down), *before, *back, *after, *((Kind.W, stage) for stage in down[::-1] if backward is Kind.B)]
    return [Op(kind, stage, microbatch) for kind, stage in order]


@contextmanager
def preserve_state(modules: Collection[nn.Module], loss_fn: object, device: torch.device, sums: Gradients) -> Iterator[list[str]]:
    """A context for passes, after which parameters, gradients, buffers, random and Python state are as before, down to the last bit.

    Inside, gradients start from nothing, and no hook on them runs. A forward may change parameters, so host memory has copies of them.
    Yields a list, which has the faults at the end: what the passes have changed and cannot be put back.
    """
    faults: list[str] = []
    parts = [part for module in modules for part in module.modules()]
    parameters = {parameter for part in parts for parameter in part.parameters(recurse=False)}
    python = PythonState(*modules, loss_fn).snapshot()
    generators = generators_restored([device] if interface(device).has_generator else [])
    with generators, hooks_set_aside(parameters), _gradients_restored(parameters, sums), values_restored(parts, parameters):
        try:
            yield faults
        finally:
            faults += map(str, put_back(python))


@contextmanager
def _gradients_restored(parameters: Collection[nn.Parameter], sums: Gradients) -> Iterator[None]:
    """A context that begins without gradients, and restores them at its end."""
    before = {parameter: (parameter.grad, sums.get(parameter)) for parameter in parameters}
    try:
        for parameter in parameters:
            parameter.grad = None
            sums.put(parameter, None)
        yield
    finally:
        for parameter, (gradient, total) in before.items():
            parameter.grad = gradient
            sums.put(parameter, total)


@contextmanager
def values_restored(parts: Sequence[nn.Module], parameters: Collection[nn.Parameter]) -> Iterator[None]:
    """A context that restores the values of `parameters` and of the buffers of `parts` at its end."""
    buffers = [(part, buffers_of(part)) for part in parts]
    contents = {buffer: buffer.clone() for _, named in buffers for buffer in named.values() if buffer is not None}
    plain = [parameter for parameter in parameters if has_plain_type(local_part(parameter.detach()))]
    values = {parameter: local_part(parameter.detach()).to("cpu", copy=True) for parameter in plain}
    try:
        yield
    finally:
        with torch.no_grad(), changing_weights():
            for parameter, value in values.items():
                if not torch.equal(local_part(parameter.detach()).cpu(), value):
                    local_part(parameter).copy_(value)
            for part, named in buffers:
                put_buffers(part, named)
            for buffer, content in contents.items():
                buffer.copy_(content)


@contextmanager
def progress_reporter(progress: Progress | None, rank: int) -> Iterator[Progress]:
    """A context with the callback for every step: `progress`, or by default a progress bar on the terminal of rank 0, if it has one."""
    if progress is not None or rank:
        yield progress or (lambda done, total: None)
        return
    with python_generator_restored():  # rich draws a number when it is imported
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda done, total: None
        return
    with Bars(TextColumn("profiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console, transient=True) as bars:
        bar = bars.add_task("")
        yield lambda done, total: bars.update(bar, completed=done, total=total)


def costs_of(placement: Placement, metered: Timeline, timed: Sequence[Timeline]) -> Costs:
    """Returns the costs on `placement` measured in single steps: bytes held from the `metered` step, times from the `timed` steps.

    Times are medians over microbatches, and over steps. Passes of a divided head are left out; see `with_measured_head`.
    """
    steps = [replace(fit_costs(without_head(timeline)), comm=fit_comm(timeline)) for timeline in timed]
    names = [*_TIMES, *(name for name in steps[0].time_columns if name in dict(steps[0].further))]
    times = {name: tuple(map(median_low, zip(*(step.column(name) for step in steps), strict=True))) for name in names}
    return replace(fit_costs(without_head(metered)).with_columns(**times), placement=placement)


def with_fused_of(costs: Costs, fuses_backward: Costs) -> Costs:
    """Returns `costs` with the time of BW, the backward of the steps `fuses_backward`; at most the sum of B and W."""
    apart = (b + w for b, w in zip(costs.backward, costs.weight, strict=True))
    return costs.with_columns(fused=list(map(min, fuses_backward.backward, apart)))


def with_level_of(costs: Costs, name: str, measured: Costs) -> Costs:
    """Returns `costs` with a recomputation level; `measured` are the costs of steps in which all stages have it.

    Times of R and bytes of F are scaled by the ratio of times and bytes in the same steps, which cancels variations of the machine's speed.
    """
    pairs = zip(measured.column("recompute"), measured.forward, costs.forward, strict=True)
    recompute = [round(cost * time / forward) if forward else time for time, forward, cost in pairs]
    kept = zip(measured.column("held_input"), measured.held_after_f, costs.held_after_f, strict=True)
    return costs.with_level(name, recompute, [round(cost * held / saved) if saved else held for held, saved, cost in kept])


class MeasuredHead(NamedTuple):
    """The steps of one algorithm: one with `metered` memory, and others that were `timed`."""

    metered: Timeline
    timed: Sequence[Timeline]

    def time(self, kind: Kind, stage: int) -> int:
        """Returns the time of passes of this kind in ns: the median over microbatches, and over steps."""
        spans = [[span for _, span in timeline.spans() if span.op.kind is kind and span.op.stage == stage] for timeline in self.timed]
        steps = [[span.duration for span in of_step] for of_step in spans]
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
    part of the gradient. The offset of that rank's clock is in both times with opposite signs, so their mean is the time of one message,
    independent of the clocks. Microbatches in which the rank of the last stage was the slowest are left out.
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
    for microbatch, by_rank in parts.items():
        slowest = max(by_rank, key=lambda rank: by_rank[rank].end)
        if slowest != home:
            part = by_rank[slowest]
            yield max(0, (part.start - outputs[microbatch].end + backwards[microbatch].start - part.end) // 2)
