"""`zerobubble show`: a schedule played against costs, as a picture and in figures."""

from __future__ import annotations

import json
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from zerobubble.cli.drawing import draw, legend
from zerobubble.cli.figures import equal_costs, in_microbatches
from zerobubble.cli.files import is_file, read_schedule, write_text
from zerobubble.cli.options import (
    comm_option,
    held_option,
    json_option,
    make_schedule,
    microbatches_option,
    overlap_option,
    ranks_option,
    set_option,
    stages_option,
    times_option,
    width_option,
)
from zerobubble.errors import InputError
from zerobubble.export.svg import timeline_svg
from zerobubble.export.units import ms, show_ms, show_percent
from zerobubble.ir import Schedule
from zerobubble.simulation import simulate
from zerobubble.timeline import RankFigures, Timeline

TABLE_WIDTH = 72


@click.command("show")
@click.argument("name")
@ranks_option
@microbatches_option
@stages_option
@set_option
@times_option
@comm_option
@held_option
@overlap_option
@click.option("--svg", metavar="FILE", help="Also write the picture to this file.")
@width_option
@json_option
def show(
    name: str,
    ranks: int | None,
    microbatches: int | None,
    stages_per_rank: int | None,
    options: dict[str, Any],
    times: tuple[float, float, float],
    comm: float,
    held: float,
    overlap: float | None,
    svg: str | None,
    width: int | None,
    as_json: bool,
) -> None:
    """Draw the schedule NAME and print its bubble and memory.

    NAME is a known schedule or a file with a schedule of your own (text, JSON or PyTorch CSV). Each of the V stages of a
    rank takes 1/V of the times.

    \b
    Examples:
      zerobubble show 1f1b --ranks 4 --microbatches 8
      zerobubble show zb-h1 --ranks 8 --microbatches 24 --times 18.522,18.086,9.337 --comm 0.601
      zerobubble show mine.csv --svg mine.svg
    """
    schedule = _find(name, ranks, microbatches, stages_per_rank, options)
    timeline = simulate(schedule, equal_costs(schedule, times, comm, held, overlap))
    if svg is not None:
        write_text(svg, timeline_svg(timeline, memory=bool(timeline.peak_bytes)))
    if as_json:
        click.echo(json.dumps(_as_dict(schedule, timeline), indent=2))
    else:
        _print(schedule, timeline, Console(width=width))


def _find(name: str, ranks: int | None, microbatches: int | None, stages_per_rank: int | None, options: dict[str, Any]) -> Schedule:
    if not is_file(name):
        return make_schedule(name, ranks, microbatches, stages_per_rank, options)
    if options:
        raise InputError(f"--set {next(iter(options))}=... does not fit the file {name}: leave the option out")
    schedule = read_schedule(name)
    given = {"--ranks": ranks, "--microbatches": microbatches, "--stages-per-rank": stages_per_rank}
    actual = (schedule.num_ranks, schedule.num_microbatches, schedule.placement.stages_per_rank)
    for (option, wanted), has in zip(given.items(), actual, strict=True):
        if wanted not in (None, has):
            raise InputError(f"{option} {wanted} does not fit {name}, which has {has}: leave the option out")
    return schedule


def _as_dict(schedule: Schedule, timeline: Timeline) -> dict[str, object]:
    return {
        "name": schedule.name,
        "num_ranks": schedule.num_ranks,
        "num_stages": schedule.num_stages,
        "num_microbatches": schedule.num_microbatches,
        "makespan": ms(timeline.makespan),
        "span": ms(timeline.span),
        "bubble_makespan": timeline.bubble_makespan,
        "bubble_span": timeline.bubble_span,
        "peak_microbatches": in_microbatches(schedule, timeline.peak_bytes or 0),
        "ranks": [_rank_as_dict(schedule, figures) for figures in timeline.ranks],
    }


def _rank_as_dict(schedule: Schedule, figures: RankFigures) -> dict[str, float]:
    times = {name: ms(getattr(figures, name)) for name in ("work", "lead", "gaps", "tail", "span")}
    return {"rank": figures.rank, **times, "peak_microbatches": in_microbatches(schedule, figures.peak_bytes or 0)}


def _print(schedule: Schedule, timeline: Timeline, console: Console) -> None:
    coloured = console.color_system in ("256", "truecolor")
    counts = f"{schedule.num_ranks} ranks, {schedule.num_stages} stages, {schedule.num_microbatches} microbatches"
    console.print(f"{escape(schedule.name)}: {counts}\n", highlight=False)
    console.print(draw(timeline, console.width, coloured), soft_wrap=True)
    console.print()
    console.print(legend(timeline, coloured=coloured))
    console.width = max(console.width, TABLE_WIDTH)
    console.print()
    console.print(_table(schedule, timeline))
    console.print()
    console.print(_totals(schedule, timeline), highlight=False)


def _table(schedule: Schedule, timeline: Timeline) -> Table:
    """A line per rank, times in ms; the bubble is the rank's idle share of the makespan."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("rank", "work ms", "lead", "gaps", "tail", "span", "bubble", "peak microbatches"):
        table.add_column(title, justify="right")
    for figures in timeline.ranks:
        times = (f"{ms(time):,.3f}" for time in (figures.work, figures.lead, figures.gaps, figures.tail, figures.span))
        bubble = 1 - figures.work / timeline.makespan if timeline.makespan else 0.0
        peak = in_microbatches(schedule, figures.peak_bytes or 0)
        table.add_row(str(figures.rank), *times, show_percent(bubble), f"{peak:g}")
    return table


def _totals(schedule: Schedule, timeline: Timeline) -> str:
    metrics = (("makespan", timeline.makespan, timeline.bubble_makespan), ("longest rank span", timeline.span, timeline.bubble_span))
    lines = [f"{name:<18} {show_ms(time):>12}   bubble {show_percent(bubble)}" for name, time, bubble in metrics]
    peak = f"{in_microbatches(schedule, timeline.peak_bytes or 0):g} microbatches"
    return "\n".join([*lines, f"{'peak memory':<18} {peak:>12}"])
