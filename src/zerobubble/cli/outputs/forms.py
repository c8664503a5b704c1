"""The winner of a plan, printed as a file of its schedule."""

from __future__ import annotations

import click

from zerobubble.export.torch_csv import to_torch_csv
from zerobubble.ir import Schedule


def print_schedule(schedule: Schedule, form: str) -> None:
    """Print the schedule in the form "text" or "torch-csv", and nothing else; raises as `to_torch_csv` does."""
    click.echo(schedule.to_text() if form == "text" else to_torch_csv(schedule), nl=False)
