"""`zerobubble compare`: schedules side by side, in figures and on one time axis."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from zerobubble.cli.drawing import draw, legend
from zerobubble.cli.figures import Cell, Column, Entry, as_dict, cells, columns, equal_costs, idle_columns, judge
from zerobubble.cli.files import is_file, read_costs, read_schedule, write_text
from zerobubble.cli.options import (
    comm_option,
    held_option,
    json_option,
    make_schedule,
    microbatches_option,
    overlap_option,
    ranks_option,
    refuse_beside,
    stages_option,
    times_option,
    width_option,
)
from zerobubble.costs import Costs
from zerobubble.errors import InputError
from zerobubble.export.comparison import comparison_html
from zerobubble.export.svg import timeline_svg
from zerobubble.ir import Schedule
from zerobubble.schedules import known_schedules
from zerobubble.timeline import Timeline

Times = tuple[float, float, float]

WIDEST_TABLE = 160

NOTE = (
    "* best of its column. Makespan: from the first start to the last end; span: the longest time of one rank; bubble: the idle share. "
    "Peak: {unit} held by a rank. Dependency, comm, imbalance and memory add up to the makespan's bubble."
)


@click.command("compare")
@click.argument("names", nargs=-1, required=True)
@ranks_option
@microbatches_option
@stages_option
@times_option
@comm_option
@held_option
@overlap_option
@click.option("--costs", "costs_file", metavar="FILE", help="Costs of each stage as JSON, instead of the four above.")
@click.option("--message-bytes", type=click.IntRange(0), metavar="N", help="Bytes of a message, to tell how much is sent.")
@click.option("--svg", metavar="FILE", help="Also write the timelines to this file.")
@click.option("--html", metavar="FILE", help="Also write figures and timelines to this file, as a page.")
@width_option
@json_option
@click.pass_context
def compare(
    ctx: click.Context,
    names: tuple[str, ...],
    ranks: int | None,
    microbatches: int | None,
    stages_per_rank: int | None,
    times: Times,
    comm: float,
    held: float,
    overlap: float | None,
    costs_file: str | None,
    message_bytes: int | None,
    svg: str | None,
    html: str | None,
    width: int | None,
    as_json: bool,
) -> None:
    """Compare the schedules NAMES: known ones by name, or files (text, JSON or PyTorch CSV; - is stdin).

    All are judged with the same work on every rank, whatever number of stages a schedule cuts it into. A file gives the shape for
    the others when --ranks or --microbatches are left out.

    \b
    Examples:
      zerobubble compare 1f1b zb-h1 zb-v --ranks 4 --microbatches 8 --times 10,10,8 --comm 0.2
      zerobubble compare mine.csv zb-h1 --svg both.svg
      zerobubble compare gpipe 1f1b --ranks 4 --microbatches 8 --costs costs.json --message-bytes 4194304
    """
    schedules = find_all(names, ranks, microbatches, stages_per_rank)
    costs = None if costs_file is None else read_costs(costs_file)
    if costs is not None:
        refuse_beside(ctx, "costs_file", "times", "comm", "held", "overlap")
    entries = [judge(schedule, costs or equal_costs(schedule, times, comm, held, overlap)) for schedule in schedules]
    in_bytes = costs is not None
    note = NOTE.format(unit="bytes" if in_bytes else "microbatches")
    groups = columns(in_bytes, message_bytes), idle_columns()
    title = f"{schedules[0].num_ranks} ranks, {schedules[0].num_microbatches} microbatches, {_prices(costs, times, comm)}"
    timelines = [entry.timeline for entry in entries]
    if svg is not None:
        write_text(svg, timeline_svg(*timelines, title=title))
    if html is not None:
        write_text(html, comparison_html(title, *_page_table(entries, [*groups[0], *groups[1]]), timelines, note))
    if as_json:
        click.echo(json.dumps([as_dict(entry, in_bytes, message_bytes) for entry in entries], indent=2))
    else:
        console = Console(width=width)
        _print_tables(title, entries, groups, note, console)
        _print_timelines(timelines, console)


def _prices(costs: Costs | None, times: Times, comm: float) -> str:
    if costs is not None:
        return "costs of each stage from a file"
    forward, backward, weight = times
    return f"F {forward:g} ms, B {backward:g} ms, W {weight:g} ms, messages {comm:g} ms"


def find_all(names: Sequence[str], ranks: int | None, microbatches: int | None, stages_per_rank: int | None) -> list[Schedule]:
    """The schedules `names`, all of one shape: the options', or that of the first file.

    `stages_per_rank` counts for schedules that leave it open. Raises `InputError` for a shape that a schedule does not have, or that
    another one of `names` has not.
    """
    files = {name: read_schedule(name) for name in dict.fromkeys(names) if is_file(name)}
    first = next(iter(files.values()), None)
    ranks = first.num_ranks if ranks is None and first else ranks
    microbatches = first.num_microbatches if microbatches is None and first else microbatches
    known = known_schedules()
    is_open = {name: name in known and known[name].any_stages and name not in files for name in names}
    if stages_per_rank is not None and not any(is_open.values()):
        raise InputError(f"--stages-per-rank {stages_per_rank} has no effect: none of {', '.join(names)} leaves it open")
    found = []
    for name in names:
        if name in files:
            found.append(replace(files[name], name=files[name].name if name == "-" else name))
        else:
            found.append(make_schedule(name, ranks, microbatches, stages_per_rank if is_open[name] else None))
    _require_shape(found, ranks, microbatches)
    return found


def _require_shape(schedules: Sequence[Schedule], ranks: int | None, microbatches: int | None) -> None:
    for schedule in schedules:
        if (schedule.num_ranks, schedule.num_microbatches) != (ranks, microbatches):
            has = f"{schedule.num_ranks} ranks and {schedule.num_microbatches} microbatches"
            raise InputError(f"{schedule.name} has {has}, not {ranks} and {microbatches}: schedules are compared at one shape")


def _page_table(entries: Sequence[Entry], shown: Sequence[Column]) -> tuple[list[str], list[list[str]]]:
    return [column.title for column in shown], [[_marked(cell) for cell in row] for row in cells(entries, shown)]


def _marked(cell: Cell) -> str:
    return cell.text + ("*" if cell.best else "\N{NO-BREAK SPACE}")


def _print_tables(title: str, entries: Sequence[Entry], groups: Iterable[Sequence[Column]], note: str, console: Console) -> None:
    console.print(f"{title}\n", highlight=False)
    drawn, console.width = console.width, max(console.width, WIDEST_TABLE)
    for shown in groups:
        console.print(_table(entries, shown))
        console.print()
    console.width = drawn
    console.print(note, style="dim", highlight=False)


def _table(entries: Sequence[Entry], shown: Sequence[Column]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("schedule", no_wrap=True, min_width=max(len(entry.schedule.name) for entry in entries))
    for column in shown:
        table.add_column(f"{column.title} ", justify="right", no_wrap=True)
    for entry, row in zip(entries, cells(entries, shown), strict=True):
        table.add_row(escape(entry.schedule.name), *(Text(_marked(cell), "bold" if cell.best else "") for cell in row))
    return table


def _print_timelines(timelines: Sequence[Timeline], console: Console) -> None:
    """The timelines, all on the time axis of the longest."""
    coloured = console.color_system in ("256", "truecolor")
    longest = max(timeline.makespan for timeline in timelines)
    for timeline in timelines:
        console.print(f"\n{timeline.name}", style="bold", markup=False, highlight=False)
        console.print(draw(timeline, console.width, coloured, longest), soft_wrap=True)
    console.print()
    console.print(legend(*timelines, coloured=coloured))
