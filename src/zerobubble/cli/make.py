"""`zerobubble make`: a schedule as a file of another form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import click

from zerobubble.cli.beside.head import vocabulary_option, with_head_divided
from zerobubble.cli.inputs.options import (
    EQUAL_COSTS,
    CostOptions,
    Shape,
    cost_options,
    given_flags,
    json_option,
    option_group,
    shape_options,
)
from zerobubble.cli.inputs.schedule_and_costs import Given, find_schedule, with_costs
from zerobubble.errors import InputError
from zerobubble.export.json_form import dumps
from zerobubble.export.megatron import balanced_layers, to_megatron_layout
from zerobubble.export.perfetto import perfetto_json
from zerobubble.export.svg import timeline_svg
from zerobubble.export.torch_comms import MOST_UNSHARDED, to_torch_comms_csv
from zerobubble.export.torch_csv import to_torch_csv
from zerobubble.export.torchtitan import as_flags, torchtitan_settings
from zerobubble.ir import Schedule
from zerobubble.lowering import lower
from zerobubble.simulation import simulate
from zerobubble.timeline import Timeline
from zerobubble.whole_files import write_text

LAYOUT = "megatron-layout"
TORCHTITAN = "torchtitan"
ORDERS: dict[str, Callable[[Schedule], str]] = {
    "text": Schedule.to_text,
    "json": dumps,
    "program": lambda schedule: lower(schedule).to_text(),
    "torch-csv": to_torch_csv,
}
"""Forms that tell the order of passes."""
WITH_MESSAGES = {"torch-csv-comms": 0, "torch-csv-fsdp": MOST_UNSHARDED}
"""Forms for PyTorch that tell the messages, too, with the number of stages whose weights are gathered at a time."""
PICTURES: dict[str, Callable[[Timeline], str]] = {"svg": timeline_svg, "perfetto": perfetto_json}
"""Forms that tell when each pass runs, which takes costs."""
NO_SVG = (".png", ".jpg", ".jpeg", ".pdf", ".gif")
"""Endings of pictures that are not written."""
FORMATS = [*ORDERS, *WITH_MESSAGES, *PICTURES, LAYOUT, TORCHTITAN]


@dataclass(frozen=True)
class FormOptions:
    """Which form to write, and what some forms need beside the schedule."""

    form: str | None
    as_json: bool
    layers: int | None
    torch: str | None

    @property
    def name(self) -> str:
        """The form to write."""
        return "json" if self.as_json else self.form or "text"

    def check(self) -> None:
        """Raise where an option does not belong to the form."""
        if self.as_json and self.form not in (None, "json"):
            raise click.UsageError(f"--json and --format {self.form} contradict each other: give one")
        if self.layers is not None and self.name not in (LAYOUT, TORCHTITAN):
            raise click.UsageError(f"--layers belongs to --format {LAYOUT} and {TORCHTITAN}: leave it out")
        if self.torch is not None and self.name not in WITH_MESSAGES:
            raise click.UsageError(f"--torch belongs to --format {' and '.join(WITH_MESSAGES)}: leave it out")
        if self.name not in PICTURES and (flags := given_flags("costs_file", *EQUAL_COSTS, "shares")):
            remedy = f"the form {self.name} holds no times: leave it out"
            raise click.UsageError(f"{flags[0]} belongs to --format {' and '.join(PICTURES)}, {remedy}")

    def check_name(self, output: str | None) -> None:
        """Raise where the file to write is named as another kind of picture."""
        ending = Path(output or "").suffix.lower()
        if ending in NO_SVG and self.name in PICTURES:
            raise click.UsageError(f"--format {self.name} writes no {ending[1:]} file: name it {Path(output or '').with_suffix('.svg')}")


form_options = option_group(
    FormOptions,
    "form",
    click.option("--format", "form", type=click.Choice(FORMATS), help="Form of the file; text if not given."),
    click.option("--layers", type=int, metavar="N", help="Transformer layers of the model, for the layout and torchtitan."),
    click.option(
        "--torch", metavar="VERSION", help="The PyTorch that will read a CSV with messages, such as 2.13; the one installed here."
    ),
    json_option,
)


@click.command("make", short_help="Write a schedule as a file of any form.")
@click.argument("name")
@shape_options
@vocabulary_option
@cost_options
@form_options
@click.option("-o", "--output", metavar="FILE", help="Write here instead of to stdout.")
def make_file(name: str, shape: Shape, vocabulary: str | None, given: CostOptions, form: FormOptions, output: str | None) -> None:
    """Write the schedule NAME in one of these forms:

    \b
      text, json       what every command here reads
      program          what each rank runs, sends, receives and frees
      torch-csv        PyTorch's schedule CSV, format compute_only
      torch-csv-comms  the same with messages, format compute_comms
      torch-csv-fsdp   the same with messages, and weights gathered for FSDP
      svg, perfetto    a picture; a trace for ui.perfetto.dev
      megatron-layout  where the layers go: --pipeline-model-parallel-layout
      torchtitan       PyTorch's CSV in the file of -o, and on stdout the settings with which torchtitan plays it

    NAME is a known schedule by name, or a file: a schedule (text or JSON), a plan, or PyTorch's schedule CSV; - is stdin. Pictures and
    traces are timed with --times, --comm, --held, --overlap, --reduce, --buckets or --costs, or else with the costs of the plan, or else
    with 1 ms for each of F, B and W of a rank. With --vocabulary the head is divided over all ranks, which only the first two forms and
    the pictures can tell.

    \b
    Examples:
      zerobubble make zb-h1 --ranks 4 --microbatches 8
      zerobubble make zb-v --ranks 8 --microbatches 24 --format torch-csv -o zbv.csv
      zerobubble make v-half --ranks 4 --microbatches 8 --vocabulary 1 -o divided.txt
      zerobubble make plan.json --format torch-csv -o plan.csv
      zerobubble make zb-v --ranks 4 --microbatches 8 --format torch-csv-comms --torch 2.15
      zerobubble make interleaved-1f1b --ranks 4 --microbatches 10 --set group=4
      zerobubble make interleaved-1f1b --ranks 4 --microbatches 8 --format megatron-layout --layers 62
      zerobubble make plan.json --format torchtitan --layers 32 -o plan.csv
    """
    form.check()
    form.check_name(output)
    found = with_head_divided(find_schedule(name, shape), vocabulary)
    if form.name == TORCHTITAN:
        _for_torchtitan(found, form.layers, output)
        return
    text = _text(found, form, given)
    if output is None:
        click.echo(text, nl=False)
    else:
        write_text(output, text)


def _text(found: Given, form: FormOptions, given: CostOptions) -> str:
    """The schedule in the form asked for."""
    if form.name in ORDERS:
        return ORDERS[form.name](found.schedule)
    if form.name in WITH_MESSAGES:
        return _with_messages(found, form.name, form.torch)
    if form.name == LAYOUT:
        return _layout(found, form.layers)
    (costed,) = with_costs([found], given)
    return PICTURES[form.name](simulate(costed.schedule, costed.costs))


def _for_torchtitan(found: Given, layers: int | None, output: str | None) -> None:
    """The CSV in a file, and the settings that name it on stdout."""
    if output is None:
        raise InputError(f"--format {TORCHTITAN} needs -o FILE, where torchtitan will find the CSV")
    settings = as_flags(torchtitan_settings(found.schedule, output, layers))
    write_text(output, to_torch_csv(found.schedule))
    click.echo(settings, nl=False)


def _with_messages(found: Given, form: str, torch: str | None) -> str:
    """PyTorch's CSV with messages for a version of it, or for the one that is installed."""
    try:
        return to_torch_comms_csv(found.schedule, torch or version("torch"), WITH_MESSAGES[form])
    except PackageNotFoundError:
        remedy = "give --torch VERSION, that of the PyTorch that will read the file"
        raise InputError(f"--format {form} depends on the version of PyTorch, and none is installed here: {remedy}") from None


def _layout(found: Given, layers: int | None) -> str:
    """Megatron's layout of so many transformer `layers`, shared evenly; a plan for layers has a cut of its own, which that would undo."""
    if found.problem is not None and (cut := found.problem.layers_per_stage):
        sizes = " ".join(map(str, cut))
        remedy = "spell each stage in E, t and L and write it with zerobubble.export.to_megatron_layout"
        raise InputError(f"{found.name} has stages of {sizes} layers, and --format {LAYOUT} shares layers evenly: {remedy}")
    if layers is None:
        raise InputError(f"--format {LAYOUT} needs --layers N, the number of transformer layers of the model")
    return to_megatron_layout(balanced_layers(found.schedule.placement, layers)) + "\n"
