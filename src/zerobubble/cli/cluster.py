"""`zerobubble plan --model`: the fastest ways to divide a model over the GPUs of a cluster, from estimates."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from html import escape
from textwrap import fill

import click
from rich.progress import MofNCompleteColumn

from zerobubble.cli.inputs.options import CLUSTER, PictureFiles, given_flags, option, option_group, require_with
from zerobubble.cli.outputs.terminal import progress
from zerobubble.cost_model import Division, Divisions, divide
from zerobubble.cost_model.configuration import known_model, with_sequence
from zerobubble.cost_model.divide import LEGEND, DivideProgress
from zerobubble.display import COLUMNS
from zerobubble.errors import InputError
from zerobubble.export.png import write_picture
from zerobubble.export.svg import timeline_svg
from zerobubble.simulation import simulate
from zerobubble.timeline import Timeline
from zerobubble.units import counted, show_bytes, show_percent
from zerobubble.view import Viewed
from zerobubble.view.page import header, page, section, table, viewer
from zerobubble.whole_files import write_text


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """A model, and the GPUs to divide it over."""

    model: str | None = option("--model", metavar="NAME", help="Divide this model over GPUs: a config.json, or a name such as llama3-405b.")
    gpu: str | None = option(
        "--gpu", metavar="NAME", help="GPU, such as H100, or a file of doctor --measure. Also for --layers and --from."
    )
    gpus: int | None = option("--gpus", type=int, metavar="N", help="Number of GPUs; needed with CONFIG.")
    batch: int | None = option(
        "--batch",
        type=int,
        metavar="N",
        help="Sequences per step, over all replicas; by default as published, or 2^19 tokens of a config.json.",
    )
    sequence: int | None = option(
        "--sequence",
        type=click.IntRange(1),
        metavar="N",
        help="Tokens of a sequence; by default as published, or at most 4096 of a config.json.",
    )
    precision: str = option("--precision", default="bf16", metavar="NAME", help="Precision of linear layers, bf16 or fp8.")
    gradients: str | None = option(
        "--gradients",
        metavar="NAME",
        help="Precision of gradients and their sums, fp32 or bf16. Default: fp32, or bf16 with --pipeline-only.",
    )
    overlap_tp: bool = option("--overlap-tp", is_flag=True, help="Overlap tensor-parallel collectives in F, too.")
    pipeline_only: bool = option(
        "--pipeline-only", is_flag=True, help="Only pipelines and their replicas, as for an unchanged model: tp, cp and ep are 1."
    )
    fsdp: bool = option(
        "--fsdp", is_flag=True, help="With --pipeline-only: FSDP2 shards weights, gradients and optimizer state over replicas."
    )
    top: int = option("--top", type=int, default=10, metavar="N", help="Number of ways to print.")
    verbose: bool = option("--verbose", is_flag=True, help="Print all assumptions, not only the main ones.")

    @property
    def source(self) -> str:
        """What names the model on the command line: `--model`, or the file given as CONFIG."""
        return "--model" if given_flags("model") or self.model is None else self.model


cluster_options = option_group(ClusterOptions, "cluster", CLUSTER)
_OWN = {column.name for column in fields(ClusterOptions)}
_SHARED = {"config", "memory", "as_json", "svg", "html"}
"""The options of `plan` that also apply with `--model`."""

SHOWN = 3
"""How many of the best ways the page draws."""
TITLES = (
    *("way", "step", "TFLOP/s", "of the peak", "tp", "cp", "ep", "pp x v", "dp", "microbatches"),
    *("recompute", "schedule", "memory", "activations"),
)
MEANINGS = (
    "tp, cp, ep: GPUs that share a layer, a sequence, or the experts of a layer; pp x v: ranks and stages per rank; dp: replicas. TFLOP/s: "
    "model FLOP/s of a GPU, and their fraction of the data sheet. Memory: total and activations of the GPU that holds most."
)


def plan_cluster(options: ClusterOptions, memory: int | None, pictures: PictureFiles, as_json: bool) -> None:
    """Prints and draws the fastest ways to divide the model. Raises `InputError` with all options that are missing or do not apply."""
    _refuse_others(options)
    model = None if options.model is None else known_model(options.model)
    lacking = [flag for flag, value in (("--gpu", options.gpu), ("--gpus", options.gpus)) if value is None]
    if model is None or options.gpu is None or options.gpus is None:
        raise InputError(
            "{argument} needs {needed}, such as --gpu H100 --gpus 1024", argument=options.model or "--model", needed=" and ".join(lacking)
        )
    if not options.pipeline_only:
        require_with("fsdp", "--pipeline-only", "give both")
    if options.sequence is not None:
        model = with_sequence(model, options.sequence)
    with _bar() as progress:
        divisions = divide(
            model,
            gpu=options.gpu,
            gpus=options.gpus,
            batch=options.batch,
            precision=options.precision,
            gradients=options.gradients,
            overlap_tp=options.overlap_tp,
            pipeline_only=options.pipeline_only,
            fsdp=options.fsdp,
            memory=memory,
            top=options.top,
            progress=progress,
        )
    write_divisions(divisions, pictures)
    click.echo(json.dumps(divisions.to_dict(), indent=2) if as_json else _text(divisions, options.verbose))


def require_model(options: ClusterOptions, but: str | None = None) -> None:
    """Raises if options of a cluster are given without `--model`, except for the option `but`."""
    names = [column.name for column in fields(ClusterOptions) if column.name != but]
    if options.model is None and (flags := given_flags(*names)):
        sentence = "{argument} needs {needed}" if len(flags) == 1 else "{argument} need {needed}"
        needed = "--model or CONFIG" if but is not None or flags != ["--gpu"] else "--model, CONFIG, --layers or --from"
        remedy = "give the number of GPUs as --ranks" if but is not None and "--gpus" in flags else ""
        raise InputError(sentence, argument=" and ".join(flags), needed=needed, remedy=remedy)


def _refuse_others(options: ClusterOptions) -> None:
    others = [param.name for param in click.get_current_context().command.params if param.name not in _OWN | _SHARED]
    if flags := given_flags(*filter(None, others)):
        remedy = "leave it out" if len(flags) == 1 else "leave them out"
        if "--output" in flags:
            remedy += ", or give layers: `zerobubble split MODEL -o layers.json`, `zerobubble plan --layers layers.json -o plan.json`"
        raise InputError("{argument} cannot be used with {model}", argument=" and ".join(flags), model=options.source, remedy=remedy)


def _text(divisions: Divisions, verbose: bool) -> str:
    first = [fill(sentence, COLUMNS) for sentence in _heads(divisions)]
    main = divisions.main_assumptions
    sentences, heading = (
        (divisions.assumptions, "Assumptions") if verbose else (main, f"Main assumptions (all {len(divisions.assumptions)}: --verbose)")
    )
    assumed = [fill(sentence, COLUMNS, initial_indent="- ", subsequent_indent="  ") for sentence in sentences]
    program = _program(divisions)
    meant = [fill(LEGEND, COLUMNS), *(["", program] if program else []), "", _searched(divisions)]
    return "\n".join([*first, divisions.title, divisions.table(), "", *meant, "", f"{heading} of the fastest way:", *assumed])


def _heads(divisions: Divisions) -> list[str]:
    """Returns the sentences above the table."""
    return [sentence for sentence in (divisions.fit, divisions.too_long, divisions.needs_own_code) if sentence]


def _program(divisions: Divisions) -> str:
    """Returns the program of the fastest way that fits, or of the fastest if none surely fits; empty if the model's code must change."""
    place = divisions.fitting or 1
    choice = divisions.choices[place - 1]
    if not choice.call:
        return ""
    blocks = f" with {choice.setting.recompute} recompute in the blocks of the model"
    needed = {"none": "", "full": " after model.gradient_checkpointing_enable()"}.get(choice.setting.recompute, blocks)
    return f"Way {place} in a program{needed}:\n  {choice.call}"


