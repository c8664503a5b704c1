"""`zerobubble show`: a schedule simulated under costs, as a picture and figures."""

from __future__ import annotations

import json
from collections.abc import Sequence

import click
from rich.markup import escape
from rich.table import Table

from zerobubble.cli.axes import gathers as gathering
from zerobubble.cli.axes import offload
from zerobubble.cli.axes.gathers import GatherOptions, gather_options
from zerobubble.cli.axes.head import vocabulary_option, with_head_divided
from zerobubble.cli.axes.offload import Offloaded, OffloadOptions, offload_options, offloaded
from zerobubble.cli.inputs.options import (
    CostOptions,
    PictureFiles,
    SectionedCommand,
    Shape,
    cost_options,
    json_option,
    picture_options,
    shape_options,
    width_option,
)
from zerobubble.cli.inputs.schedule_and_costs import Costed, find_schedule, with_costs
from zerobubble.cli.outputs.drawing import draw_in_bands, legend
from zerobubble.cli.outputs.evaluation import described, evaluate, figures_to_dict, write_page
from zerobubble.cli.outputs.terminal import Console, is_colored, stdout_console
from zerobubble.errors import InputError
from zerobubble.explain import Window, windows
from zerobubble.export.png import write_picture
from zerobubble.export.svg import period_caption, timeline_svg
from zerobubble.gathers import RankGathers
from zerobubble.planning import Sharded
from zerobubble.timeline import RankFigures, Timeline
from zerobubble.units import counted, ms, show_bytes, show_ms, show_percent

TABLE_WIDTH = 72

NOTE = (
    "Times in ms. Lead and tail: idle time before the first and after the last pass of the rank; gaps: idle time between them. Span: from "
    "the rank's first start to its last end. Idle: the rank's idle fraction of the makespan. Period: time per step over consecutive steps "
    "without global operations between them. With one, such as clipping by the global norm, a step takes the makespan. Bubble: the idle "
    "fraction of the period or makespan, over all ranks."
)

REDUCTION_NOTE = " Reduction: from the rank's last pass to the end of its last gradient sum over replicas."


@click.command("show", cls=SectionedCommand)
@click.argument("name")
@shape_options
@vocabulary_option
@cost_options
@gather_options
@offload_options
@click.option("--windows", "with_windows", is_flag=True, help="Print and draw windows: idle time before passes for other work.")
@picture_options
@width_option
@json_option
def show(
    name: str,
    shape: Shape,
    vocabulary: str | None,
    costing: CostOptions,
    sharded: GatherOptions,
    offloading: OffloadOptions,
    with_windows: bool,
    pictures: PictureFiles,
    width: int | None,
    as_json: bool,
) -> None:
    """Draw the schedule NAME and print its bubble and memory.

    \b
    Examples:
      zerobubble show 1f1b --ranks 4 --microbatches 8
      zerobubble show zb-h1 --ranks 8 --microbatches 24 --times 18.522,18.086,9.337 --comm 0.601
      zerobubble show plan.json
      zerobubble show mine.csv --costs costs.json --svg mine.svg --html mine.html

    NAME is a known schedule, or a file: a schedule (text or JSON), a plan, or PyTorch's schedule CSV; - is stdin. A plan has its own costs,
    gathers of sharded weights and copies to the host; --times and the other costs, and --weights, replace them. Each of V stages on a rank
    takes 1/V of --times. --offload with --memory copies activations to the host if memory is short. --vocabulary divides the head over all
    ranks; without costs of its own, the head takes as long as the first stage.
    """
    named = with_head_divided(find_schedule(name, shape, costing), vocabulary)
    (costed,) = with_costs([named], costing)
    divided = sharded.sharded(named.problem)
    costed = offloading.added(costed, named)
    away = offloaded(costed)
    _refuse_together(away, divided, pictures, with_windows)
    idle = windows(costed.schedule, costed.costs) if with_windows else ()
    timeline = costed.timeline
    gathers = gathering.planned(costed.schedule, divided)
    if pictures.svg is not None:
        unit = None if costed.in_bytes else costed.microbatch_bytes
        memory, captions = bool(timeline.peak_bytes), [period_caption(timeline, costed.period)]
        drawn = timeline_svg(timeline, title=described(costed), memory=memory, microbatch_bytes=unit, windows=idle, captions=captions)
        write_picture(pictures.svg, drawn)
    if pictures.html is not None:
        write_page(pictures.html, [evaluate(costed)])
    if as_json:
        weights = {"weights": gathering.as_dicts(gathers)} if gathers else {}
        moved = {} if away is None else {"offload": {"makespan_without": ms(away.without), "ranks": offload.as_dicts(away)}}
        unused = {"windows": [_windows_as_dict(rank, in_rank) for rank, in_rank in enumerate(idle)]} if idle else {}
        click.echo(json.dumps(_as_dict(costed, timeline) | weights | moved | unused, indent=2))
    else:
        _print(costed, timeline, gathers, gathering.gather_time_text(costed, gathers, divided), away, stdout_console(width))
        if idle:
            click.echo()
            for rank, in_rank in enumerate(idle):
                click.echo(f"rank {rank}: {_window_line(costed, rank, in_rank)}")


