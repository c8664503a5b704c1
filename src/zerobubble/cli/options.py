"""Options that several verbs share."""

from __future__ import annotations

import click

from zerobubble.cli.files import require_size
from zerobubble.errors import InputError
from zerobubble.ir import Schedule
from zerobubble.schedules import SCHEDULES, make

MOST_MS = 1e9

ranks_option = click.option("--ranks", type=int, metavar="P", help="Number of ranks in the pipeline.")
microbatches_option = click.option("--microbatches", type=int, metavar="M", help="Number of microbatches in a batch.")
stages_option = click.option("--stages-per-rank", type=int, metavar="V", help="Stages on each rank, for schedules that leave it open.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout; errors stay on stderr.")


def milliseconds(ctx: click.Context, param: click.Parameter, value: str) -> float:
    """The value of an option that takes a time in ms."""
    return _number(ctx, param, value)


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


def make_schedule(name: str, ranks: int | None, microbatches: int | None, stages_per_rank: int | None) -> Schedule:
    """The published schedule `name`; raises `InputError` for a missing count or one that is beyond the command line."""
    if name not in SCHEDULES:
        return make(name, 1, 1)  # raises, naming the nearest known
    missing = [option for option, count in (("--ranks P", ranks), ("--microbatches M", microbatches)) if count is None]
    if ranks is None or microbatches is None:
        raise InputError(f"{name} needs {' and '.join(missing)}")
    stages = SCHEDULES[name].stages_per_rank if stages_per_rank is None else stages_per_rank
    require_size(name, 3 * ranks * microbatches * stages)
    return make(name, ranks, microbatches, stages_per_rank)
