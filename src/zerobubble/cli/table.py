"""`zerobubble table`: the papers' closed forms beside what the simulation gives, for every schedule."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import click
from rich.console import Console
from rich.table import Table

from zerobubble.cli.figures import equal_costs, in_microbatches
from zerobubble.cli.files import require_size
from zerobubble.cli.options import comm_option, json_option, microbatches_option, ranks_option, times_option
from zerobubble.costs import NS_PER_MS, Costs
from zerobubble.errors import InputError
from zerobubble.export.units import ms, show_percent
from zerobubble.formulas import FORMULAS, Form, setting
from zerobubble.ir import Schedule
from zerobubble.schedules import Recipe, known_schedules
from zerobubble.simulation import peak_memory, simulate

WIDEST_TABLE = 100

NOTE = (
    "Bubbles in ms: the longest span of a rank beyond its work; peaks in microbatches of a rank, what is held from B to W counted in "
    "full. ok: the conditions of the closed form hold and the simulation agrees. p ranks, m microbatches, v stages per rank, c a message."
)


@dataclass(frozen=True, slots=True)
class Pair:
    """A figure from a closed form and from the simulation; `holds` where the form's conditions do. `form` is None without one."""

    form: Form | None
    closed: float | None
    simulated: float
    holds: bool

    @property
    def agrees(self) -> bool:
        """Whether the form says it holds and gives the simulated figure."""
        return self.holds and self.closed == self.simulated


@dataclass(frozen=True, slots=True)
class Line:
    """One schedule of the table: bubble in ms, bubble rate of the span, peak in microbatches."""

    schedule: Schedule
    bubble: Pair
    rate: float
    peak: Pair


@click.command("table")
@ranks_option
@microbatches_option
@times_option
@comm_option
@json_option
def table(ranks: int | None, microbatches: int | None, times: tuple[float, float, float], comm: float, as_json: bool) -> None:
    """Print bubble and peak memory of every schedule, from the papers' closed forms and simulated.

    \b
    Examples:
      zerobubble table --ranks 8 --microbatches 24
      zerobubble table --ranks 8 --microbatches 24 --times 18.522,18.086,9.337 --comm 0.601
    """
    if ranks is None or microbatches is None:
        raise InputError("table needs --ranks P and --microbatches M")
    recipes = [recipe for recipe in known_schedules().values() if recipe.trains]
    refused = [reason for recipe in recipes if (reason := recipe.refusal(ranks, microbatches))]
    lines = [_line(recipe, ranks, microbatches, times, comm) for recipe in recipes if recipe.allows(ranks, microbatches)]
    if not lines:
        raise InputError(f"no schedule has this shape: {refused[0]}")
    if as_json:
        click.echo(json.dumps([_as_dict(line) for line in lines], indent=2))
    else:
        _print(lines, refused, Console())


def _line(recipe: Recipe, ranks: int, microbatches: int, times: tuple[float, float, float], comm: float) -> Line:
    require_size(recipe.name, 3 * ranks * microbatches * recipe.stages_per_rank)
    schedule = recipe.build(ranks, microbatches, recipe.stages_per_rank)
    costs = equal_costs(schedule, times, comm)
    timeline = simulate(schedule, costs)
    idle = timeline.span - timeline.work // ranks
    return Line(schedule, _bubble(schedule, costs, idle), timeline.bubble_span, _peak(schedule, costs))


def _bubble(schedule: Schedule, costs: Costs, simulated: int) -> Pair:
    if schedule.name not in FORMULAS:
        return Pair(None, None, ms(simulated), False)
    at = setting(schedule, costs)
    form = FORMULAS[schedule.name].bubble(at)
    return Pair(form, form.value(at) / NS_PER_MS, ms(simulated), form.holds(at))


def _peak(schedule: Schedule, costs: Costs) -> Pair:
    simulated = in_microbatches(schedule, max(peak_memory(schedule, costs)))
    if schedule.name not in FORMULAS:
        return Pair(None, None, simulated, False)
    at = setting(schedule, costs)
    form = FORMULAS[schedule.name].peak
    return Pair(form, form.value(at) / at.v, simulated, form.holds(at))


def _as_dict(line: Line) -> dict[str, object]:
    return {
        "name": line.schedule.name,
        "num_stages": line.schedule.num_stages,
        "bubble": _pair_as_dict(line.bubble),
        "bubble_span": line.rate,
        "peak_microbatches": _pair_as_dict(line.peak),
    }


def _pair_as_dict(pair: Pair) -> dict[str, object]:
    stated = {"formula": pair.form.text, "when": pair.form.when} if pair.form else {"formula": None, "when": None}
    return {**stated, "closed": pair.closed, "simulated": pair.simulated, "holds": pair.holds, "agrees": pair.agrees}


def _print(lines: Sequence[Line], refused: Sequence[str], console: Console) -> None:
    drawn, console.width = console.width, max(console.width, WIDEST_TABLE)
    console.print(_figures(lines))
    console.width = drawn
    console.print(f"\n{NOTE}\n", style="dim", highlight=False)
    widest = max(len(line.schedule.name) for line in lines)
    for line in lines:
        if line.bubble.form and line.peak.form:
            bubble, peak = line.bubble.form, line.peak.form
            click.echo(f"{line.schedule.name:<{widest}}  bubble {bubble.text}, holds: {bubble.when}; peak in stages {peak.text}")
    for reason in refused:
        click.echo(f"left out: {reason}")


def _figures(lines: Sequence[Line]) -> Table:
    grid = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("schedule", "bubble", "simulated", "", "rate", "peak", "simulated", ""):
        grid.add_column(title, justify="right" if title not in ("schedule", "") else "left", no_wrap=True)
    for line in lines:
        grid.add_row(line.schedule.name, *_texts(line.bubble), show_percent(line.rate), *_texts(line.peak))
    return grid


def _texts(pair: Pair) -> tuple[str, str, str]:
    mark = "ok" if pair.agrees else "differs" if pair.holds else ""
    return "–" if pair.closed is None else _number(pair.closed), _number(pair.simulated), mark


def _number(value: float) -> str:
    return f"{round(value, 3):,.12g}"