def _refuse_together(away: Offloaded | None, divided: Sharded | None, pictures: PictureFiles, with_windows: bool) -> None:
    if away is not None and divided is not None:
        raise InputError(
            "gathers and offload cannot be simulated together", remedy="leave out --offload or --weights, or those of the plan"
        )
    if away is not None and with_windows:
        raise InputError("windows are not available with offload", remedy="leave out --offload or --windows")
    if with_windows and pictures.html is not None:
        raise InputError("pages do not show windows", remedy="write --svg, or leave out --windows")


def _as_dict(costed: Costed, timeline: Timeline) -> dict[str, object]:
    schedule = costed.schedule
    ranks = [_rank_as_dict(costed, figures) for figures in timeline.ranks]
    return {
        "name": schedule.name,
        "num_ranks": schedule.num_ranks,
        "num_stages": schedule.num_stages,
        "num_microbatches": schedule.whole_microbatches,
        **({"slices": schedule.slices} if schedule.slices > 1 else {}),
        **figures_to_dict(costed, timeline),
        "peak_microbatches": max(_peaks(costed, timeline)),
        **({"peak_bytes": timeline.peak_bytes} if costed.in_bytes else {}),
        "ranks": ranks,
    }


def _rank_as_dict(costed: Costed, figures: RankFigures) -> dict[str, float]:
    times = {f"{name}_ms": ms(getattr(figures, name)) for name in ("work", "lead", "gaps", "reduction", "tail", "span")}
    held = figures.peak_bytes or 0
    peak_bytes = {"peak_bytes": held} if costed.in_bytes else {}
    return {"rank": figures.rank, **times, "peak_microbatches": held / costed.microbatch_bytes[figures.rank], **peak_bytes}


def _peaks(costed: Costed, timeline: Timeline) -> list[float]:
    return costed.in_microbatches([figures.peak_bytes or 0 for figures in timeline.ranks])


def _print(
    costed: Costed, timeline: Timeline, gathers: Sequence[RankGathers], in_time: str, away: Offloaded | None, console: Console
) -> None:
    colored = is_colored(console)
    console.print(f"{escape(described(costed))}\n", highlight=False)
    picture = draw_in_bands(timeline, console.width, colored)
    console.print(picture, soft_wrap=True)
    console.print()
    if gathers:
        console.print(gathering.picture(costed.schedule, timeline, gathers, console.width), soft_wrap=True)
        if in_time:
            console.print(in_time, highlight=False)
        console.print()
    if away is not None:
        console.print(offload.picture(costed, away, console.width), soft_wrap=True)
        console.print()
    console.print(legend(timeline, colored=colored, drawn=[picture]))
    drawn, console.width = console.width, max(console.width, TABLE_WIDTH)
    console.print()
    console.print(_table(costed, timeline))
    console.print()
    console.print(_totals(costed, timeline), highlight=False)
    console.width = drawn
    console.print(f"\n{NOTE}{REDUCTION_NOTE if timeline.reductions else ''}", style="dim", highlight=False)


def _table(costed: Costed, timeline: Timeline) -> Table:
    """A table with a row per rank: times in ms, and the idle fraction of the makespan."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    columns = [name for name in ("work", "lead", "gaps", "reduction", "tail", "span") if name != "reduction" or timeline.reductions]
    for title in ("rank", *columns, "idle", "peak memory"):
        table.add_column(title, justify="right")
    for figures in timeline.ranks:
        times = (f"{ms(getattr(figures, name)):,.3f}" for name in columns)
        idle = 1 - figures.work / timeline.makespan if timeline.makespan else 0.0
        table.add_row(str(figures.rank), *times, show_percent(idle), costed.show_memory(figures.peak_bytes or 0, figures.rank))
    return table


def _totals(costed: Costed, timeline: Timeline) -> str:
    steps = (("period", costed.period), ("makespan", timeline.makespan))
    lines = [f"{name:<18} {show_ms(time):>15}   bubble {show_percent(timeline.bubble_at(time))}" for name, time in steps]
    peak = show_bytes(timeline.peak_bytes or 0) if costed.in_bytes else counted(max(_peaks(costed, timeline)), "microbatch")
    return "\n".join([*lines, f"{'peak memory':<18} {peak:>15}"])


def _window_line(costed: Costed, rank: int, in_rank: Sequence[Window]) -> str:
    if not in_rank:
        return "no window"
    total, longest = sum(window.duration for window in in_rank), max(in_rank, key=lambda window: window.duration)
    parts = f"{counted(len(in_rank), 'window')} of {show_ms(total)} in total, the longest of {show_ms(longest.duration)}"
    return f"{parts} before step {longest.step}, with {costed.show_memory(longest.free, rank)} free"


def _windows_as_dict(rank: int, windows: Sequence[Window]) -> dict[str, object]:
    """Returns the windows of a rank as data: times in ms, memory in bytes."""
    return {"rank": rank, "windows": [{"step": w.step, "start": ms(w.start), "end": ms(w.end), "free_bytes": w.free} for w in windows]}
