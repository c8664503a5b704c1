"""`zerobubble trace`: a run of PyTorch's own pipelining, from its profiler traces."""

from __future__ import annotations

import json
from collections.abc import Iterator

import click
from rich.markup import escape

from zerobubble.cli.diff import print_difference
from zerobubble.cli.inputs.options import PictureFiles, Shape, json_option, output_file, picture_options, width_option
from zerobubble.cli.inputs.schedule_and_costs import find_schedule
from zerobubble.cli.outputs.drawing import draw_in_bands, legend
from zerobubble.cli.outputs.evaluation import describe_shape
from zerobubble.cli.outputs.terminal import Console, is_colored, stdout_console
from zerobubble.explain import Difference
from zerobubble.export.document import dumps
from zerobubble.export.png import write_picture
from zerobubble.export.svg import timeline_svg
from zerobubble.ir import Schedule
from zerobubble.simulation import simulate
from zerobubble.traces import TracedRun, read_trace
from zerobubble.units import counted, ms, show_ms
from zerobubble.view import Report, report_html
from zerobubble.whole_files import write_text

MOST_STEPS = 8
"""The number of steps whose makespans are printed."""
CLOCKS = {"host": "timed by ranges on the host", "kernels": "timed by GPU kernels"}


@click.command("trace")
@click.argument("files", nargs=-1, required=True, metavar="RANK0.json RANK1.json ...")
@click.option("--step", type=click.IntRange(0), metavar="N", help="Training step to show, from 0; the one of median makespan if not given.")
@click.option("--schedule", "against", metavar="NAME", help="The expected schedule, by name or in a file. Any other is an error.")
@picture_options
@click.option("--costs", "costs_file", metavar="FILE", help="Write the times of passes and messages to this file, for `plan --costs`.")
@click.option("-o", "--output", callback=output_file, metavar="FILE", help="Write the timeline to this file, for `diff`.")
@width_option
@json_option
def trace_command(
    files: tuple[str, ...],
    step: int | None,
    against: str | None,
    pictures: PictureFiles,
    costs_file: str | None,
    output: str | None,
    width: int | None,
    as_json: bool,
) -> None:
    """Show a run of torch.distributed.pipelining, such as torchtitan's, from its profiler traces, and explain its bubbles.

    \b
    Examples:
      zerobubble trace rank0.json rank1.json --html trace.html
      zerobubble trace rank*.json --costs costs.json -o run.json
      zerobubble plan --costs costs.json --microbatches 16 --memory 8MB
      zerobubble diff plan.json run.json

    Give the traces of all ranks of one pipeline, as torch.profiler exports them (JSON, or gzip), in any order. The run is compared with its
    own schedule, simulated with the median times of its passes. The difference is noise, messages and the host.
    """
    run = read_trace(files)
    schedule = run.schedule(step) if against is None else _wanted(against, run, step)
    difference = run.difference(step, schedule)
    if pictures.svg is not None:
        write_picture(pictures.svg, timeline_svg(run.timeline(step)))
    if pictures.html is not None:
        write_text(pictures.html, _page(run, step, difference))
    if costs_file is not None:
        write_text(costs_file, dumps(run.costs(step)))
    if output is not None:
        write_text(output, dumps(run.timeline(step)))
    if as_json:
        click.echo(json.dumps(_as_dict(run, step, difference), indent=2))
    else:
        _print(run, step, schedule, difference, stdout_console(width))


def _wanted(name: str, run: TracedRun, step: int | None) -> Schedule:
    """Returns the schedule `name` in the shape of the run."""
    ran = run.schedule(step)
    return find_schedule(
        name, Shape(ranks=ran.num_ranks, microbatches=ran.num_microbatches, stages_per_rank=ran.placement.stages_per_rank)
    ).schedule


def _page(run: TracedRun, step: int | None, difference: Difference) -> str:
    schedule, costs, measured = run.schedule(step), run.step_costs(step), run.timeline(step)
    planned = simulate(schedule, costs)
    title = f"{schedule.name}: {counted(schedule.num_ranks, 'rank')}, traced"
    idle = run.gaps(step, planned), run.gaps(step, measured)
    notes = [f"Schedule: {run.recognition(step)}.", *_notes(run, step)]
    return report_html(Report(title=title, timelines=(planned, measured), gaps=idle, difference=difference, notes=notes))


def _as_dict(run: TracedRun, step: int | None, difference: Difference) -> dict[str, object]:
    recognition = run.recognition(step)
    return {
        "files": list(run.files),
        "schedule": {"name": recognition.name, "exact": recognition.exact, "text": str(recognition)},
        "clock": run.clock,
        "step": run.typical if step is None else step,
        "steps": [
            {"profiler_step": label, "makespan_ms": ms(timeline.makespan), "bubble_makespan": timeline.bubble_makespan}
            for label, timeline in zip(run.labels, run.timelines, strict=True)
        ],
        "clocks": [{"rank": clock.rank, "shift": clock.shift, "least": clock.least, "most": clock.most} for clock in run.clocks],
        "notes": list(_notes(run, step)),
        "costs": run.costs(step).to_dict(),
        "hidden_links": list(run.hidden_links(step)),
        "difference": difference.to_dict(),
    }


def _notes(run: TracedRun, step: int | None) -> Iterator[str]:
    """Yields notes on the picture."""
    yield "The plan has the same order, with median times of passes in the step and of messages in the run, and no time between passes."
    moved = [clock for clock in run.clocks if clock.shift]
    yield from (f"The clock of rank {clock.rank} was moved by {show_ms(clock.shift)}{_bounds(clock.least, clock.most)}." for clock in moved)
    if not moved:
        yield "The clocks are consistent, and none was moved."
    if hidden := run.hidden_links(step):
        links = ", ".join(f"{stage}" for stage in hidden)
        yield f"No rank waited for messages from these stages to the next, so their time counts as 0: {links}."
    yield from (f"{note}." for note in run.notes)


def _bounds(least: int | None, most: int | None) -> str:
    if least is None or most is None:
        return ""
    return f"; the messages allow {show_ms(least)} to {show_ms(most)}"


def _label(number: int | None) -> str:
    return "" if number is None else f", ProfilerStep#{number}"


def _print(run: TracedRun, step: int | None, schedule: Schedule, difference: Difference, console: Console) -> None:
    colored = is_colored(console)
    number, timeline = run.typical if step is None else step, run.timeline(step)
    makespans = ", ".join(show_ms(shown.makespan) for shown in run.timelines[:MOST_STEPS])
    more = ", ..." if len(run.timelines) > MOST_STEPS else ""
    lines = [
        f"{schedule.name}: {describe_shape(schedule)}, {CLOCKS[run.clock]}",
        f"Schedule: {run.recognition(step)}.",
        f"{counted(len(run.timelines), 'step')} of {makespans}{more}; shown is step {number}{_label(run.labels[number])}.",
        *_notes(run, step),
    ]
    for line in lines:
        console.print(escape(line), highlight=False)
    console.print()
    picture = draw_in_bands(timeline, console.width, colored)
    console.print(picture, soft_wrap=True)
    console.print()
    console.print(legend(timeline, colored=colored, drawn=[picture]))
    console.print()
    print_difference(difference, console)
