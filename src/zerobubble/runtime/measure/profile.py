"""Profiles of passes and messages: microbatches go through the model one by one, and the state of the model is preserved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import median_low

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from torch import nn

from zerobubble.costs import Costs
from zerobubble.fit import fit_comm, fit_costs
from zerobubble.ir import Kind, Op, Placement, Schedule
from zerobubble.kinds import Collective, traits_of
from zerobubble.rules import recomputed
from zerobubble.runtime.device import generators_restored, interface
from zerobubble.runtime.measure.measured_head import without_head
from zerobubble.runtime.values.buffers import buffers_of, changing_weights, put_buffers
from zerobubble.runtime.values.gradients import Gradients
from zerobubble.schedules.vocabulary import PASSES, algorithm_of
from zerobubble.timeline import Timeline

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
    before = [each for each in part if Collective.GRADIENT in traits_of(each[0]).gives or each == part[0]]
    after = [each for each in part if each not in before]
    order = [*((Kind.F, stage) for stage in down), *before, *back, *after, *((Kind.W, stage) for stage in down[::-1] if backward is Kind.B)]
    return [Op(kind, stage, microbatch) for kind, stage in order]


@contextmanager
def preserve_state(modules: Iterable[nn.Module], device: torch.device, sums: Gradients) -> Iterator[None]:
    """A context for passes, after which gradients, buffers and the random state of torch are the same as before, down to the last bit.

    Inside, gradients start from nothing. Parameters need no copy, because passes only read them.
    """
    parts = [part for module in modules for part in module.modules()]
    gradients = {parameter: (parameter.grad, sums.of(parameter)) for part in parts for parameter in part.parameters(recurse=False)}
    buffers = [(part, buffers_of(part)) for part in parts]
    contents = {buffer: buffer.clone() for _, named in buffers for buffer in named.values() if buffer is not None}
    with generators_restored([device] if interface(device).has_generator else []):
        try:
            for parameter in gradients:
                parameter.grad = None
                sums.put(parameter, None)
            yield
        finally:
            for parameter, (gradient, total) in gradients.items():
                parameter.grad = gradient
                sums.put(parameter, total)
            with torch.no_grad(), changing_weights():
                for part, named in buffers:
                    put_buffers(part, named)
                for buffer, content in contents.items():
                    buffer.copy_(content)


@contextmanager
def progress_reporter(progress: Progress | None, rank: int) -> Iterator[Progress]:
    """A context with the callback for every step: `progress`, or by default a progress bar on the terminal of rank 0, if it has one."""
    console = Console(stderr=True)
    if progress is not None or rank or not console.is_terminal:
        yield progress or (lambda done, total: None)
        return
    with Bars(TextColumn("profiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console, transient=True) as bars:
        bar = bars.add_task("")
        yield lambda done, total: bars.update(bar, completed=done, total=total)


def costs_of(placement: Placement, metered: Timeline, timed: Sequence[Timeline]) -> Costs:
    """Returns the costs on `placement` according to single steps: the bytes held in the `metered` one, and the times of the `timed` ones.

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
    recompute = [round(own * time / forward) if forward else time for time, forward, own in pairs]
    kept = zip(measured.column("held_input"), measured.held_after_f, costs.held_after_f, strict=True)
    return costs.with_level(name, recompute, [round(own * held / saved) if saved else held for held, saved, own in kept])
