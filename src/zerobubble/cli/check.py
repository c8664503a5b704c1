"""`zerobubble check`: whether a schedule file can run, every reason why not, and which schedule it is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict

import click

from zerobubble.cli.inputs.options import Shape, json_option, shape_options
from zerobubble.cli.inputs.schedule_and_costs import Costed, find_schedule
from zerobubble.cli.outputs.evaluation import describe_shape
from zerobubble.cli.outputs.excerpts import excerpt, source_rows
from zerobubble.costs import Costs
from zerobubble.errors import Fault
from zerobubble.ir import Schedule
from zerobubble.recognition import Recognition, recognise
from zerobubble.simulation import peak_memory
from zerobubble.units import counted
from zerobubble.verify import schedule_faults

FAULTY = 1
MOST_SHOWN = 20
MOST_RECOGNISED = 100_000
"""Passes up to which building every known schedule for comparison takes seconds."""


@click.command("check", short_help="Check whether a schedule can run.")
@click.argument("name")
@shape_options
@json_option
@click.pass_context
def check(ctx: click.Context, name: str, shape: Shape, as_json: bool) -> None:
    """Check whether the schedule NAME can run.

    NAME is a file: a schedule (text or JSON), a plan, or PyTorch's schedule CSV; - is stdin. It may also be a known schedule by name.

    Prints every fault as a sentence with its place in the file, root causes first, or else which known schedule it is or comes
    closest to. The exit code is 0 for a legal schedule, 1 for a faulty one and 2 for a file that cannot be read.

    \b
    Examples:
      zerobubble check mine.csv
      zerobubble check plan.json --json
      zerobubble make zb-h2 --ranks 4 --microbatches 8 | zerobubble check -
    """
    given = find_schedule(name, shape)
    schedule = given.schedule
    faults = schedule_faults(schedule)
    known = None if faults or sum(map(len, schedule.rows)) > MOST_RECOGNISED else recognise(schedule)
    if as_json:
        click.echo(json.dumps(_as_dict(schedule, faults, known), indent=2))
    else:
        click.echo("\n".join(_explained(schedule, faults, given.text or schedule.to_text()) if faults else _legal(schedule, known)))
    ctx.exit(FAULTY if faults else 0)


def _peak(schedule: Schedule) -> float:
    """The most any rank holds, in microbatches, when B frees nothing."""
    costed = Costed(schedule, Costs.uniform(schedule.num_stages).completed_for(schedule), "equal stages")
    return max(costed.in_microbatches(peak_memory(schedule, costed.costs)))


def _legal(schedule: Schedule, known: Recognition | None) -> Iterator[str]:
    yield f"{schedule.name} is legal: {describe_shape(schedule)}, {counted(_peak(schedule), 'microbatch')} in memory at most"
    yield str(known) if known else f"it is too long (more than {MOST_RECOGNISED:,} passes) to be compared with the known schedules"


def _explained(schedule: Schedule, faults: tuple[Fault, ...], text: str) -> Iterator[str]:
    rows = source_rows(text, schedule)
    for fault in faults[:MOST_SHOWN]:
        yield "\n".join(filter(None, (fault.message, excerpt(fault, rows, schedule))))
    if len(faults) > MOST_SHOWN:
        yield f"and {counted(len(faults) - MOST_SHOWN, 'more fault')} (--json gives all of them)"


def _as_dict(schedule: Schedule, faults: tuple[Fault, ...], known: Recognition | None) -> dict[str, object]:
    return {
        "name": schedule.name,
        "legal": not faults,
        "num_ranks": schedule.num_ranks,
        "num_stages": schedule.num_stages,
        "num_microbatches": schedule.num_microbatches,
        "peak_microbatches": None if faults else _peak(schedule),
        "faults": [asdict(fault) for fault in faults],
        "recognition": None if known is None else {"exact": known.exact, **asdict(known)},
    }
