"""`zerobubble show`: a schedule played against costs, as a picture and in figures."""

from __future__ import annotations

import json
from collections.abc import Sequence

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from zerobubble.cli.beside.gathers import GatherOptions, as_dicts, gather_options, picture, planned, told_in_time
from zerobubble.cli.beside.head import vocabulary_option, with_head_divided
from zerobubble.cli.beside.offload import Offloaded, OffloadOptions, offload_options, offloaded
from zerobubble.cli.beside.offload import as_dicts as offloads_as_dicts
from zerobubble.cli.beside.offload import picture as offload_picture
from zerobubble.cli.beside.windows import as_dicts as windows_as_dicts
from zerobubble.cli.beside.windows import told as windows_told
from zerobubble.cli.beside.windows import windows_of, windows_option
from zerobubble.cli.inputs.options import (
    CostOptions,
    PictureFiles,
    Shape,
    cost_options,
    json_option,
    picture_options,
    shape_options,
    width_option,
)
from zerobubble.cli.inputs.schedule_and_costs import Costed, find_schedule, with_costs
from zerobubble.cli.outputs.drawing import draw, legend, shows_density
from zerobubble.cli.outputs.evaluation import describe_shape, evaluate
from zerobubble.cli.outputs.page import write_page
from zerobubble.cli.outputs.terminal import is_coloured
from zerobubble.export.svg import timeline_svg
from zerobubble.gathers import RankGathers
from zerobubble.timeline import RankFigures, Timeline
from zerobubble.units import counted, ms, show_bytes, show_ms, show_percent
from zerobubble.whole_files import write_text

TABLE_WIDTH = 72

NOTE = (
    "Times in ms. Lead and tail: idle before the first and after the last pass of the rank; gaps: idle between them. Span: from the "
    "rank's first start to its last end. Bubble: the rank's idle share of the makespan. Period: the time per step of consecutive steps if "
    "nothing global comes between them; if ranks meet, as for a norm of all gradients, it is the makespan."
)

REDUCTION_NOTE = " Reduction: from the rank's last pass to the end of its last sum of gradients over replicas."


@click.command("show", short_help="Draw a schedule with bubble and memory.")
@click.argument("name")
@shape_options
@vocabulary_option
@cost_options
@gather_options
@offload_options
@windows_option
@picture_options
@width_option
@json_option
def show(
    name: str,
    shape: Shape,
    vocabulary: str | None,
    given: CostOptions,
    sharded: GatherOptions,
    offloading: OffloadOptions,
    with_windows: bool,
    pictures: PictureFiles,
    width: int | None,
    as_json: bool,
) -> None:
    """Draw the schedule NAME and print its bubble and memory.

    NAME is a known schedule by name, or a file: a schedule (text or JSON), a plan, or PyTorch's schedule CSV; - is stdin. A plan is
    drawn with the costs that it was made for, unless --times, --comm, --held, --overlap, --reduce, --buckets or --costs is given, and with
    the gathers of weights in shards that it was made for, unless --weights is given, and with its copies to the host. Of V stages on a
    rank each takes 1/V of --times. With --offload and --memory, what waits for its backward pass goes to the host where memory is short,
    and the copies are drawn. With --vocabulary the head is divided over all ranks; without costs of its own it is as heavy as the first
    stage.

    \b
    Examples:
      zerobubble show 1f1b --ranks 4 --microbatches 8
      zerobubble show zb-h1 --ranks 8 --microbatches 24 --times 18.522,18.086,9.337 --comm 0.601
      zerobubble show zb-v --ranks 4 --microbatches 8 --reduce 6 --buckets 4
      zerobubble show zb-v --ranks 4 --microbatches 8 --weights 12GB --gathered 6GB --gather-rate 50GB
      zerobubble show 1f1b --ranks 4 --microbatches 8 --memory 3 --offload 0.5
      zerobubble show 1f1b --ranks 4 --microbatches 8 --vocabulary 2
      zerobubble show 1f1b --ranks 4 --microbatches 8 --windows --svg windows.svg
      zerobubble show plan.json
      zerobubble show mine.csv --costs costs.json --svg mine.svg --html mine.html
    """
    found = with_head_divided(find_schedule(name, shape), vocabulary)
    (costed,) = with_costs([found], given)
    divided = sharded.sharded(found.problem)
    costed = offloading.added(costed, found)
    away = offloaded(costed)
    if away is not None and divided is not None:
        raise click.UsageError(
            "gathers and offloads are not played together: leave out --offload or --weights, and what a plan has of them"
        )
    if away is not None and with_windows:
        raise click.UsageError("windows are found without copies: leave out --offload or --windows")
    if with_windows and pictures.html is not None:
        raise click.UsageError("pages do not draw windows: write --svg, or leave out --windows")
    idle = windows_of(costed) if with_windows else ()
    timeline = costed.timeline
    gathers = planned(costed.schedule, divided)
    if pictures.svg is not None:
        unit = None if costed.in_bytes else costed.microbatch_bytes
        write_text(pictures.svg, timeline_svg(timeline, memory=bool(timeline.peak_bytes), microbatch_bytes=unit, windows=idle))
    if pictures.html is not None:
        write_page(pictures.html, [evaluate(costed)])
    if as_json:
        weights = {"weights": as_dicts(gathers)} if gathers else {}
        moved = {} if away is None else {"offload": {"makespan_without": ms(away.without), "ranks": offloads_as_dicts(away)}}
        unused = {"windows": windows_as_dicts(idle)} if idle else {}
        click.echo(json.dumps(_as_dict(costed, timeline) | weights | moved | unused, indent=2))
    else:
        _print(costed, timeline, gathers, told_in_time(costed, gathers, divided), away, Console(width=width))
        if idle:
            click.echo(f"\n{windows_told(idle, costed)}")


