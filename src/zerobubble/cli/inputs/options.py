"""Options that several commands share. A group of options is a dataclass: one field per option, one argument of the command per group."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cached_property, wraps
from math import isnan
from typing import Any, TypeVar

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from zerobubble.cli.inputs.files import COSTS, read_document
from zerobubble.costs import LARGEST_SHARE, MOST_BUCKETS
from zerobubble.errors import InputError, json_or_text
from zerobubble.export.document import Document
from zerobubble.planning.problem.workload import MOST_MICROBATCHES
from zerobubble.schedules.recipe import Recipe
from zerobubble.units import BYTE_UNITS, MOST, MOST_MS, TIME_UNITS, read_bytes, read_time
from zerobubble.whole_files import require_suffix, require_writable, unusable

Command = TypeVar("Command", bound=Callable[..., Any])
Value = TypeVar("Value")
WORK, SEARCH, LAYERS, RECOMPUTATION, SLICES, OUTPUT = "Problem", "Search", "Layers", "Recomputation", "Slices of a sequence", "Output"
SHARDED, HEAD, CLUSTER, OFFLOAD = "Sharded weights", "Head", "CONFIG on GPUs", "Offload"
"""Sections of options in the help of commands."""

Times = tuple[float, float, float]
"""F, B and W in ms."""


def option(*flags: str, section: str = "", **settings: Any) -> Any:
    """Returns a dataclass field that is a click option, with the name of the field as the name of its parameter.

    Without a `section`, the help lists it in the section of its group.
    """
    optional: dict[str, Any] = {} if "default" in settings else {"default": False if settings.get("is_flag") else None}
    return field(metadata={"flags": flags, "section": section, "settings": settings}, **optional)


class SectionOption(click.Option):
    """An option that the help of a `SectionedCommand` lists under its `section`."""

    def __init__(self, *args: Any, section: str = "", **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.section = section


class SectionedCommand(click.Command):
    """A command with many options, whose help lists them by section."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None  # the first paragraph has the arguments
            if record is not None:
                sections.setdefault(getattr(param, "section", "") or OUTPUT, []).append(record)
        for section, records in sections.items():
            with formatter.section(section):
                formatter.write_dl(records)


def option_group(kind: type[Any], name: str, section: str = "") -> Callable[[Command], Command]:
    """Returns a decorator that adds the options of the dataclass `kind` to a command, which gets their values as its argument `name`.

    The help of the command lists them under `section`, or under no heading.
    """
    columns = fields(kind)

    def decorate(command: Command) -> Command:
        @wraps(command)
        def called(**values: Any) -> Any:
            group = kind(**{column.name: values.pop(column.name) for column in columns})
            return command(**values, **{name: group})

        decorated: Any = called
        for column in reversed(columns):
            settings = column.metadata["settings"] | {"section": column.metadata["section"] or section}
            decorated = click.option(*column.metadata["flags"], column.name, cls=SectionOption, **settings)(decorated)
        return decorated  # type: ignore[no-any-return]

    return decorate


