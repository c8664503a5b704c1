"""`zerobubble check`: whether a schedule can run, every fault with its place in the file, and which known schedule it is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import click

from zerobubble.cli.inputs.options import Shape, json_option, shape_options
from zerobubble.cli.inputs.schedule_and_costs import Costed, find_schedule
from zerobubble.cli.outputs.evaluation import describe_shape
from zerobubble.communicators import USUAL_QUEUES, communicators_of, communicators_of_sums, held_by, play, queues_for
from zerobubble.costs import Costs
from zerobubble.errors import Fault
from zerobubble.ir import Op, Schedule
from zerobubble.lowering import lower
from zerobubble.recognition import Recognition, recognize
from zerobubble.simulation import peak_memory
from zerobubble.units import counted, show_bytes
from zerobubble.verify import schedule_faults

FAULTY = 1
MOST_SHOWN = 20
MOST_RECOGNIZED = 100_000
"""Maximum passes of a schedule that is played over NCCL and compared with the known ones, which takes seconds."""
MOST_REPLICAS = 1_000_000
AROUND = 4
"""Passes shown on either side of a fault."""

_PASS = re.compile(r"[0-9]+[A-Z]+[0-9]+")
_ROW = re.compile(r"\s*rank\s+[0-9]+\s*:")


@click.command("check")
@click.argument("name")
@shape_options
@click.option(
    "--replicas",
    type=click.IntRange(1, MOST_REPLICAS),
    default=1,
    metavar="N",
    help="Number of replicas that sum their gradients over NCCL.",
)
@json_option
@click.pass_context
def check(ctx: click.Context, name: str, shape: Shape, replicas: int, as_json: bool) -> None:
    """Check whether the schedule NAME can run.

    \b
    Examples:
      zerobubble check mine.csv
      zerobubble check plan.json --json
      zerobubble make zb-h2 --ranks 4 --microbatches 8 | zerobubble check -

    NAME is a file: a schedule (text or JSON), a plan, or PyTorch's schedule CSV; - is stdin. It may also be the name of a known schedule.

    Prints every fault with its place in the file, root causes first. For a legal schedule, prints the known schedule that it equals or is
    closest to, and what its communicators hold over NCCL. The exit code is 0 for a legal schedule, 1 for a faulty one, and 2 for a file
    that cannot be read.
    """
    named = find_schedule(name, shape)
    schedule = named.schedule
    faults = schedule_faults(schedule)
    is_examined = not faults and sum(map(len, schedule.rows)) <= MOST_RECOGNIZED
    recognition, nccl = (recognize(schedule), OverNccl.from_schedule(schedule, replicas)) if is_examined else (None, None)
    if as_json:
        click.echo(json.dumps(_as_dict(schedule, faults, recognition, nccl), indent=2))
    else:
        lines = _explained(schedule, faults, named.text or schedule.to_text()) if faults else _legal(schedule, recognition, nccl)
        click.echo("\n".join(lines))
    ctx.exit(FAULTY if faults else 0)


def _peak(schedule: Schedule) -> float:
    """Returns the peak memory over all ranks in microbatches, if B frees nothing."""
    costed = Costed(schedule, Costs.uniform(schedule.num_stages).completed_for(schedule), "equal stages")
    return max(costed.in_microbatches(peak_memory(schedule, costed.costs)))


@dataclass(frozen=True, slots=True)
class OverNccl:
    """A step under NCCL's rules: whether it `finishes`, and what the communicators of messages and sums hold at most on any rank.

    `queues` is the number of hardware queues of a GPU that it needs.
    """

    finishes: bool
    queues: int
    communicators: int
    blocks: int
    bytes: int

    @classmethod
    def from_schedule(cls, schedule: Schedule, replicas: int) -> OverNccl:
        """Plays the schedule of a pipeline with `replicas` replicas."""
        program = lower(schedule)
        used = communicators_of(channel for _, _, channel, _ in program.channels())
        queues = queues_for(used)
        devices = play(program, queues)
        used += communicators_of_sums(schedule.num_ranks, replicas)
        held = [held_by(rank, used) for rank in range(schedule.num_ranks)]
        return cls(not devices.stuck and not devices.mismatches, queues, *map(max, zip(*held, strict=True)))

    def __str__(self) -> str:
        if not self.communicators:
            return "it sends no messages"
        holds = f"{counted(self.communicators, 'communicator')} and {show_bytes(self.bytes)} of GPU memory for them on a rank at most"
        queues = f"; set CUDA_DEVICE_MAX_CONNECTIONS to {self.queues} or more" if self.queues > USUAL_QUEUES else ""
        return f"over NCCL it {'finishes' if self.finishes else 'deadlocks'}, with {holds}{queues}"


def _legal(schedule: Schedule, recognition: Recognition | None, nccl: OverNccl | None) -> Iterator[str]:
    yield f"{schedule.name} is legal: {describe_shape(schedule)}, {counted(_peak(schedule), 'microbatch')} in memory at most"
    yield str(recognition) if recognition else f"not compared with the known schedules: it has more than {MOST_RECOGNIZED:,} passes"
    if nccl is not None:
        yield str(nccl)


def _explained(schedule: Schedule, faults: tuple[Fault, ...], text: str) -> Iterator[str]:
    rows = source_rows(text, schedule)
    for fault in faults[:MOST_SHOWN]:
        yield "\n".join(filter(None, (fault.message, excerpt(fault, rows, schedule))))
    if len(faults) > MOST_SHOWN:
        yield f"and {counted(len(faults) - MOST_SHOWN, 'more fault')} (--json prints all)"


def _as_dict(schedule: Schedule, faults: tuple[Fault, ...], recognition: Recognition | None, nccl: OverNccl | None) -> dict[str, object]:
    return {
        "name": schedule.name,
        "legal": not faults,
        "num_ranks": schedule.num_ranks,
        "num_stages": schedule.num_stages,
        "num_microbatches": schedule.whole_microbatches,
        **({"slices": schedule.slices} if schedule.slices > 1 else {}),
        "peak_microbatches": None if faults else _peak(schedule),
        "faults": [asdict(fault) for fault in faults],
        "nccl": None if nccl is None else asdict(nccl),
        "recognition": None if recognition is None else {"exact": recognition.exact, **asdict(recognition)},
    }


@dataclass(frozen=True, slots=True)
class SourceRow:
    """The row of a rank in the file: its label, the line, and the first and last column (exclusive) of each pass."""

    label: str
    line: str
    passes: tuple[tuple[int, int], ...]


def source_rows(text: str, schedule: Schedule) -> list[SourceRow]:
    """Returns the rows of `schedule` in the `text` of its file, or in the text form if the file has no line per rank, as in JSON."""
    rows = list(_rows(text.removeprefix("\ufeff").rstrip().split("\n")))
    if [len(row.passes) for row in rows] == [len(row) for row in schedule.rows]:
        return rows
    written = _rows(schedule.to_text().split("\n"))
    return [SourceRow(row.line.partition(":")[0], row.line, row.passes) for row in written]


def _rows(lines: Sequence[str]) -> Iterator[SourceRow]:
    """Yields the lines that start with their rank, or all lines if none does, as in CSV."""
    labeled = any(map(_ROW.match, lines))
    for number, line in enumerate(lines, 1):
        start = _ROW.match(line)
        if start or not labeled:
            passes = _PASS.finditer(line.partition("#")[0], start.end() if start else 0)
            yield SourceRow(f"line {number}", line, tuple(match.span() for match in passes))


def excerpt(fault: Fault, rows: Sequence[SourceRow], schedule: Schedule) -> str:
    """Shows the passes around a fault with carets below it, in two lines; empty if the fault is not of a single rank."""
    if fault.rank is None:
        return ""
    row = rows[fault.rank]
    marked = _marked(fault, schedule)
    center = marked[0] if marked else len(row.passes)
    near = range(max(0, center - AROUND), min(len(row.passes), center + AROUND + 1))
    first, last = (row.passes[near[0]][0], row.passes[near[-1]][1]) if near else (0, len(row.line))
    carets = [row.passes[number] for number in marked if number in near] or [(last + 1, last + 2)]
    before, after = ("… " if near and near[0] > 0 else ""), (" …" if near and near[-1] + 1 < len(row.passes) else "")
    under = "".join("^" if any(start <= at < end for start, end in carets) else " " for at in range(first, carets[-1][1]))
    gutter = " " * len(row.label)
    return f"  {row.label} | {before}{row.line[first:last]}{after}\n  {gutter} | {' ' * len(before)}{under}"


def _marked(fault: Fault, schedule: Schedule) -> list[int]:
    """Returns the position of a fault, or the positions of the passes next to a missing pass; empty for the end of the row."""
    if fault.position is not None:
        return [fault.position]
    if fault.rank is None or fault.op is None:
        return []
    _, stage, microbatch = Op.parse(fault.op.partition(" ")[0])
    return [position for position, op in enumerate(schedule.rows[fault.rank]) if (op.stage, op.microbatch) == (stage, microbatch)]
