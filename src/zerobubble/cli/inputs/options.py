"""Options that several verbs share, and options that belong together as one value."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from zerobubble.costs import LARGEST_SHARE, MOST_BUCKETS
from zerobubble.units import BYTE_UNITS, MOST, MOST_MS, TIME_UNITS, read_bytes, read_time

Verb = TypeVar("Verb", bound=Callable[..., Any])
Times = tuple[float, float, float]
"""F, B and W in ms."""


def option_group(kind: type[Any], name: str, *options: Callable[[Verb], Verb]) -> Callable[[Verb], Verb]:
    """A decorator for `options` that the verb gets as one argument `name`: a `kind`, a dataclass with a field for each of them."""
    names = [field.name for field in fields(kind)]

    def decorate(verb: Verb) -> Verb:
        @wraps(verb)
        def called(**values: Any) -> Any:
            group = kind(**{key: values.pop(key) for key in names})
            return verb(**values, **{name: group})

        decorated: Any = called
        for option in reversed(options):
            decorated = option(decorated)
        return decorated  # type: ignore[no-any-return]

    return decorate


def milliseconds(ctx: click.Context, param: click.Parameter, value: str) -> float:
    """The value of an option that takes a time in ms, or with another unit."""
    return _time(ctx, param, value, "ms", MOST_MS)


def seconds(ctx: click.Context, param: click.Parameter, value: str) -> float:
    """The value of an option that takes a time of up to a day in seconds, or with another unit."""
    return _time(ctx, param, value, "s", 86_400)


def milliseconds_or_none(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """The value of an option that takes a time in ms and may be left out."""
    return None if value is None else milliseconds(ctx, param, value)


def three_times(ctx: click.Context, param: click.Parameter, value: str) -> Times:
    """The value of an option that takes the times of F, B and W in ms, with commas between."""
    parts = value.split(",")
    if len(parts) != 3:
        remedy = "give three in ms, F,B,W, such as 18.5,18.1,9.3"
        raise click.BadParameter(f"{value!r} has {len(parts)} {'time' if len(parts) == 1 else 'times'}; {remedy}", ctx, param)
    forward, backward, weight = (milliseconds(ctx, param, part) for part in parts)
    return forward, backward, weight


def numbers(ctx: click.Context, param: click.Parameter, value: str) -> tuple[float, ...]:
    """The value of an option that takes numbers with commas between; empty where it is not given."""
    try:
        return tuple(map(float, value.split(","))) if value else ()
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list of numbers, such as 1,4,1,1", ctx, param) from None


def factors(ctx: click.Context, param: click.Parameter, value: str) -> tuple[float, ...]:
    """The value of an option that takes numbers above 0 with commas between; empty where it is not given."""
    found = numbers(ctx, param, value)
    if wrong := [number for number in found if not 0 < number <= LARGEST_SHARE]:
        raise click.BadParameter(f"a factor must be above 0 and at most {LARGEST_SHARE:,}, got {wrong[0]:g}", ctx, param)
    return found


def _time(ctx: click.Context, param: click.Parameter, value: str, unit: str, most: float) -> float:
    time = read_time(value, unit)
    if time is None:
        raise click.BadParameter(f"{value!r} is neither a number of {unit} nor a time with a unit of {TIME_UNITS}", ctx, param)
    if not 0 <= time <= most:
        raise click.BadParameter(f"{value} is not in 0 to {most:g} {unit}", ctx, param)
    return time


@dataclass(frozen=True)
class Bytes:
    """An amount of memory that the command line gives in bytes."""

    count: int


def microbatches_or_bytes(ctx: click.Context, param: click.Parameter, value: str | None) -> float | Bytes | None:
    """The value of an option that takes memory: a number of microbatches, or bytes with their unit, such as 40GB or 80GiB."""
    if value is None:
        return None
    size = read_bytes(value)
    try:
        amount = float(value) if size is None else 0.0
    except ValueError:
        units = f"with a unit of {BYTE_UNITS}"
        raise click.BadParameter(f"{value!r} is neither a number of microbatches nor bytes {units}, such as 40GB", ctx, param) from None
    if size is None:
        return amount
    if not 0 < size <= MOST:
        raise click.BadParameter(f"{value} is not in 1B to {MOST:.0e}B", ctx, param)
    return Bytes(size)


def bytes_with_unit(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """The value of an option that takes an amount of memory with its unit, such as 40GB."""
    size = None if value is None else read_bytes(value)
    if value is not None and (size is None or not 0 < size <= MOST):
        raise click.BadParameter(f"{value!r} is not an amount of memory with a unit of {BYTE_UNITS}, such as 40GB", ctx, param)
    return size


def number_of_bytes(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """The value of an option that takes a number of bytes, or an amount with another unit."""
    return bytes_with_unit(ctx, param, f"{value}B" if value is not None and value.isdecimal() else value)


def key_values(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> dict[str, Any]:
    """The values of an option that takes KEY=VALUE and may come again; a VALUE is JSON, or else the text that it is."""
    if wrong := [word for word in value if not word.partition("=")[0] or "=" not in word]:
        raise click.BadParameter(f"{wrong[0]!r} is not KEY=VALUE, such as group=8", ctx, param)
    return {key: _json_or_text(text) for key, _, text in (word.partition("=") for word in value)}


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except (RecursionError, ValueError):
        return text


def given_flags(*names: str) -> list[str]:
    """The flags of those of the parameters `names` that stand on the command line, in this order."""
    ctx = click.get_current_context()
    flags = {param.name: param.opts[-1] for param in ctx.command.params}
    return [flags[name] for name in names if ctx.get_parameter_source(name) is not ParameterSource.DEFAULT]


def refuse_beside(option: str, *others: str) -> None:
    """Raise where the parameter `option` is given and so is one of `others`, which say the same or have no meaning beside it."""
    flag = given_flags(option)
    if flag and (beside := given_flags(*others)):
        raise click.UsageError(f"{flag[0]} and {beside[0]} contradict each other: give one")


def file_of(*suffixes: str) -> Callable[[click.Context, click.Parameter, str | None], str | None]:
    """A callback for an option that names a file to write, whose ending must be one of `suffixes` where it has one."""

    def named(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
        ending = Path(value or "").suffix
        if ending and ending.lower() not in suffixes:
            right = Path(value or "").with_suffix(suffixes[0])
            raise click.BadParameter(f"what is written is no {ending[1:]} file: name it {right}", ctx, param)
        return value

    return named


svg_file, html_file = file_of(".svg"), file_of(".html", ".htm")

ranks_option = click.option("-p", "--ranks", type=int, metavar="P", help="Number of ranks in the pipeline.")
microbatches_option = click.option("-m", "--microbatches", type=int, metavar="M", help="Number of microbatches in a batch.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout; errors stay on stderr.")
width_option = click.option("--width", type=click.IntRange(40, 1000), metavar="N", help="Columns to draw in; the terminal's if not given.")
times_option = click.option(
    "--times", callback=three_times, default="1,1,1", metavar="F,B,W", help="Times of F, B and W in ms, per rank and microbatch."
)
comm_option = click.option("--comm", callback=milliseconds, default="0", metavar="C", help="Time of a message between ranks in ms.")
held_option = click.option(
    "--held", type=click.FloatRange(0, 1000), default=1.0, metavar="X", help="Memory kept from B to W, as a share of what F saved."
)


fused_option = click.option(
    "--fused", callback=milliseconds_or_none, metavar="T", help="Time of B and W in one pass in ms, where it is less; B+W if not given."
)
reduce_option = click.option(
    "--reduce", callback=milliseconds, default="0", metavar="R", help="Time to sum the gradients of a rank over replicas in ms."
)
buckets_option = click.option(
    "--buckets",
    type=click.IntRange(0, MOST_BUCKETS),
    default=0,
    metavar="N",
    help="Parts in which these leave while the last W's of their stages run; 0: each stage when its last W is over.",
)


microbatch_costs_option = click.option(
    "--microbatch-costs",
    "shares",
    callback=factors,
    default="",
    metavar="X,X,...",
    help="A factor for each microbatch on the times and bytes of its passes, such as 1,4,1,1; all alike if not given.",
)


@dataclass(frozen=True)
class Shape:
    """What a schedule is made with where it is given by name; None and empty where the command line does not say."""

    ranks: int | None = None
    microbatches: int | None = None
    stages_per_rank: int | None = None
    options: dict[str, Any] | None = None


shape_options = option_group(
    Shape,
    "shape",
    ranks_option,
    microbatches_option,
    click.option("--stages-per-rank", type=int, metavar="V", help="Stages on each rank, for schedules that leave it open."),
    click.option(
        "--set", "options", multiple=True, callback=key_values, metavar="KEY=VALUE", help="An option of the schedule's own; may come again."
    ),
)
"""The options of a verb that takes schedules by name; they make its argument `shape`."""


@dataclass(frozen=True)
class PictureFiles:
    """Files to draw into, None where there is none to draw."""

    svg: str | None
    html: str | None


picture_options = option_group(
    PictureFiles,
    "pictures",
    click.option("--svg", callback=svg_file, metavar="FILE", help="Also write the picture to this file."),
    click.option("--html", callback=html_file, metavar="FILE", help="Also write picture and figures to this file, as a page."),
)
"""The options of a verb that draws; they make its argument `pictures`."""


@dataclass(frozen=True)
class CostOptions:
    """What passes cost, as the command line says it: equal stages by times in ms, or a file; see `cli.inputs` for what they make."""

    times: Times
    comm: float
    held: float
    overlap: float | None
    fused: float | None
    reduce: float
    buckets: int
    costs_file: str | None
    shares: tuple[float, ...]


cost_options = option_group(
    CostOptions,
    "given",
    times_option,
    comm_option,
    held_option,
    click.option(
        "--overlap",
        callback=milliseconds_or_none,
        metavar="T",
        help="Time of an F overlapped with a whole backward in ms; F+B+W if not given.",
    ),
    fused_option,
    reduce_option,
    buckets_option,
    click.option(
        "--costs", "costs_file", metavar="FILE", help="Costs of each stage, from a costs file or a plan, instead of the seven above."
    ),
    microbatch_costs_option,
)
"""The options of a verb that times schedules; they make its argument `given`.

A plan brings its own costs where none but the last of them is given.
"""

EQUAL_COSTS = ("times", "comm", "held", "overlap", "fused", "reduce", "buckets")
"""The parameters that describe equal stages."""