class NumberRange(click.FloatRange):
    """A number in a range. Unlike click's own range, it excludes nan."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if isnan(number):
            self.fail(f"{value!r} is not a number", param, ctx)
        return number


def milliseconds(ctx: click.Context, param: click.Parameter, value: str) -> float:
    """Reads a time in ms or with a unit."""
    return _time(ctx, param, value, "ms", MOST_MS)


def seconds(ctx: click.Context, param: click.Parameter, value: str) -> float:
    """Reads a time of at most a day, in seconds or with a unit."""
    return _time(ctx, param, value, "s", 86_400)


def if_given(read: Callable[[click.Context, click.Parameter, str], Value]) -> Callable[..., Value | None]:
    """Returns a callback that reads the value of an option; None if it is not given."""
    return lambda ctx, param, value: None if value is None else read(ctx, param, value)


def three_times(ctx: click.Context, param: click.Parameter, value: str) -> Times:
    """Reads the times of F, B and W in ms, separated by commas."""
    parts = value.split(",")
    if len(parts) != 3:
        remedy = "give three in ms, F,B,W, such as 18.5,18.1,9.3"
        raise click.BadParameter(f"{value!r} has {len(parts)} {'time' if len(parts) == 1 else 'times'}; {remedy}", ctx, param)
    forward, backward, weight = (milliseconds(ctx, param, part) for part in parts)
    return forward, backward, weight


def numbers(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[float, ...]:
    """Reads numbers separated by commas; empty if not given."""
    try:
        return () if value is None else tuple(map(float, value.split(",")))
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list of numbers, such as 1,4,1,1", ctx, param) from None


def slice_counts(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | str:
    """Reads numbers of slices separated by commas, or `auto`; empty if not given."""
    if value is None or value == "auto":
        return value or ()
    if not all(part.strip().isdecimal() for part in value.split(",")):
        raise click.BadParameter(f"{value!r} is no number of slices, such as 4, nor several, such as 1,4,8, nor auto", ctx, param)
    return tuple(map(int, value.split(",")))


def factors(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[float, ...]:
    """Reads numbers above 0 separated by commas; empty if not given."""
    values = numbers(ctx, param, value)
    if wrong := [number for number in values if not 0 < number <= LARGEST_SHARE]:
        raise click.BadParameter(f"a factor must be above 0 and at most {LARGEST_SHARE:,}, got {wrong[0]:g}", ctx, param)
    return values


def _time(ctx: click.Context, param: click.Parameter, value: str, unit: str, most: float) -> float:
    time = read_time(value, unit)
    if time is None:
        raise click.BadParameter(f"{value!r} is neither a number of {unit} nor a time with a unit of {TIME_UNITS}", ctx, param)
    if not 0 <= time <= most:
        raise click.BadParameter(f"{value} is not in 0 to {most:,.12g} {unit}", ctx, param)
    return time


@dataclass(frozen=True)
class Bytes:
    """An amount of memory given in bytes."""

    count: int


def microbatches_or_bytes(ctx: click.Context, param: click.Parameter, value: str | None) -> float | Bytes | None:
    """Reads an amount of memory: a number of microbatches, or bytes with a unit, such as 40GB or 80GiB."""
    if value is None:
        return None
    size = read_bytes(value)
    try:
        amount = float(value) if size is None else 0.0
    except ValueError:
        units = f"with a unit of {BYTE_UNITS}"
        raise click.BadParameter(f"{value!r} is neither a number of microbatches nor bytes {units}, such as 40GB", ctx, param) from None
    if size is None and not amount > 0:
        raise click.BadParameter(f"must be above 0, got {value}", ctx, param)
    if size is None and amount > MOST_MICROBATCHES:
        raise click.BadParameter(f"{value} without a unit is a number of microbatches; for bytes, write {value}B", ctx, param)
    if size is None:
        return amount
    if not 0 < size <= MOST:
        raise click.BadParameter(f"{value} is not in 1B to {MOST:.0e}B", ctx, param)
    return Bytes(size)


def bytes_with_unit(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Reads an amount of memory with a unit, such as 40GB."""
    size = None if value is None else read_bytes(value)
    if value is not None and (size is None or not 0 < size <= MOST):
        raise click.BadParameter(f"{value!r} is not an amount of memory with a unit of {BYTE_UNITS}, such as 40GB", ctx, param)
    return size


