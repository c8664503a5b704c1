"""The `zerobubble` command. Invalid input gives one sentence on stderr and exit code 2, never a traceback."""

from __future__ import annotations

import os
import re
import sys
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import click
from click.exceptions import Exit

from zerobubble.cli.outputs.terminal import draw_in_ascii_where_needed
from zerobubble.errors import ProgramError, ScheduleError, ZeroBubbleError, near
from zerobubble.version import __version__
from zerobubble.wrong_calls import nearest_name

BAD_INPUT, INTERRUPTED, BROKEN_PIPE = 2, 130, 141


class Commands(UserDict[str, click.Command]):
    """The commands by name, each loaded on first access, since most import the planner; `summaries` has their short help."""

    def __init__(self, summaries: Mapping[str, str], load: Callable[[str], click.Command]) -> None:
        super().__init__()
        self.summaries = summaries
        self._load = load

    def __getitem__(self, name: str) -> click.Command:
        if name not in self.data:
            if name not in self.summaries:
                raise KeyError(name)
            self.data[name] = self._load(name)
        return self.data[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.summaries)

    def __len__(self) -> int:
        return len(self.summaries)

    def __contains__(self, name: object) -> bool:
        return name in self.summaries


class OneSentenceGroup(click.Group):
    """A click group that prints every error as one sentence on stderr, with exit code 2."""

    commands: Commands

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, *_: Any, **extra: Any) -> NoReturn:
        sys.exit(self._run(args, prog_name, extra | {"standalone_mode": False}))

    def _run(self, args: Sequence[str] | None, prog_name: str | None, extra: dict[str, Any]) -> int:
        """Runs the command line `args` and returns its exit code."""
        if sys.stdout is None:
            return _print_error("cannot write the output: stdout is closed")
        try:
            draw_in_ascii_where_needed()
            code = super().main(args, prog_name, **extra)
            sys.stdout.flush()
        except click.NoSuchOption as error:
            return _print_error(_no_such_option(error))
        except click.BadParameter as error:
            return _print_error(_wrong_value(error))
        except click.BadOptionUsage as error:
            lack = "takes no value" if "not take" in error.message else "needs a value"
            return _print_error(f"{error.option_name} {lack}: {_an_example(error.ctx)}")
        except click.ClickException as error:
            return _print_error(_without_count(error.format_message()))
        except (ScheduleError, ProgramError) as error:
            return _print_error(_first_fault(error))
        except ZeroBubbleError as error:
            return _print_error(str(error))
        except UnicodeEncodeError as error:
            return _print_error(
                f"the output has {error.object[error.start]!r}, which {error.encoding} cannot encode: set PYTHONIOENCODING=utf-8"
            )
        except MemoryError:
            return _print_error(
                "the command needs more memory than this process may use: use a smaller problem, or raise the limit (ulimit -v)"
            )
        except OSError as error:
            if error.filename is not None:  # not stdout: readers and writers of files raise InputError themselves
                raise
            _discard_stdout()
            return _print_error(f"cannot write the output: {error.strerror}")
        except (click.Abort, KeyboardInterrupt):
            return _print_error("interrupted", INTERRUPTED)
        return code if isinstance(code, int) else 0

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        with _ending_with_its_reader():  # --help is printed here
            return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        with _ending_with_its_reader():
            result = super().invoke(ctx)
            sys.stdout.flush()
        return result

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Returns a command to list, which has only its name and short help."""
        summary = self.commands.summaries.get(cmd_name)
        return None if summary is None else click.Command(cmd_name, short_help=summary)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name in self.commands:
            return name, self.commands[name], args[1:]
        if name.startswith("-"):
            return super().resolve_command(ctx, args)
        nearest = "--help" if name == "help" else nearest_name(name, list(self.commands))
        hint = f"did you mean {nearest!r}? " if nearest else ""
        raise click.UsageError(f"there is no command {name!r}: {hint}known are {', '.join(self.commands)}")


def _print_error(message: str, code: int = BAD_INPUT) -> int:
    """Prints an error as one line on stderr and returns the exit code."""
    click.echo(f"zerobubble: {' '.join(message.split())}", err=True)
    return code


@contextmanager
def _ending_with_its_reader() -> Iterator[None]:
    """Ends the command with its exit code if the reader of stdout closes it."""
    try:
        yield
    except BrokenPipeError:
        _discard_stdout()
        raise Exit(BROKEN_PIPE) from None


def _discard_stdout() -> None:
    """Discards the rest of stdout: Python flushes it at exit, which would fail like the last write."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _no_such_option(error: click.NoSuchOption) -> str:
    """Returns the message with the option that was meant, which may have another name in Python or in other libraries."""
    params = error.ctx.command.params if error.ctx is not None else ()
    flags = {flag.lstrip("-").replace("-", "_"): flag for param in params for flag in param.opts if flag.startswith("--")}
    if "pipeline_only" in flags and error.option_name in _DIVIDED:
        ways = ", ".join(flag.lstrip("-") for flag in _DIVIDED)
        remedy = f"with CONFIG or --model, the command tries all values of {ways} itself, or only 1 of tp, cp and ep with --pipeline-only"
        of_times = "; for --times, give --ranks" if error.option_name == "--pp" else ""
        return f"there is no option {error.option_name}: {remedy}{of_times}"
    flag = flags.get(nearest_name(error.option_name.lstrip("-").replace("-", "_"), list(flags)))
    return f"there is no option {error.option_name}: {f'did you mean {flag}?' if flag else 'see --help'}"


