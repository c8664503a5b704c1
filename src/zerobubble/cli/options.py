"""Options that several verbs share."""

from __future__ import annotations

import json
from typing import Any

import click
from click.core import ParameterSource

from zerobubble.cli.files import require_size
from zerobubble.errors import InputError
from zerobubble.ir import Schedule
from zerobubble.schedules import find, make

MOST_MS = 1e9

ranks_option = click.option("--ranks", type=int, metavar="P", help="Number of ranks in the pipeline.")
microbatches_option = click.option("--microbatches", type=int, metavar="M", help="Number of microbatches in a batch.")
stages_option = click.option("--stages-per-rank", type=int, metavar="V", help="Stages on each rank, for schedules that leave it open.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout; errors stay on stderr.")


def milliseconds(ctx: click.Context, param: click.Parameter, value: str) -> float:
    """The value of an option that takes a time in ms."""
    return _number(ctx, param, value)


def milliseconds_or_none(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """The value of an option that takes a time in ms and may be left out."""
    return None if value is None else _number(ctx, param, value)


def three_times(ctx: click.Context, param: click.Parameter, value: str) -> tuple[float, float, float]:
    """The value of an option that takes the times of F, B and W in ms, with commas between."""
    parts = value.split(",")
    if len(parts) != 3:
        remedy = "give three in ms, F,B,W, such as 18.5,18.1,9.3"
        raise click.BadParameter(f"{value!r} has {len(parts)} {'time' if len(parts) == 1 else 'times'}; {remedy}", ctx, param)
    forward, backward, weight = (_number(ctx, param, part) for part in parts)
    return forward, backward, weight


def _number(ctx: click.Context, param: click.Parameter, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a number", ctx, param) from None
    if not 0 <= number <= MOST_MS:
        raise click.BadParameter(f"{value} is not in 0 to {MOST_MS:g}", ctx, param)
    return number


def refuse_beside(ctx: click.Context, option: str, *others: str) -> None:
    """Raise where the parameter `option` is given and so is one of `others`, which say the same or have no meaning beside it."""
    flags = {param.name: param.opts[-1] for param in ctx.command.params}
    given = [name for name in (option, *others) if ctx.get_parameter_source(name) is not ParameterSource.DEFAULT]
    if option in given and len(given) > 1:
        raise click.UsageError(f"{flags[option]} and {flags[given[1]]} contradict each other: give one")


def settings(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> dict[str, Any]:
    """The values of an option that takes KEY=VALUE and may come again; a VALUE is JSON, or else the text that it is."""
    if wrong := [word for word in value if not word.partition("=")[0] or "=" not in word]:
        raise click.BadParameter(f"{wrong[0]!r} is not KEY=VALUE, such as group=8", ctx, param)
    return {key: _value(text) for key, _, text in (word.partition("=") for word in value)}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


set_option = click.option(
    "--set", "options", multiple=True, callback=settings, metavar="KEY=VALUE", help="An option of the schedule's own; may come again."
)


def make_schedule(
    name: str, ranks: int | None, microbatches: int | None, stages_per_rank: int | None, options: dict[str, Any] | None = None
) -> Schedule:
    """The known schedule `name`; raises `InputError` for a missing count or one that is beyond the command line."""
    recipe = find(name)
    missing = [option for option, count in (("--ranks P", ranks), ("--microbatches M", microbatches)) if count is None]
    if ranks is None or microbatches is None:
        raise InputError(f"{name} needs {' and '.join(missing)}")
    stages = recipe.stages_per_rank if stages_per_rank is None else stages_per_rank
    require_size(name, 3 * ranks * microbatches * stages)
    return make(name, ranks, microbatches, stages_per_rank, **(options or {}))


times_option = click.option(
    "--times", callback=three_times, default="1,1,1", metavar="F,B,W", help="Times of F, B and W in ms, per rank and microbatch."
)
comm_option = click.option("--comm", callback=milliseconds, default="0", metavar="C", help="Time of a message between ranks in ms.")
held_option = click.option(
    "--held", type=click.FloatRange(0, 1000), default=1.0, metavar="X", help="Memory kept from B to W, as a share of what F saved."
)
overlap_option = click.option(
    "--overlap", callback=milliseconds_or_none, metavar="T", help="Time of an F overlapped with a whole backward in ms; F+B+W if not given."
)
width_option = click.option("--width", type=click.IntRange(40, 1000), metavar="N", help="Columns to draw in, the terminal's if not given.")