@contextmanager
def _bar() -> Iterator[DivideProgress]:
    """Yields a callback that shows the progress of the search."""
    with progress(MofNCompleteColumn()) as bar:
        task = bar.add_task("", total=None)

        def show(judged: int, ways: int, best: Division | None) -> None:
            bar.update(task, completed=judged, total=ways, description="" if best is None else repr(best))

        yield show


def write_divisions(divisions: Divisions, pictures: PictureFiles) -> None:
    """Writes the requested pictures: the best step as SVG, the first few steps on a page."""
    if pictures.svg is not None:
        write_picture(pictures.svg, timeline_svg(_timeline(1, divisions.best), title=divisions.title))
    if pictures.html is not None:
        write_text(pictures.html, divisions_html(divisions))


def divisions_html(divisions: Divisions) -> str:
    """Returns a page with all ways in a table, the steps of the first few, and the assumptions."""
    drawn = divisions.choices[:SHOWN]
    viewed = [_viewed(place, choice, divisions.memory_bytes) for place, choice in enumerate(drawn, start=1)]
    rows = [_row(place, choice) for place, choice in enumerate(divisions.choices, start=1)]
    assumed = "".join(f"<li>{escape(sentence)}</li>" for sentence in divisions.assumptions)
    body = (
        header(divisions.title),
        *(f"<p>{escape(sentence)}</p>\n" for sentence in (*_heads(divisions), _program(divisions)) if sentence),
        table(TITLES, rows),
        f'<p class="hint">{escape(_note(divisions))}</p>\n',
        viewer(),
        section("assumed", "Assumptions of the first", f"<ul>{assumed}</ul>"),
    )
    return page(escape(divisions.title), body, viewed)


