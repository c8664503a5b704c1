"""`zerobubble make`: a known schedule as a file."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import click

from zerobubble.cli.figures import equal_costs
from zerobubble.cli.files import write_text
from zerobubble.cli.options import json_option, make_schedule, microbatches_option, ranks_option, set_option, stages_option
from zerobubble.errors import InputError
from zerobubble.export.json_form import dumps
from zerobubble.export.megatron import balanced_layers, to_megatron_layout
from zerobubble.export.perfetto import perfetto_json
from zerobubble.export.svg import timeline_svg
from zerobubble.export.torch_comms import MOST_UNSHARDED, to_torch_comms_csv
from zerobubble.export.torch_csv import to_torch_csv
from zerobubble.ir import Schedule
from zerobubble.lowering import lower
from zerobubble.simulation import simulate
from zerobubble.timeline import Timeline


def _played(schedule: Schedule) -> Timeline:
    """The schedule where F, B and W of a rank and microbatch take 1 ms each and messages nothing."""
    return simulate(schedule, equal_costs(schedule, (1, 1, 1), 0))


LAYOUT = "megatron-layout"
FORMATS: dict[str, Callable[[Schedule], str]] = {
    "text": Schedule.to_text,
    "json": dumps,
    "program": lambda schedule: lower(schedule).to_text(),
    "torch-csv": to_torch_csv,
    "torch-csv-comms": to_torch_comms_csv,
    "torch-csv-fsdp": partial(to_torch_comms_csv, unsharded=MOST_UNSHARDED),
    "svg": lambda schedule: timeline_svg(_played(schedule)),
    "perfetto": lambda schedule: perfetto_json(_played(schedule)),
}


@click.command("make")
@click.argument("name")
@ranks_option
@microbatches_option
@stages_option
@set_option
@click.option("--format", "form", type=click.Choice([*FORMATS, LAYOUT]), help="Form of the file; text if not given.")
@click.option("--layers", type=int, metavar="N", help="Transformer layers of the model, for the layout.")
@click.option("-o", "--output", metavar="FILE", help="Write here instead of to stdout.")
@json_option
def make_file(
    name: str,
    ranks: int | None,
    microbatches: int | None,
    stages_per_rank: int | None,
    options: dict[str, Any],
    form: str | None,
    layers: int | None,
    output: str | None,
    as_json: bool,
) -> None:
    """Write the schedule NAME in one of these forms:

    \b
      text, json       what every command here reads
      program          what each rank runs, sends, receives and frees
      torch-csv        PyTorch's schedule CSV, format compute_only
      torch-csv-comms  the same with messages, format compute_comms
      torch-csv-fsdp   the same with messages, and weights gathered for FSDP
      svg, perfetto    a picture; a trace for ui.perfetto.dev, at 1 ms a pass
      megatron-layout  where the layers go: --pipeline-model-parallel-layout

    \b
    Examples:
      zerobubble make zb-h1 --ranks 4 --microbatches 8
      zerobubble make zb-v --ranks 8 --microbatches 24 --format torch-csv -o zbv.csv
      zerobubble make interleaved-1f1b --ranks 4 --microbatches 10 --set group=4
      zerobubble make interleaved-1f1b --ranks 4 --microbatches 8 --format megatron-layout --layers 62
    """
    if as_json and form not in (None, "json"):
        raise click.UsageError(f"--json and --format {form} contradict each other: give one")
    if layers is not None and form != LAYOUT:
        raise click.UsageError(f"--layers belongs to --format {LAYOUT}: leave it out")
    schedule = make_schedule(name, ranks, microbatches, stages_per_rank, options)
    text = FORMATS["json" if as_json else form or "text"](schedule) if form != LAYOUT else _layout(schedule, layers)
    if output is None:
        click.echo(text, nl=False)
    else:
        write_text(output, text)


def _layout(schedule: Schedule, layers: int | None) -> str:
    if layers is None:
        raise InputError(f"--format {LAYOUT} needs --layers N, the number of transformer layers of the model")
    return to_megatron_layout(balanced_layers(schedule.placement, layers)) + "\n"
