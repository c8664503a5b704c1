"""`zerobubble check`: whether a schedule file can run, and every reason why not."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from zerobubble.cli.files import read_schedule
from zerobubble.cli.options import json_option
from zerobubble.costs import UNIT_BYTES, Costs
from zerobubble.errors import Fault
from zerobubble.ir import Schedule
from zerobubble.simulate import peak_memory
from zerobubble.verify import schedule_faults

FAULTY = 1


@click.command("check")
@click.argument("file")
@json_option
@click.pass_context
def check(ctx: click.Context, file: str, as_json: bool) -> None:
    """Check the schedule in FILE (text, JSON or PyTorch CSV; - is stdin).

    Prints every fault as a sentence, root causes first. The exit code is 0 for a legal schedule, 1 for a faulty one and 2 for a
    file that cannot be read.

    \b
    Examples:
      zerobubble check mine.csv
      zerobubble make zb-h2 --ranks 4 --microbatches 8 | zerobubble check -
    """
    schedule = read_schedule(file)
    faults = schedule_faults(schedule)
    click.echo(json.dumps(_as_dict(schedule, faults), indent=2) if as_json else _as_text(schedule, faults))
    ctx.exit(FAULTY if faults else 0)


def _peak_microbatches(schedule: Schedule) -> float:
    """The most any rank holds, in microbatches of all its stages, when B frees nothing."""
    peak = max(peak_memory(schedule, Costs.uniform(schedule.num_stages)))
    return peak / (UNIT_BYTES * schedule.placement.stages_per_rank)


def _as_text(schedule: Schedule, faults: tuple[Fault, ...]) -> str:
    if faults:
        return "\n".join(fault.message for fault in faults)
    counts = f"{schedule.num_ranks} ranks, {schedule.num_stages} stages, {schedule.num_microbatches} microbatches"
    return f"{schedule.name} is legal: {counts}, peak {_peak_microbatches(schedule):g} microbatches in memory"


def _as_dict(schedule: Schedule, faults: tuple[Fault, ...]) -> dict[str, object]:
    return {
        "name": schedule.name,
        "legal": not faults,
        "num_ranks": schedule.num_ranks,
        "num_stages": schedule.num_stages,
        "num_microbatches": schedule.num_microbatches,
        "peak_microbatches": None if faults else _peak_microbatches(schedule),
        "faults": [asdict(fault) for fault in faults],
    }