def _without_count(message: str) -> str:
    """Returns click's message about too many arguments in the form of the other errors."""
    _, is_extra, extra = message.partition(_EXTRA)
    return f"too many arguments: {extra.partition('(')[2].removesuffix(')')} is left over; see --help" if is_extra else message


def _wrong_value(error: click.BadParameter) -> str:
    """Returns the message in the form of the other errors: the option or argument first, then what is wrong with it."""
    if error.param is None or error.ctx is None:
        return error.format_message()
    name = error.param.opts[-1] if isinstance(error.param, click.Option) else error.param.make_metavar(error.ctx)
    if isinstance(error, click.MissingParameter):
        return f"{name} is missing: {_an_example(error.ctx)}"
    return f"{name}: {_plainly(error.message.removesuffix('.'), error.param.type)}"


def _an_example(context: click.Context | None) -> str:
    """Returns the first example in the help of the command."""
    example = "" if context is None else (context.command.help or "").partition("Examples:\n")[2].partition("\n")[0].strip()
    return f"for example, {example}" if example else "see --help"


_DIVIDED = ("--pp", "--tp", "--cp", "--ep", "--dp")
"""Options of training programs whose values `plan` chooses for a model."""
_EXTRA = "Got unexpected extra argument"
_NOT_A = {
    f"is not a valid {kind}{suffix}": f"is not a {words}"
    for kind, words in (("integer", "whole number, such as 4"), ("float", "number, such as 0.5"))
    for suffix in ("", " range")
}
_RANGE = " is not in the range "
_CHOICE = " is not one of "


def _plainly(message: str, kind: object) -> str:
    """Returns a message of click without formulas such as 0<=x<=65535, and with the choice that was meant."""
    if isinstance(kind, click.Choice) and _CHOICE in message:
        hint = near(message.partition(_CHOICE)[0].strip("'"), map(str, kind.choices))
        return f"{message}{hint and f': {hint.rstrip()}'}"
    if isinstance(kind, (click.IntRange, click.FloatRange)) and _RANGE in message:
        return f"{message.partition(_RANGE)[0].removesuffix('.0')} is not {_range_text(kind)}"
    ending = next((words for words in _NOT_A if message.endswith(words)), "")
    if isinstance(kind, click.types.IntParamType) and (thousands := re.match(r"'(\d{1,6})[kK]'", message)):
        return f"{thousands[0]} is not a whole number: give {1024 * int(thousands[1])}"
    return f"{message.removesuffix(ending)}{_NOT_A[ending]}" if ending else message


def _range_text(kind: click.IntRange | click.FloatRange) -> str:
    if kind.min is not None and kind.max is not None and not (kind.min_open or kind.max_open):
        return f"in {kind.min:,} to {kind.max:,}"
    least = None if kind.min is None else f"{'above' if kind.min_open else 'at least'} {kind.min:,}"
    most = None if kind.max is None else f"{'below' if kind.max_open else 'at most'} {kind.max:,}"
    return " and ".join(filter(None, (least, most)))


def _first_fault(error: ScheduleError | ProgramError) -> str:
    count = len(error.faults)
    others = f" (and {count - 1} more: 'zerobubble check' prints all)" if count > 1 else ""
    return f"{error.noun} {error.name!r} cannot run: {error.faults[0].message}{others}"


SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True}


@click.group(name="zerobubble", cls=OneSentenceGroup, context_settings=SETTINGS, invoke_without_command=True)
@click.version_option(__version__, message="zerobubble %(version)s")
@click.pass_context
def group(ctx: click.Context) -> None:
    """Plan, draw and check the order in which GPUs work on the stages of a model, and explain where runs differ from it.

    \b
    Examples:
      zerobubble show zb-h1 --ranks 4 --microbatches 8
      zerobubble compare 1f1b zb-h1 zb-v --ranks 4 --microbatches 8 --comm 0.1
      zerobubble plan config.json --gpu H100 --gpus 8 --pipeline-only
      zerobubble diff plan.json run.json

    Commands accept a known schedule by name, or a file: a schedule (text or JSON), a plan with its costs, or PyTorch's schedule CSV.

    Times are in ms. Every command has --help with examples, and --json. Invalid input gives one sentence on stderr and exit code 2.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
