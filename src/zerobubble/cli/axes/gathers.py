"""Gathers of sharded weights: their options, counts, times and picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import click
from rich.text import Text

from zerobubble.cli.inputs.options import SHARDED, bytes_with_unit, option, option_group, require_with
from zerobubble.cli.inputs.schedule_and_costs import Costed
from zerobubble.gathers import RankGathers, plan_gathers, play_gathers
from zerobubble.ir import Schedule
from zerobubble.planning import Problem, Sharded
from zerobubble.timeline import Timeline
from zerobubble.units import counted, show_bytes, show_ms, show_range


def _list_of_bytes(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    sizes = () if value is None else tuple(bytes_with_unit(ctx, param, part) for part in value.split(","))
    return tuple(size for size in sizes if size is not None) or None


@dataclass(frozen=True, kw_only=True)
class GatherOptions:
    """Weights that FSDP2 shards."""

    weights: tuple[int, ...] | None = option(
        "--weights",
        callback=_list_of_bytes,
        metavar="BYTES",
        help="Gathered bytes of weights that FSDP2 shards, of a rank or a list of stages.",
    )
    gathered: int | None = option(
        "--gathered",
        callback=bytes_with_unit,
        metavar="BYTES",
        help="Memory of a rank for gathered weights; by default all stay gathered.",
    )
    gather_rate: int | None = option(
        "--gather-rate",
        callback=bytes_with_unit,
        metavar="BYTES",
        help="Bytes gathered per second; by default in no time.",
    )

    def sharded(self, planned: Problem | None, within: float = 0.0) -> Sharded | None:
        """Returns the sharded weights, or those of the `planned` problem if not given. Raises if other options need --weights."""
        if self.weights is None:
            for name in ("gathered", "gather_rate"):
                require_with(name, "--weights", "give their sizes")
            return None if planned is None else planned.sharded
        weights = self.weights[0] if len(self.weights) == 1 else self.weights
        return Sharded(weights, self.gathered, self.gather_rate, within)


gather_options = option_group(GatherOptions, "sharded", SHARDED)


def planned(schedule: Schedule, sharded: Sharded | None) -> tuple[RankGathers, ...]:
    """Returns the gathers of each rank; empty without sharded weights."""
    return () if sharded is None else plan_gathers(schedule, sharded.sizes(schedule.placement), sharded.memory)


def gather_time_text(costed: Costed, plans: Sequence[RankGathers], sharded: Sharded | None) -> str:
    """Describes the time of the schedule with its gathers; empty if they take no time."""
    if sharded is None or sharded.bytes_per_second is None:
        return ""
    times = sharded.times(costed.schedule.placement)
    span, makespan = play_gathers(costed.schedule, costed.costs, plans, times).metrics
    duration = show_range(times, show_ms)
    return f"with passes waiting for gathers of {duration}: makespan {show_ms(makespan)}, span {show_ms(span)}"


def as_dicts(plans: Sequence[RankGathers]) -> list[dict[str, object]]:
    """Returns a dictionary for each rank."""
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
    """Draws a line for each rank and stage, in the time scale of the timeline's picture, and the number of gathers of each rank."""
    label = len(f"rank {timeline.num_ranks - 1} ")
    columns = max(10, width - label)
    lines = []
    for rank, plan in enumerate(plans):
        lines.append(f"rank {rank}: {gather_text(plan)}")
        edges = _edges(schedule, timeline, rank, columns)
        for stage in sorted({gather.stage for gather in plan.gathers}):
            lines.append(f" {stage}".ljust(label) + "".join(_lane(plan, stage, edges)))
    lines.append("weights of a stage: > being gathered, = gathered")
    return Text("\n".join(lines), no_wrap=True)


def gather_text(plan: RankGathers) -> str:
    """Describes the gathers of a rank: their number, its lower bound, and their peak memory."""
    proof = "proven the fewest" if plan.is_proven else f"at least {plan.bound}"
    return f"{counted(len(plan.gathers), 'gather')} of weights, {proof}; up to {show_bytes(plan.peak_bytes)}"


def _edges(schedule: Schedule, timeline: Timeline, rank: int, columns: int) -> list[tuple[int, int]]:
    """Returns, for each step of a rank, its first column and the column after its last one."""
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
    """Draws the line of a stage. A gather may begin when the step before it ends."""
    at = 0
    for gather in plan.gathers:
        if gather.stage == stage:
            begins = edges[gather.begins - 1][1] if gather.begins else 0
            needed, ends = edges[gather.needed][0], edges[gather.ends][1]
            yield "·" * (begins - at) + ">" * (needed - begins) + "=" * (ends - needed)
            at = ends
    yield "·" * (max(end for _, end in edges) - at)
