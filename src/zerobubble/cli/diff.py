"""`zerobubble diff`: a measured run held against the plan it ran."""

from __future__ import annotations

import json

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from zerobubble.cli.files import parse_schedule, read_costs, read_text, read_value, write_text
from zerobubble.cli.options import json_option
from zerobubble.costs import Costs
from zerobubble.errors import InputError, ParseError
from zerobubble.explain import PARTS, Difference, diff, gaps
from zerobubble.explain.words import lines
from zerobubble.export.html import report_html
from zerobubble.export.json_form import loads
from zerobubble.export.perfetto import perfetto_json
from zerobubble.export.report import Report
from zerobubble.export.units import ms
from zerobubble.ir import Schedule
from zerobubble.planning.problem import Solved
from zerobubble.simulation import simulate
from zerobubble.timeline import Timeline

TABLE_WIDTH = 130


@click.command("diff")
@click.argument("plan")
@click.argument("run")
@click.option("--costs", "costs_file", metavar="FILE", help="Costs of each stage as JSON; a plan file brings its own.")
@click.option("--html", metavar="FILE", help="Also write plan, run and causes to this file, as a page.")
@click.option("--trace", metavar="FILE", help="Also write plan and run to this file, for ui.perfetto.dev.")
@json_option
def diff_verb(plan: str, run: str, costs_file: str | None, html: str | None, trace: str | None, as_json: bool) -> None:
    """Tell where the measured timeline RUN took other than the PLAN, rank by rank and cause by cause.

    PLAN is a plan file, or a schedule file (text, JSON or PyTorch CSV) with --costs. RUN is the JSON of what `Pipeline.timeline` gave.

    \b
    Examples:
      zerobubble diff plan.json run.json
      zerobubble diff zbv.txt run.json --costs costs.json --html diff.html --trace diff.trace.json
    """
    schedule, costs = _plan(plan, costs_file)
    measured = read_value(run, Timeline, "a timeline")
    difference, planned = diff(schedule, costs, measured), simulate(schedule, costs)
    idle = gaps(schedule, costs, planned), gaps(schedule, costs, measured)
    if html is not None:
        title = f"{schedule.name}: plan and run"
        write_text(html, report_html(Report(title=title, timelines=(planned, measured), gaps=idle, difference=difference)))
    if trace is not None:
        write_text(trace, perfetto_json(planned, measured, gaps=idle))
    if as_json:
        click.echo(json.dumps(difference.to_dict(), indent=2))
    else:
        _print(difference, Console())


def _plan(file: str, costs_file: str | None) -> tuple[Schedule, Costs]:
    """The schedule and the costs it was planned with."""
    text = read_text(file)
    try:
        value = loads(text)
    except ParseError:
        value = None
    if isinstance(value, Solved):
        if value.schedule is None:
            raise InputError(f"{file} holds no schedule: {value.reason}")
        return value.schedule, value.problem.costs if costs_file is None else read_costs(costs_file)
    if costs_file is None:
        raise InputError(f"{file} says nothing of costs: give those it was planned with as --costs FILE, or give a plan file")
    return parse_schedule(file, text), read_costs(costs_file)


def _print(difference: Difference, console: Console) -> None:
    for line in lines(difference):
        console.print(escape(line), highlight=False)
    console.width = max(console.width, TABLE_WIDTH)
    console.print()
    console.print(_table(difference))


def _table(difference: Difference) -> Table:
    """A line per rank, times in ms, which add up to the makespan of the run."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("rank", *PARTS, "run ms"):
        table.add_column(title, justify="right")
    for account in difference.accounts:
        table.add_row(str(account.rank), *(f"{ms(time):,.2f}" for time in (*account.parts(), account.total)))
    return table
