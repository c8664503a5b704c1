"""`zerobubble plan --model`: how a model is best divided over the GPUs of a cluster that need not exist yet."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from textwrap import fill

import click
from click.core import ParameterSource
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from zerobubble.cli.inputs.options import PictureFiles, option_group
from zerobubble.cli.outputs.cluster_page import write_divisions
from zerobubble.cost_model import Divisions, divide
from zerobubble.cost_model.divide import DivideProgress, Division
from zerobubble.display import COLUMNS


@dataclass(frozen=True)
class ClusterOptions:
    """A model and the GPUs it is to be divided over, as the command line says it."""

    model: str | None
    gpu: str | None
    gpus: int | None
    batch: int | None
    precision: str
    gradients: str
    overlap_tp: bool
    top: int


cluster_options = option_group(
    ClusterOptions,
    "cluster",
    click.option("--model", metavar="NAME", help="Divide this model over GPUs, such as llama3-405b, by estimates instead of --times."),
    click.option("--gpu", metavar="NAME", help="With --model: the GPU, such as H100."),
    click.option("--gpus", type=int, metavar="N", help="With --model: how many there are."),
    click.option("--batch", type=int, metavar="N", help="With --model: sequences of a step (as it was trained, if not given)."),
    click.option("--precision", default="bf16", metavar="NAME", help="With --model: of linear layers, bf16 (if not given) or fp8."),
    click.option(
        "--gradients", default="fp32", metavar="NAME", help="With --model: of weights, kept and summed in fp32 (if not given) or bf16."
    ),
    click.option("--overlap-tp", is_flag=True, help="With --model: hide exchanges of tensor parallelism beside matrix products in F, too."),
    click.option("--top", type=int, default=10, metavar="N", help="With --model: how many ways to tell (10 if not given)."),
)
"""The options that describe a cluster; they make the argument `cluster`."""

_SHARED = {"memory", "memory_bytes", "as_json", "svg", "html"}
_TAKEN = {"model", "gpu", "gpus", "batch", "precision", "gradients", "overlap_tp", "top"} | _SHARED


def plan_cluster(options: ClusterOptions, room: int | None, pictures: PictureFiles, as_json: bool) -> None:
    """Print and draw the quickest ways to divide the model; raises for options that lack or have no meaning beside it, all of them told."""
    _refuse_others()
    lacking = [flag for flag, value in (("--gpu", options.gpu), ("--gpus", options.gpus)) if value is None]
    if options.model is None or options.gpu is None or options.gpus is None:
        raise click.UsageError(f"--model needs {' and '.join(lacking)}, such as --gpu H100 --gpus 1024")
    with _bar() as progress:
        found = divide(
            options.model,
            gpu=options.gpu,
            gpus=options.gpus,
            batch=options.batch,
            precision=options.precision,
            gradients=options.gradients,
            overlap_tp=options.overlap_tp,
            memory_bytes=room,
            top=options.top,
            progress=progress,
        )
    write_divisions(found, pictures)
    click.echo(json.dumps(found.to_dict(), indent=2) if as_json else _text(found))


def require_model(options: ClusterOptions) -> None:
    """Raise where a cluster is described without `--model`."""
    if options.model is None and (flags := _given_flags(_TAKEN - _SHARED)):
        verb = "describes" if len(flags) == 1 else "describe"
        raise click.UsageError(f"{' and '.join(flags)} {verb} a cluster for --model: give that, too")


def _refuse_others() -> None:
    names = {param.name for param in click.get_current_context().command.params if param.name}
    if flags := _given_flags(names - _TAKEN):
        meaning, them = ("has no meaning", "it") if len(flags) == 1 else ("have no meaning", "them")
        raise click.UsageError(f"--model is planned by estimates, beside which {' and '.join(flags)} {meaning}: leave {them} out")


def _given_flags(names: set[str]) -> list[str]:
    ctx = click.get_current_context()
    params = [param for param in ctx.command.params if param.name in names]
    return [param.opts[-1] for param in params if ctx.get_parameter_source(param.name or "") is not ParameterSource.DEFAULT]


def _text(found: Divisions) -> str:
    heading = f"{found.ways:,} ways: {found.without_room:,} have no room, {found.played:,} were played, no other can be among these."
    assumed = [fill(sentence, COLUMNS, initial_indent="- ", subsequent_indent="  ") for sentence in found.assumptions]
    return "\n".join([repr(found)[1:-1], found.table(), "", heading, "", "Assumed of the first:", *assumed])


@contextmanager
def _bar() -> Iterator[DivideProgress]:
    """What to call with news of the search, shown as a bar on a terminal's stderr."""
    console = Console(stderr=True)
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def show(judged: int, ways: int, best: Division | None) -> None:
            bar.update(task, completed=judged, total=ways, description="" if best is None else repr(best))

        yield show