def number_of_bytes(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Reads an amount of memory in bytes or with another unit."""
    return bytes_with_unit(ctx, param, f"{value}B" if value is not None and value.isdecimal() else value)


class Existing(click.ParamType):  # type: ignore[type-arg]  # generic in new versions of click alone
    """The name of a file or folder that can be read. The errors are those of other files, or what is `expected` for a word that is none."""

    name = "path"

    def __init__(self, expected: str = "") -> None:
        self.expected = expected

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            os.stat(value)
        except OSError as error:
            if self.expected and not os.path.splitext(value)[1]:
                raise InputError("there is no file or folder {got}", got=value, remedy=f"give {self.expected}") from error
            raise unusable("read", value, error) from error
        return value

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type="file")]


def key_values(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> dict[str, Any]:
    """Reads repeated KEY=VALUE pairs; a VALUE is JSON if it parses, else text."""
    if wrong := [word for word in value if not word.partition("=")[0] or "=" not in word]:
        raise click.BadParameter(f"{wrong[0]!r} is not KEY=VALUE, such as group=8", ctx, param)
    return {key: json_or_text(text) for key, _, text in (word.partition("=") for word in value)}


def given_flags(*names: str) -> list[str]:
    """Returns the flags of those of the parameters `names` that are on the command line, in this order."""
    ctx = click.get_current_context()
    flags = {param.name: param.opts[-1] for param in ctx.command.params}
    return [flags[name] for name in names if ctx.get_parameter_source(name) is not ParameterSource.DEFAULT]


def refuse_together(option: str, *others: str) -> None:
    """Raises if the parameter `option` is given together with any of `others`, which duplicate it or have no effect with it."""
    flag = given_flags(option)
    if flag and (also := given_flags(*others)):
        raise InputError("{argument} and {other} contradict each other", argument=flag[0], other=also[0], remedy="give one")


def require_with(option: str, needed: str, remedy: str) -> None:
    """Raises if the parameter `option` is given without the flag `needed`, which it belongs to."""
    for flag in given_flags(option):
        raise InputError("{argument} needs {needed}", argument=flag, needed=needed, remedy=remedy)


def misfit(flag: str, value: object, document: str) -> InputError:
    """Returns the error of an option whose value contradicts a document, such as a file."""
    return InputError(
        "{argument} {got} does not fit {document}", argument=flag, got=value, document=document, remedy="leave the option out"
    )


def file_for(*suffixes: str) -> Callable[[click.Context, click.Parameter, str | None], str | None]:
    """Returns a callback for a file to write. It refuses suffixes other than `suffixes`, and files that cannot be written."""

    def checked(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
        if value is None:
            return None
        try:
            require_suffix(value, *suffixes)
        except InputError as error:
            raise click.BadParameter(str(error), ctx, param) from error
        require_writable(value)
        return value

    return checked


svg_file, html_file, output_file = file_for(".svg", ".png"), file_for(".html", ".htm"), file_for(".json")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout; errors stay on stderr.")
width_option = click.option(
    "--width", type=click.IntRange(40, 1000), metavar="N", help="Width of the picture in columns; by default the terminal's."
)


@dataclass(frozen=True, kw_only=True)
class Counts:
    """The numbers of ranks and microbatches."""

    ranks: int | None = option("-p", "--ranks", type=int, metavar="P", help="Number of ranks in the pipeline.")
    microbatches: int | None = option("-m", "--microbatches", type=int, metavar="M", help="Number of microbatches in a batch.")


def lacking(call: str, counts: Counts, recipe: Recipe | None = None) -> InputError:
    """Returns the error of a command or schedule `call` that needs both counts, with an example that `recipe` supports."""
    shape = (counts.ranks or 4, counts.microbatches or 8)
    near = None if recipe is None else recipe.near_shape(*shape)
    flags = (("--ranks", "P", counts.ranks), ("--microbatches", "M", counts.microbatches))
    missing = [f"{flag} {letter}" for flag, letter, count in flags if count is None]
    example = " ".join(f"{flag} {number}" for (flag, _, count), number in zip(flags, near or shape, strict=False) if count != number)
    return InputError("{call} needs {needed}", call=call, needed=" and ".join(missing), remedy=f"for example, {example}")


@dataclass(frozen=True, kw_only=True)
class Shape(Counts):
    """The arguments of a schedule given by name; None or empty if not given."""

    stages_per_rank: int | None = option(
        "--stages-per-rank", type=int, metavar="V", help="Stages per rank, if the schedule leaves it open."
    )
    options: dict[str, Any] | None = option(
        "--set", multiple=True, callback=key_values, metavar="KEY=VALUE", help="An option of the schedule. May be repeated."
    )


@dataclass(frozen=True, kw_only=True)
class PassTimes:
    """The times of equal ranks."""

    times: Times = option(
        "--times", callback=three_times, default="1,1,1", metavar="F,B,W", help="Times of F, B and W in ms, per rank and microbatch."
    )
    comm: float = option("--comm", callback=milliseconds, default="0", metavar="C", help="Time of a message between ranks in ms.")


@dataclass(frozen=True, kw_only=True)
class EqualCosts(PassTimes):
    """The costs of equal ranks."""

    held: float = option(
        "--held",
        type=NumberRange(0, 1000),
        default=1.0,
        metavar="X",
        help="Memory held from B to W, relative to that from F to B.",
    )
    fused: float | None = option("--fused", callback=if_given(milliseconds), metavar="T", help="Time of BW in ms, if less than B + W.")
    reduce: float = option(
        "--reduce", callback=milliseconds, default="0", metavar="R", help="Time in ms to sum the gradients of a rank over replicas."
    )
    buckets: int = option(
        "--buckets",
        type=click.IntRange(0, MOST_BUCKETS),
        default=0,
        metavar="N",
        help="Parts of these sums, sent during the last W's. 0: each stage after its last W.",
    )


@dataclass(frozen=True, kw_only=True)
class UnequalMicrobatches:
    """The cost of each microbatch."""

    shares: tuple[float, ...] = option(
        "--microbatch-costs",
        callback=factors,
        metavar="X,X,...",
        help="Factor on times and bytes of each microbatch, such as 1,4,1,1.",
    )


@dataclass(frozen=True, kw_only=True)
class CostOptions(UnequalMicrobatches, EqualCosts):
    """The costs of passes: those of equal ranks, or a file. `inputs.schedule_and_costs` makes `Costs` of them."""

    overlap: float | None = option(
        "--overlap",
        callback=if_given(milliseconds),
        metavar="T",
        help="Time in ms of an F overlapped with B and W, if less than F + B + W.",
    )
    costs_file: str | None = option("--costs", metavar="FILE", help="A costs file or a plan, instead of --times and the like.")

    @cached_property
    def document(self) -> Document | None:
        """The contents of the costs file, read once; None if there is no such file."""
        return None if self.costs_file is None else read_document(self.costs_file, COSTS)


@dataclass(frozen=True, kw_only=True)
class PictureFiles:
    """The pictures to write, if any."""

    svg: str | None = option("--svg", callback=svg_file, metavar="FILE", help="Write the picture to this file, as SVG or PNG by its name.")
    html: str | None = option("--html", callback=html_file, metavar="FILE", help="Write a page with the picture and the figures.")


shape_options = option_group(Shape, "shape", WORK)
cost_options = option_group(CostOptions, "costing", "Costs")
picture_options = option_group(PictureFiles, "pictures", OUTPUT)

EQUAL_COSTS = ("times", "comm", "held", "overlap", "fused", "reduce", "buckets")
"""The parameters that describe equal ranks. A plan keeps its own costs unless one of them is given."""