def _as_dict(costed: Costed, timeline: Timeline) -> dict[str, object]:
    schedule = costed.schedule
    ranks = [_rank_as_dict(costed, figures) for figures in timeline.ranks]
    return {
        "name": schedule.name,
        "num_ranks": schedule.num_ranks,
        "num_stages": schedule.num_stages,
        "num_microbatches": schedule.num_microbatches,
        "costs": costed.source,
        "period": ms(costed.period),
        "makespan": ms(timeline.makespan),
        "span": ms(timeline.span),
        "bubble_makespan": timeline.bubble_makespan,
        "bubble_span": timeline.bubble_span,
        "peak_microbatches": max(_peaks(costed, timeline)),
        **({"peak_bytes": timeline.peak_bytes} if costed.in_bytes else {}),
        "ranks": ranks,
    }


def _rank_as_dict(costed: Costed, figures: RankFigures) -> dict[str, float]:
    times = {name: ms(getattr(figures, name)) for name in ("work", "lead", "gaps", "reduction", "tail", "span")}
    held = figures.peak_bytes or 0
    peak_bytes = {"peak_bytes": held} if costed.in_bytes else {}
    return {"rank": figures.rank, **times, "peak_microbatches": held / costed.microbatch_bytes[figures.rank], **peak_bytes}


def _peaks(costed: Costed, timeline: Timeline) -> list[float]:
    return costed.in_microbatches([figures.peak_bytes or 0 for figures in timeline.ranks])


def _print(
    costed: Costed, timeline: Timeline, gathers: Sequence[RankGathers], in_time: str, away: Offloaded | None, console: Console
) -> None:
    coloured = is_coloured(console)
    console.print(f"{escape(costed.schedule.name)}: {describe_shape(costed.schedule)}, {escape(costed.source)}\n", highlight=False)
    console.print(draw(timeline, console.width, coloured), soft_wrap=True)
    console.print()
    if gathers:
        console.print(picture(costed.schedule, timeline, gathers, console.width), soft_wrap=True)
        if in_time:
            console.print(in_time, highlight=False)
        console.print()
    if away is not None:
        console.print(offload_picture(costed, away, console.width), soft_wrap=True)
        console.print()
    console.print(legend(timeline, coloured=coloured, dense=shows_density(timeline, console.width)))
    drawn, console.width = console.width, max(console.width, TABLE_WIDTH)
    console.print()
    console.print(_table(costed, timeline))
    console.print()
    console.print(_totals(costed, timeline), highlight=False)
    console.width = drawn
    console.print(f"\n{NOTE}{REDUCTION_NOTE if timeline.reductions else ''}", style="dim", highlight=False)


def _table(costed: Costed, timeline: Timeline) -> Table:
    """A line per rank, times in ms; the bubble is the rank's idle share of the makespan."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    columns = [name for name in ("work", "lead", "gaps", "reduction", "tail", "span") if name != "reduction" or timeline.reductions]
    for title in ("rank", *columns, "bubble", "peak memory"):
        table.add_column(title, justify="right")
    for figures, microbatches in zip(timeline.ranks, _peaks(costed, timeline), strict=True):
        times = (f"{ms(getattr(figures, name)):,.3f}" for name in columns)
        bubble = 1 - figures.work / timeline.makespan if timeline.makespan else 0.0
        table.add_row(str(figures.rank), *times, show_percent(bubble), _memory(costed, microbatches, figures.peak_bytes or 0))
    return table


def _memory(costed: Costed, microbatches: float, peak_bytes: int) -> str:
    """What a rank holds at most, in bytes where they are real."""
    return show_bytes(peak_bytes) if costed.in_bytes else counted(microbatches, "microbatch")


def _totals(costed: Costed, timeline: Timeline) -> str:
    steps = (("period", costed.period), ("makespan", timeline.makespan))
    lines = [f"{name:<18} {show_ms(time):>15}   bubble {show_percent(timeline.bubble_at(time))}" for name, time in steps]
    peak = _memory(costed, max(_peaks(costed, timeline)), timeline.peak_bytes or 0)
    return "\n".join([*lines, f"{'peak memory':<18} {peak:>15}"])
