"""`zerobubble diff`: a measured run compared with its plan."""

from __future__ import annotations

import json
from dataclasses import replace

import click
from rich.markup import escape
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Column, Table

from zerobubble.cli.inputs.files import is_file, read_timeline
from zerobubble.cli.inputs.options import (
    EQUAL_COSTS,
    CostOptions,
    PictureFiles,
    SectionedCommand,
    Shape,
    cost_options,
    given_flags,
    json_option,
    output_file,
    picture_options,
    shape_options,
)
from zerobubble.cli.inputs.schedule_and_costs import Costed, find_schedule, with_costs
from zerobubble.cli.outputs.terminal import Console, stdout_console
from zerobubble.errors import InputError
from zerobubble.explain import PARTS, Difference, diff, gaps
from zerobubble.export.perfetto import perfetto_json
from zerobubble.export.png import write_picture
from zerobubble.export.svg import timeline_svg
from zerobubble.simulation import simulate
from zerobubble.timeline import Timeline
from zerobubble.units import ms
from zerobubble.view import Report, report_html
from zerobubble.whole_files import write_text

MOST_COLUMNS = 1000
"""More columns than any table has."""

NOTE = "Times in ms: work and idle time of a rank by cause. Each row adds up to the makespan of the run."


@click.command("diff", cls=SectionedCommand)
@click.argument("plan")
@click.argument("run")
@shape_options
@cost_options
@picture_options
@click.option("--trace", callback=output_file, metavar="FILE", help="Write plan and run to this file, for ui.perfetto.dev.")
@json_option
def diff_command(plan: str, run: str, shape: Shape, costing: CostOptions, pictures: PictureFiles, trace: str | None, as_json: bool) -> None:
    """Explain the differences between the measured timeline RUN and the PLAN, by rank and cause.

    \b
    Examples:
      zerobubble diff plan.json run.json
      zerobubble diff zb-h1 run.json --costs costs.json
      zerobubble diff zbv.txt run.json --costs costs.json --html diff.html --trace diff.trace.json

    PLAN is the schedule that ran: a plan, or with --costs or --times a known schedule, a schedule file (text or JSON) or PyTorch's
    schedule CSV; - is stdin. A known schedule has the ranks and microbatches of the run. RUN is the JSON of `Pipeline.timeline`.
    """
    measured = read_timeline(run)
    costed = _planned(plan, shape if is_file(plan) else _shape_of(measured, shape), costing)
    schedule, costs = costed.schedule, costed.costs
    difference, planned = diff(schedule, costs, measured), simulate(schedule, costs)
    idle = gaps(schedule, costs, planned), gaps(schedule, costs, measured)
    title = f"{schedule.name}: plan and run"
    if pictures.svg is not None:
        write_picture(pictures.svg, timeline_svg(planned, measured, title=title))
    if pictures.html is not None:
        write_text(pictures.html, report_html(Report(title=title, timelines=(planned, measured), gaps=idle, difference=difference)))
    if trace is not None:
        write_text(trace, perfetto_json(planned, measured, gaps=idle))
    if as_json:
        click.echo(json.dumps(difference.to_dict(), indent=2))
    else:
        print_difference(difference, stdout_console())


def _shape_of(run: Timeline, shape: Shape) -> Shape:
    """Returns the shape, with the ranks and microbatches of the run if not given."""
    microbatches = 1 + max((span.op.microbatch for _, span in run.spans()), default=0)
    return replace(shape, ranks=shape.ranks or run.num_ranks, microbatches=shape.microbatches or microbatches)


def _planned(plan: str, shape: Shape, costing: CostOptions) -> Costed:
    """Returns the schedule with the costs of its plan. Raises `InputError` if there are none."""
    named = find_schedule(plan, shape)
    if named.problem is None and not given_flags("costs_file", *EQUAL_COSTS):
        raise InputError("{file} has no costs", file=plan, remedy="give the costs of the plan as --costs FILE or --times, or a plan file")
    (costed,) = with_costs([named], costing)
    return costed


def print_difference(difference: Difference, console: Console) -> None:
    """Prints the causes of `difference` by rank, and its table below."""
    console.print(escape(difference.outcome), highlight=False)
    for idle, causes in difference.by_rank():
        console.print(escape(idle), highlight=False)
        listed = Table.grid(Column(justify="right", no_wrap=True), Column(), padding=(0, 1))
        for time, cause in causes:
            listed.add_row(time, escape(cause))
        console.print(Padding(listed, (0, 0, 0, 2)))
    table = _table(difference)
    console.width = max(console.width, Measurement.get(console, console.options.update(max_width=MOST_COLUMNS), table).maximum)
    console.print()
    console.print(table)
    console.print(f"\n{NOTE}", style="dim", highlight=False)


def _table(difference: Difference) -> Table:
    """A table with a row per rank, whose times in ms add up to the makespan of the run. A column is as wide as a word of its heading."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("rank", *PARTS, "run"):
        table.add_column(title.replace(" ", "\n"), justify="right", no_wrap=True)
    for account in difference.accounts:
        table.add_row(str(account.rank), *(f"{ms(time):,.2f}" for time in (*account.parts(), account.total)))
    return table
