"""`zerobubble compare`: figures of several schedules, and their timelines on one time axis."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import click
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from zerobubble.cli.axes.offload import with_offloads_of_plan
from zerobubble.cli.inputs.options import (
    CostOptions,
    PictureFiles,
    SectionedCommand,
    Shape,
    cost_options,
    json_option,
    number_of_bytes,
    picture_options,
    shape_options,
    width_option,
)
from zerobubble.cli.inputs.schedule_and_costs import NamedSchedule, find_schedules, with_costs
from zerobubble.cli.outputs.drawing import draw, legend
from zerobubble.cli.outputs.evaluation import (
    Column,
    Evaluation,
    column_groups,
    evaluate,
    evaluation_to_dict,
    marked,
    note_of,
    table_rows,
    title_of,
    write_pictures,
)
from zerobubble.cli.outputs.terminal import Console, is_colored, stdout_console
from zerobubble.display import file_titles
from zerobubble.timeline import Timeline

WIDEST_TABLE = 160


@click.command("compare", cls=SectionedCommand)
@click.argument("names", nargs=-1, required=True)
@shape_options
@cost_options
@click.option("--message-bytes", callback=number_of_bytes, metavar="N", help="Bytes of a message, to print the bytes sent.")
@picture_options
@width_option
@json_option
def compare(
    names: tuple[str, ...],
    shape: Shape,
    costing: CostOptions,
    message_bytes: int | None,
    pictures: PictureFiles,
    width: int | None,
    as_json: bool,
) -> None:
    """Compare schedules by step time, bubble and memory, with the causes of their idle time.

    \b
    Examples:
      zerobubble compare 1f1b zb-h1 zb-v --ranks 4 --microbatches 8 --times 10,10,8 --comm 0.2
      zerobubble compare mine.csv zb-h1 --svg both.svg
      zerobubble compare plan.json 1f1b zb-v --html plan.html
      zerobubble compare gpipe 1f1b --ranks 4 --microbatches 8 --costs costs.json --message-bytes 4194304

    Each of NAMES is a known schedule, or a file: a schedule (text or JSON), a plan, or PyTorch's schedule CSV; - is stdin. Every rank has
    the same work, for any number of stages. Without --ranks or --microbatches, the shape is that of the first file, or of the costs file.
    Without costs, all schedules use those of the first plan.
    """
    inputs = list(_named(find_schedules(names, shape, costing)))
    costed = [with_offloads_of_plan(costs, named) for costs, named in zip(with_costs(inputs, costing), inputs, strict=True)]
    evaluations = [evaluate(named) for named in costed]
    write_pictures(pictures, evaluations, message_bytes)
    if as_json:
        click.echo(json.dumps([evaluation_to_dict(evaluation, message_bytes) for evaluation in evaluations], indent=2))
    else:
        console = stdout_console(width)
        _print_tables(evaluations, column_groups(evaluations, message_bytes), console)
        _print_timelines([evaluation.timeline for evaluation in evaluations], console)


def _named(inputs: Sequence[NamedSchedule]) -> Iterator[NamedSchedule]:
    """Names each schedule of a file after the file, because several files may have schedules of one name."""
    for named, title in zip(inputs, file_titles([named.name for named in inputs]), strict=True):
        is_named = named.text is None or named.name == "-"
        yield named if is_named else replace(named, schedule=replace(named.schedule, name=title))


def _print_tables(evaluations: Sequence[Evaluation], groups: Iterable[Sequence[Column]], console: Console) -> None:
    console.print(f"{title_of(evaluations)}\n", highlight=False)
    drawn, console.width = console.width, max(console.width, WIDEST_TABLE)
    for columns in groups:
        console.print(_table(evaluations, columns))
        console.print()
    console.width = drawn
    console.print(note_of(evaluations), style="dim", highlight=False)


def _table(evaluations: Sequence[Evaluation], columns: Sequence[Column]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("schedule", no_wrap=True, min_width=max(len(evaluation.costed.schedule.name) for evaluation in evaluations))
    for column in columns:
        table.add_column(f"{column.title} ", justify="right", no_wrap=True)
    for evaluation, row in zip(evaluations, table_rows(evaluations, columns), strict=True):
        table.add_row(escape(evaluation.costed.schedule.name), *(Text(marked(cell), "bold" if cell.best else "") for cell in row))
    return table


def _print_timelines(timelines: Sequence[Timeline], console: Console) -> None:
    """Prints the timelines on the time axis of the longest."""
    colored = is_colored(console)
    longest = max(timeline.makespan for timeline in timelines)
    pictures = [draw(timeline, console.width, colored, longest) for timeline in timelines]
    for timeline, picture in zip(timelines, pictures, strict=True):
        console.print(f"\n{timeline.name}", style="bold", markup=False, highlight=False)
        console.print(picture, soft_wrap=True)
    console.print()
    console.print(legend(*timelines, colored=colored, drawn=pictures))
