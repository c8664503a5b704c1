"""`zerobubble make`: a published schedule as a file."""

from __future__ import annotations

from collections.abc import Callable

import click

from zerobubble.cli.files import write_text
from zerobubble.cli.options import json_option, make_schedule, microbatches_option, ranks_option, stages_option
from zerobubble.export.json_form import dumps
from zerobubble.export.torch_csv import to_torch_csv
from zerobubble.ir import Schedule

FORMATS: dict[str, Callable[[Schedule], str]] = {"text": Schedule.to_text, "torch-csv": to_torch_csv, "json": dumps}


@click.command("make")
@click.argument("name")
@ranks_option
@microbatches_option
@stages_option
@click.option("--format", "form", type=click.Choice(list(FORMATS)), help="Form of the file; text if not given.")
@click.option("-o", "--output", metavar="FILE", help="Write here instead of to stdout.")
@json_option
def make_file(
    name: str, ranks: int | None, microbatches: int | None, stages_per_rank: int | None, form: str | None, output: str | None, as_json: bool
) -> None:
    """Write the schedule NAME as text, as JSON or as PyTorch's schedule CSV.

    \b
    Examples:
      zerobubble make zb-h1 --ranks 4 --microbatches 8
      zerobubble make zb-v --ranks 8 --microbatches 24 --format torch-csv -o zbv.csv
    """
    if as_json and form not in (None, "json"):
        raise click.UsageError(f"--json and --format {form} contradict each other: give one")
    text = FORMATS["json" if as_json else form or "text"](make_schedule(name, ranks, microbatches, stages_per_rank))
    if output is None:
        click.echo(text, nl=False)
    else:
        write_text(output, text)
