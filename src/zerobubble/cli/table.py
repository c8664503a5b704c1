"""`zerobubble table`: closed forms of the papers compared with the simulation, for every schedule."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import click
from rich.table import Table

from zerobubble.cli.inputs.options import PassTimes, Shape, Times, given_flags, json_option, lacking, option_group, shape_options
from zerobubble.cli.inputs.schedule_and_costs import (
    Costed,
    NamedSchedule,
    equal_costs,
    equal_times,
    find_schedules,
    make_schedule,
    shapes_of_names,
)
from zerobubble.cli.outputs.terminal import Console, stdout_console, with_bar
from zerobubble.costs import NS_PER_MS
from zerobubble.errors import InputError
from zerobubble.formulas import FORMULAS, Formula, setting
from zerobubble.ir import Schedule
from zerobubble.schedules import known_schedules
from zerobubble.simulation import peak_memory, simulate
from zerobubble.units import ms, show_percent

WIDEST_TABLE = 100

NOTE = (
    "Bubble: longest span of a rank minus its work, from the closed form and simulated, in ms and as a fraction of the span. Peak: most "
    "microbatches held by a rank, with memory from B to W counted in full. ok: the conditions of the closed form hold and the simulation "
    "agrees; differs: they hold and it does not. Below: p ranks, m microbatches, v stages per rank, F, B and W of a rank and microbatch, "
    "c a message; peaks are in stage activations."
)


@dataclass(frozen=True, slots=True)
class FormulaCheck:
    """A figure from a closed form and from the simulation. `holds` if the conditions of the form hold; `form` is None without one."""

    form: Formula | None
    closed: float | None
    simulated: float
    holds: bool

    @property
    def agrees(self) -> bool:
        """Whether the form holds and gives the simulated figure."""
        return self.holds and self.closed == self.simulated


@dataclass(frozen=True, slots=True)
class TableLine:
    """One schedule of the table: bubble in ms, bubble rate of the span, peak in microbatches. `name` is the one given."""

    name: str
    schedule: Schedule
    bubble: FormulaCheck
    rate: float
    peak: FormulaCheck


@click.command("table")
@click.argument("names", nargs=-1)
@shape_options
@option_group(PassTimes, "pass_times")
@json_option
def table(names: tuple[str, ...], shape: Shape, pass_times: PassTimes, as_json: bool) -> None:
    """Print bubble and peak memory of schedules, from closed forms of the papers and simulated.

    \b
    Examples:
      zerobubble table --ranks 8 --microbatches 24
      zerobubble table 1f1b zb-h1 zb-h2 --ranks 8 --microbatches 24 --times 18.522,18.086,9.337 --comm 0.601
      zerobubble table plan.json zb-v 1f1b

    NAMES are known schedules, or files: a schedule (text or JSON), a plan, or PyTorch's schedule CSV; - is stdin. Without names, the table
    has every known schedule of the shape. Without --times and --comm, the times are those of the first plan, which needs equal ranks.
    """
    inputs = {named.name: named for named in find_schedules(names, shape)} if names else {}
    times, comm = pass_times.times, pass_times.comm
    planned = next((named for named in inputs.values() if named.problem is not None), None)
    if planned is not None and planned.problem is not None and not given_flags("times", "comm"):
        times, comm = equal_times(planned.problem, planned.name)
    shapes, refused = ({}, []) if names else _every_schedule(shape)

    def line_of(name: str) -> TableLine:
        return _line(inputs.get(name) or NamedSchedule(name, make_schedule(name, shapes[name])), times, comm)

    lines = list(with_bar(names or list(shapes), line_of))
    if as_json:
        click.echo(json.dumps([_as_dict(line) for line in lines], indent=2))
    else:
        _print(lines, refused, stdout_console())


def _every_schedule(shape: Shape) -> tuple[dict[str, Shape], list[str]]:
    """Returns every known training schedule of the shape, and why others lack it. Raises `InputError` if there is none."""
    ranks, microbatches = shape.ranks, shape.microbatches
    if ranks is None or microbatches is None:
        raise lacking("table", shape)
    recipes = [recipe for recipe in known_schedules().values() if recipe.trains]
    refused = [reason for recipe in recipes if (reason := recipe.refusal(ranks, microbatches))]
    allowed = [recipe.name for recipe in recipes if recipe.allows(ranks, microbatches)]
    if not allowed:
        raise InputError("no schedule has this shape: {refused}", refused=refused[0])
    return shapes_of_names(allowed, shape), refused


def _line(named: NamedSchedule, times: Times, comm: float) -> TableLine:
    schedule = named.schedule
    costed = Costed(schedule, equal_costs(schedule, times, comm), "equal stages")
    timeline = simulate(schedule, costed.costs)
    idle = timeline.span - timeline.work // schedule.num_ranks
    return TableLine(named.name, schedule, _bubble(costed, idle), timeline.bubble_span, _peak(costed))


def _bubble(costed: Costed, simulated: int) -> FormulaCheck:
    formulas = FORMULAS.get(costed.schedule.name)
    if formulas is None:
        return FormulaCheck(None, None, ms(simulated), False)
    at = setting(costed.schedule, costed.costs)
    form = formulas.bubble(at)
    return FormulaCheck(form, form.value(at) / NS_PER_MS, ms(simulated), form.holds(at))


def _peak(costed: Costed) -> FormulaCheck:
    simulated = max(costed.in_microbatches(peak_memory(costed.schedule, costed.costs)))
    formulas = FORMULAS.get(costed.schedule.name)
    if formulas is None:
        return FormulaCheck(None, None, simulated, False)
    at = setting(costed.schedule, costed.costs)
    return FormulaCheck(formulas.peak, formulas.peak.value(at) / at.v, simulated, formulas.peak.holds(at))


def _as_dict(line: TableLine) -> dict[str, object]:
    return {
        "name": line.name,
        "num_stages": line.schedule.num_stages,
        "bubble": _comparison_as_dict(line.bubble),
        "bubble_span": line.rate,
        "peak_microbatches": _comparison_as_dict(line.peak),
    }


def _comparison_as_dict(comparison: FormulaCheck) -> dict[str, object]:
    stated = {"formula": comparison.form.text, "when": comparison.form.when} if comparison.form else {"formula": None, "when": None}
    return {
        **stated,
        "closed": comparison.closed,
        "simulated": comparison.simulated,
        "holds": comparison.holds,
        "agrees": comparison.agrees,
    }


def _print(lines: Sequence[TableLine], refused: Sequence[str], console: Console) -> None:
    drawn, console.width = console.width, max(console.width, WIDEST_TABLE)
    console.print(_table(lines))
    console.width = drawn
    console.print(f"\n{NOTE}\n", style="dim", highlight=False)
    widest = max(len(line.name) for line in lines)
    for line in lines:
        if line.bubble.form and line.peak.form:
            bubble, peak = line.bubble.form, line.peak.form
            when = "" if bubble.when == "always" else f" where {bubble.when}"
            click.echo(f"{line.name:<{widest}}  bubble {bubble.text}{when}; peak {peak.text}")
    for reason in refused:
        click.echo(f"left out: {reason}")


def _table(lines: Sequence[TableLine]) -> Table:
    grid = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("schedule", "bubble ms", "simulated", "", "bubble", "peak", "simulated", ""):
        grid.add_column(title, justify="right" if title not in ("schedule", "") else "left", no_wrap=True)
    for line in lines:
        grid.add_row(line.name, *_texts(line.bubble), show_percent(line.rate), *_texts(line.peak))
    return grid


def _texts(comparison: FormulaCheck) -> tuple[str, str, str]:
    mark = "ok" if comparison.agrees else "differs" if comparison.holds else ""
    return "–" if comparison.closed is None else _number(comparison.closed), _number(comparison.simulated), mark


def _number(value: float) -> str:
    return f"{round(value, 3):,.12g}"
