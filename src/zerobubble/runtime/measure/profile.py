"""Measuring what passes and messages take: microbatches go through the model one by one, and nothing of the model changes."""

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
from zerobubble.runtime.measure.measured_head import without_head
from zerobubble.runtime.values.buffers import buffers_of, put_buffers
from zerobubble.runtime.values.gradients import Gradients
from zerobubble.runtime.values.weight_caches import changing_weights
from zerobubble.schedules.vocabulary import PASSES, algorithm_of
from zerobubble.timeline import Timeline

Progress = Callable[[int, int], object]
"""Hears of every step as (done, total)."""
_TIMES = ("forward", "backward", "weight", "comm")


def one_by_one(
    schedule: Schedule, *, computes_all_again: bool = False, algorithm: int | None = None, in_one_piece: bool = False
) -> Schedule:
    """The placement of `schedule` with a microbatch at a time: down through all stages and back, then each rank's W.

    With `in_one_piece` each backward is a BW.

    Stages some of whose forwards `schedule` computes again have all of them computed again, right before their backward, and with
    `computes_all_again` all stages have. Where `schedule` divides the head, parts of it are computed between the last forward and the last
    backward, by the `algorithm` that is given or else by its own; T, for which no backward waits, comes with W.

    A rank computes nothing while it waits for a message, but for W of a microbatch that is on its way elsewhere.
    """
    again = {stage: kind for row in schedule.rows for (stage, _), kind in recomputed(row).items()}
    if computes_all_again:
        again = dict.fromkeys(range(schedule.num_stages), Kind.R)
    parts = _parts_of_head(schedule, algorithm)
    rows = tuple(
        tuple(
            op
            for microbatch in range(schedule.num_microbatches)
            for op in _passes(schedule, rank, microbatch, again, parts, Kind.BW if in_one_piece else Kind.B)
        )
        for rank in range(schedule.num_ranks)
    )
    return Schedule(f"{schedule.name} (one by one)", schedule.placement, schedule.num_microbatches, rows, schedule.microbatch_routes)


def _parts_of_head(schedule: Schedule, algorithm: int | None) -> dict[int, list[tuple[Kind, int]]]:
    """By rank the passes of its part of the head, as (kind, stage); none where `schedule` does not divide it."""
    if not schedule.has_divided_head:
        return {}
    kinds = PASSES[algorithm or algorithm_of(schedule)]
    return {schedule.rank_of(stage, 0): [(kind, stage) for kind in kinds] for stage in schedule.head_parts}


def _passes(
    schedule: Schedule,
    rank: int,
    microbatch: int,
    again: Mapping[int, Kind],
    parts: Mapping[int, list[tuple[Kind, int]]],
    backward: Kind,
) -> list[Op]:
    """What `rank` does for one microbatch, one after another, where stages are computed `again` by passes of these kinds."""
    down = [stage for stage in range(schedule.num_stages) if schedule.rank_of(stage, microbatch) == rank]
    back = [(kind, stage) for stage in down[::-1] for kind in (again.get(stage), backward) if kind is not None]
    part = parts.get(rank, [])
    before = [each for each in part if Collective.GRADIENT in traits_of(each[0]).gives or each == part[0]]
    after = [each for each in part if each not in before]
    order = [*((Kind.F, stage) for stage in down), *before, *back, *after, *((Kind.W, stage) for stage in down[::-1] if backward is Kind.B)]
    return [Op(kind, stage, microbatch) for kind, stage in order]


@contextmanager
def untouched(modules: Iterable[nn.Module], device: torch.device, sums: Gradients) -> Iterator[None]:
    """Whatever passes run inside, gradients, buffers and torch's random state are afterwards what they were, to the bit.

    Inside, gradients start from nothing. Parameters need no care: passes only read them.
    """
    parts = [part for module in modules for part in module.modules()]
    gradients = {parameter: (parameter.grad, sums.of(parameter)) for part in parts for parameter in part.parameters(recurse=False)}
    buffers = [(part, buffers_of(part)) for part in parts]
    contents = {buffer: buffer.clone() for _, named in buffers for buffer in named.values() if buffer is not None}
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
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
def telling(progress: Progress | None, rank: int) -> Iterator[Progress]:
    """The callback for every step: `progress`, or by default a progress bar on rank 0's terminal, if it has one."""
    console = Console(stderr=True)
    if progress is not None or rank or not console.is_terminal:
        yield progress or (lambda done, total: None)
        return
    with Bars(TextColumn("profiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console, transient=True) as bars:
        bar = bars.add_task("")
        yield lambda done, total: bars.update(bar, completed=done, total=total)


def costs_of(placement: Placement, metered: Timeline, timed: Sequence[Timeline]) -> Costs:
    """The costs on `placement` according to single steps: the bytes held in the `metered` one, and the times of the `timed` ones.

    Times are medians over the microbatches of a step, and over the steps. Passes of a divided head are left out; see `with_measured_head`.
    """
    steps = [replace(fit_costs(without_head(timeline)), comm=fit_comm(timeline)) for timeline in timed]
    names = [*_TIMES, *(name for name in steps[0].time_columns if name in dict(steps[0].further))]
    times = {name: tuple(map(median_low, zip(*(step.column(name) for step in steps), strict=True))) for name in names}
    return replace(fit_costs(without_head(metered)).with_columns(**times), placement=placement)


def with_fused_of(costs: Costs, in_one_piece: Costs) -> Costs:
    """`costs` with the time of BW, which is the backward of `in_one_piece`: steps in which each backward is one; at most B and W."""
    apart = (b + w for b, w in zip(costs.backward, costs.weight, strict=True))
    return costs.with_columns(fused=list(map(min, in_one_piece.backward, apart)))


def with_level_of(costs: Costs, name: str, measured: Costs) -> Costs:
    """`costs` with a level of recomputation, of which `measured` are those of steps in which all stages have it.

    What R takes and F keeps are taken as shares of the times and bytes of the same steps: so are a machine's slower and faster minutes out
    of them.
    """
    pairs = zip(measured.column("recompute"), measured.forward, costs.forward, strict=True)
    again = [round(own * time / forward) if forward else time for time, forward, own in pairs]
    kept = zip(measured.column("held_input"), measured.held_after_f, costs.held_after_f, strict=True)
    return costs.with_level(name, again, [round(own * held / saved) if saved else held for held, saved, own in kept])
