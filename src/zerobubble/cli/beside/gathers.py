"""The gathers of weights that lie in shards, beside a schedule: how many, the fewest there could be, and when the weights are there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import click
from rich.text import Text

from zerobubble.cli.inputs.options import bytes_with_unit, option_group
from zerobubble.cli.inputs.schedule_and_costs import Costed
from zerobubble.gathers import RankGathers, plan_gathers, play_gathers
from zerobubble.ir import Schedule
from zerobubble.planning import Problem, Sharded
from zerobubble.timeline import Timeline
from zerobubble.units import counted, show_bytes, show_ms, show_range


@dataclass(frozen=True)
class GatherOptions:
    """What FSDP2 divides, as the command line says it: the bytes of stages' weights when gathered, and those a rank has for them."""

    weights: tuple[int, ...] | None
    gathered: int | None
    gather_rate: int | None

    def sharded(self, planned: Problem | None, within: float = 0.0) -> Sharded | None:
        """The same for the planner, or what the plan in the file was made for; None where nothing lies in shards.

        Raises where something is said of weights of no known size.
        """
        if self.weights is None:
            if self.gathered is not None or self.gather_rate is not None:
                raise click.UsageError("--gathered and --gather-rate are for gathered weights: give their sizes with --weights, too")
            return None if planned is None else planned.sharded
        weights = self.weights[0] if len(self.weights) == 1 else self.weights
        return Sharded(weights, self.gathered, self.gather_rate, within)


def _list_of_bytes(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    sizes = () if value is None else tuple(bytes_with_unit(ctx, param, part) for part in value.split(","))
    return tuple(size for size in sizes if size is not None) or None


gather_options = option_group(
    GatherOptions,
    "sharded",
    click.option(
        "--weights",
        callback=_list_of_bytes,
        metavar="BYTES",
        help="Weights that FSDP2 divides, in bytes when gathered: of a rank, whose stages share them, or of each stage with commas.",
    ),
    click.option(
        "--gathered",
        callback=bytes_with_unit,
        metavar="BYTES",
        help="With --weights: memory of a rank for gathered weights; each stays if not given.",
    ),
    click.option(
        "--gather-rate",
        callback=bytes_with_unit,
        metavar="BYTES",
        help="With --weights: bytes that a rank gathers in a second; gathers take no time if not given.",
    ),
)
"""The options of a verb that shows gathers; they make its argument `sharded`."""


def planned(schedule: Schedule, sharded: Sharded | None) -> tuple[RankGathers, ...]:
    """The gathers of each rank; none where nothing lies in shards."""
    return () if sharded is None else plan_gathers(schedule, sharded.sizes(schedule.placement), sharded.memory)


def told_in_time(costed: Costed, plans: Sequence[RankGathers], sharded: Sharded | None) -> str:
    """How long the schedule takes with its gathers; empty where they take no time."""
    if sharded is None or sharded.bytes_per_second is None:
        return ""
    times = sharded.times(costed.schedule.placement)
    span, makespan = play_gathers(costed.schedule, costed.costs, plans, times).metrics
    each = show_range(times, show_ms)
    return f"with gathers of {each}, which passes wait for: makespan {show_ms(makespan)}, longest rank span {show_ms(span)}"


def as_dicts(plans: Sequence[RankGathers]) -> list[dict[str, object]]:
    """A dictionary for each rank."""
    return [
        {
            "num_gathers": len(plan.gathers),
            "bound": plan.bound,
            "peak_bytes": plan.peak_bytes,
            "gathers": [g._asdict() for g in plan.gathers],
        }
        for plan in plans
    ]


def picture(schedule: Schedule, timeline: Timeline, plans: Sequence[RankGathers], width: int) -> Text:
    """A line for each rank and stage in the scale of the timeline's picture above it, and the counts."""
    label = len(f"rank {timeline.num_ranks - 1} ")
    columns = max(10, width - label)
    lines = []
    for rank, plan in enumerate(plans):
        lines.append(f"rank {rank}: {told_in_short(plan)}")
        edges = _edges(schedule, timeline, rank, columns)
        for stage in sorted({gather.stage for gather in plan.gathers}):
            lines.append(f" {stage}".ljust(label) + "".join(_lane(plan, stage, edges)))
    lines.append("weights of a stage: > being gathered, = there")
    return Text("\n".join(lines), no_wrap=True)


def told_in_short(plan: RankGathers) -> str:
    """How many gathers a rank has, how many it needs, and what they take."""
    proof = "no order of gathers has fewer" if plan.is_proven else f"none has fewer than {plan.bound}"
    return f"{counted(len(plan.gathers), 'gather')} of weights, {proof}; up to {show_bytes(plan.peak_bytes)}"


def _edges(schedule: Schedule, timeline: Timeline, rank: int, columns: int) -> list[tuple[int, int]]:
    """For each step of a rank, the column where it begins and the one behind its end."""
    spans = {span.op: span for span in timeline.rows[rank]}
    duration = max(1, timeline.makespan)
    return [
        (
            round((spans[step[0]].start - timeline.start) * columns / duration),
            round((spans[step[-1]].end - timeline.start) * columns / duration),
        )
        for step in schedule.steps[rank]
    ]


def _lane(plan: RankGathers, stage: int, edges: Sequence[tuple[int, int]]) -> Iterator[str]:
    """The line of a stage: a gather may begin when the step before it is over."""
    at = 0
    for gather in plan.gathers:
        if gather.stage == stage:
            begins = edges[gather.begins - 1][1] if gather.begins else 0
            needed, ends = edges[gather.needed][0], edges[gather.ends][1]
            yield "·" * (begins - at) + ">" * (needed - begins) + "=" * (ends - needed)
            at = ends
    yield "·" * (max(end for _, end in edges) - at)