def _row(place: int, choice: Division) -> list[str]:
    setting, step = choice.setting, choice.step
    fullest = max(range(len(step.rank_bytes)), key=step.rank_bytes.__getitem__)
    return [
        f"way {place}",
        f"{step.seconds:.4g} s",
        f"{step.flops_per_gpu / 1e12:,.0f}",
        show_percent(step.utilization),
        *map(str, (setting.tp, setting.cp, setting.ep)),
        f"{setting.pp} x {setting.v}",
        f"{setting.dp:,}",
        f"{choice.num_microbatches:,} of {counted(setting.microbatch, 'sequence')}",
        setting.recompute,
        step.schedule,
        show_bytes(step.rank_bytes[fullest]),
        show_bytes(step.rank_activations[fullest]),
    ]


def _note(divisions: Divisions) -> str:
    drawn = "Below are the passes of the first ways, without the optimizer step, and their activation memory."
    return " ".join((MEANINGS, _searched(divisions), drawn, *_shortened(divisions.choices[:SHOWN])))


def _searched(divisions: Divisions) -> str:
    tried = f"{divisions.too_large:,} exceed the memory, {divisions.simulated:,} were simulated"
    return f"{divisions.ways:,} ways: {tried}; the others cannot be faster."


def _shortened(drawn: tuple[Division, ...]) -> Iterator[str]:
    """Yields a sentence for each step that is drawn only in part."""
    for place, choice in enumerate(drawn, start=1):
        if choice.repeated:
            few = choice.schedule.num_microbatches
            yield f"Way {place} is drawn with {few:,} microbatches; the other {choice.num_microbatches - few:,} repeat its middle."


def _viewed(place: int, choice: Division, memory: int) -> Viewed:
    costs = choice.estimate.costs
    limits = choice.estimate.limits(choice.schedule.placement, memory).memory
    return Viewed(_timeline(place, choice), costs, limits=limits)


def _timeline(place: int, choice: Division) -> Timeline:
    """Returns the timeline of the simulated step. Its name has the rank of the way in the table."""
    return replace(simulate(choice.schedule, choice.estimate.costs), name=f"way {place}: {choice.schedule.name}")
