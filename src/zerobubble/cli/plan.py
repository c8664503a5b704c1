"""`zerobubble plan`: the best schedule for given times and memory, over all placements, with a bound on what is left to gain."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from zerobubble.cli.files import write_text
from zerobubble.cli.layers import cuts_dict, cuts_text, equal_room, read_layers
from zerobubble.cli.options import refuse_beside
from zerobubble.cli.workload import Times, asked_placements, asked_shape, asked_stages, asked_work, planning_options
from zerobubble.costs import Limits
from zerobubble.errors import InputError
from zerobubble.export.torch_csv import to_torch_csv
from zerobubble.export.units import ms
from zerobubble.planning import Plan, Solved, plan, plan_layers
from zerobubble.planning.attempt import PlanProgress, ProgressCallback
from zerobubble.planning.plan_file import plan_text
from zerobubble.planning.reasons import percent
from zerobubble.planning.robust_order import robust_order_dict, robust_order_text, with_robust_winner
from zerobubble.planning.sensitivity_text import what_if, what_if_text

Told = tuple[dict[str, object], str]
"""What is told beside the plan: keys for the JSON form, and text."""


@click.command("plan")
@planning_options
@click.option("--memory", type=float, metavar="X", help="Room on each rank, in microbatches of all its stages; all if not given.")
@click.option("--baseline", metavar="NAME", help="Ask this planner of the papers instead of ours.")
@click.option("--costs", "costs_file", metavar="FILE", help="JSON with the costs of each stage of one placement, instead of --times.")
@click.option("--memory-bytes", type=click.IntRange(1), metavar="N", help="Room on each rank in bytes, for --costs.")
@click.option("--layers", metavar="FILE", help="JSON with the costs of each layer, to be cut into stages, instead of --times.")
@click.option(
    "--what-if",
    "error",
    type=click.FloatRange(0, 100, True, True),
    metavar="PERCENT",
    help="Also tell what becomes of the winner if times are off.",
)
@click.option(
    "--noise",
    type=click.FloatRange(0, 100, True, True),
    metavar="PERCENT",
    help="Search the winner on, as long again, for an order that stands passes which vary by so much.",
)
@click.option("--format", "form", type=click.Choice(["torch-csv"]), help="Print the winner as PyTorch's schedule CSV and nothing else.")
@click.option("-o", "--output", metavar="FILE", help="Also save the winner with its bound and figures, for zb.io.load_plan.")
@click.pass_context
def plan_verb(
    ctx: click.Context,
    ranks: int | None,
    microbatches: int | None,
    times: Times,
    comm: float,
    held: float,
    per_rank: str | None,
    placement: str,
    objective: str,
    budget: float,
    evaluations: int | None,
    seed: int,
    as_json: bool,
    memory: float | None,
    baseline: str | None,
    costs_file: str | None,
    memory_bytes: int | None,
    layers: str | None,
    error: float | None,
    noise: float | None,
    form: str | None,
    output: str | None,
) -> None:
    """Find the schedule with the smallest bubble for these times and this memory, over all placements of stages.

    Prints the winner and the other placements with their bubbles, memory and messages, the bound of each, which no schedule can
    beat, and the reason. Ctrl-C ends the search with the best so far.

    With --layers, a list of [F, B, W] in ms per layer or layers in their JSON form, the cut into stages is chosen together with the
    schedule: after the search on balanced cuts, one as long moves the winner's cuts (Ctrl-C ends the one that runs). --memory is
    then the room for microbatches in an equal share of the layers, beside an equal share of their parameters.

    With --costs, as Pipeline.profile measures them, the order is planned for the stages of the placement that they were measured on,
    within --memory-bytes.

    \b
    Examples:
      zerobubble plan --ranks 8 --microbatches 24 --times 18.522,18.086,9.337 --comm 0.601 --memory 8
      zerobubble plan --ranks 8 --microbatches 24 --placement vee,wave-4 --memory 5 --budget 20 -o plan.json
      zerobubble plan --microbatches 24 --per-rank times.json --memory 8 --format torch-csv
      zerobubble plan --ranks 8 --microbatches 24 --memory 8 --what-if 10
      zerobubble plan --ranks 8 --microbatches 24 --layers layers.json --memory 8
      zerobubble plan --microbatches 24 --costs costs.json --placement vee --memory-bytes 8000000000
    """
    if as_json and form is not None:
        raise click.UsageError(f"--json and --format {form} contradict each other: give one")
    refuse_beside(ctx, "layers", "per_rank", "baseline")
    refuse_beside(ctx, "costs_file", "times", "comm", "held", "per_rank", "layers")
    if memory is not None and costs_file is not None:
        raise click.UsageError("--memory is not for --costs: give --memory-bytes, in bytes")
    if memory_bytes is not None and costs_file is None:
        raise click.UsageError("--memory-bytes is for --costs: give --memory, in microbatches")
    if memory is not None and 0 < memory < 1:
        raise InputError(f"--memory {memory:g} cannot hold one microbatch: rank 0, as every rank, lacks room for {1 - memory:.4g} of it")
    told: list[Told] = []
    with progress_bar(budget * (1 if layers is None else 2) if evaluations is None else None) as watch:
        search: dict[str, Any] = {"objective": objective, "seconds": budget, "seed": seed, "evaluations": evaluations, "progress": watch}
        if costs_file is not None:
            costs, made, microbatches = asked_stages(costs_file, ranks, microbatches, placement)
            limits = None if memory_bytes is None else Limits((memory_bytes,) * made.num_ranks)
            found = plan(costs, microbatches, limits, placements=made, baseline=baseline, **search)
        elif layers is None:
            work, microbatches = asked_work("plan", ranks, microbatches, times, comm, held, per_rank)
            search |= {"placements": asked_placements(placement, work.num_ranks, microbatches), "baseline": baseline}
            found = plan(work, microbatches, memory, **search)
        else:
            ranks, microbatches = asked_shape("plan", ranks, microbatches)
            named, model = asked_placements(placement, ranks, microbatches), read_layers(layers, comm, held)
            limits = None if memory is None else equal_room(model, ranks, memory)
            together = plan_layers(model, named, microbatches, limits, **search)
            found, told = together.plan, [(cuts_dict(together), cuts_text(together, len(model)))]
    if noise is not None:
        found, robust = with_robust_winner(found, noise / 100, seconds=budget, seed=seed, evaluations=evaluations)
        problem = found.best.problem
        told.append(({"noise": robust_order_dict(problem, robust)}, robust_order_text(problem, robust, noise / 100)))
    schedule = found.schedule
    if output is not None:
        write_text(output, plan_text(found.best))
    if error is not None and form is None:
        moved = what_if(found.best, error / 100, seed=seed)
        told.append(({"what_if": moved.to_dict()}, what_if_text(moved)))
    if as_json:
        click.echo(json.dumps(as_dict(found) | {key: value for data, _ in told for key, value in data.items()}, indent=2))
    elif form is not None:
        click.echo(to_torch_csv(schedule), nl=False)
    else:
        click.echo("\n\n".join([str(found), *(text for _, text in told)]))


@contextmanager
def progress_bar(seconds: float | None) -> Iterator[ProgressCallback | None]:
    """What to call with news of a search, to be shown as a bar on a terminal; None where there is none, or nothing to wait for."""
    console = Console(stderr=True)
    if not console.is_terminal or seconds == 0:
        yield None
        return
    with Progress(BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"), console=console, transient=True) as bar:
        yield _shown(bar, seconds)


def _shown(bar: Progress, seconds: float | None) -> ProgressCallback:
    task = bar.add_task("getting ready", total=seconds)

    def watch(news: PlanProgress) -> None:
        told = f"{news.placement}: bubble {percent(news.bubble)}, gap {percent(news.gap)}, {news.how}"
        bar.update(task, completed=bar.tasks[0].elapsed or 0.0, description=told)

    return watch


def as_dict(found: Plan) -> dict[str, object]:
    """The winner's figures, with its CSV, and those of every placement; bounds are bubble rates too."""
    return {
        **figures(found.choices[0].name, found.best),
        "seconds": found.seconds,
        "compile_seconds": found.compiling,
        "csv": to_torch_csv(found.schedule),
        "choices": [figures(choice.name, choice.solved) | {"reason": choice.note} for choice in found.choices],
    }


def figures(name: str, solved: Solved) -> dict[str, object]:
    """The figures of one answer: bubbles and bounds as rates, times in ms, None where there is no schedule."""
    problem, timeline = solved.problem, solved.timeline
    bounds = problem.bounds()
    return {
        "placement": name,
        "name": None if solved.schedule is None else solved.schedule.name,
        "how": solved.how,
        "bubble_span": timeline and timeline.bubble_span,
        "bubble_makespan": timeline and timeline.bubble_makespan,
        "lower_bound_span": problem.bubble(bounds.span.time),
        "lower_bound_makespan": problem.bubble(bounds.makespan.time),
        "span_ms": timeline and ms(timeline.span),
        "makespan_ms": timeline and ms(timeline.makespan),
        "gap": solved.gap,
        "status": solved.status.value,
        "peak_microbatches": solved.peak_microbatches,
        "messages": problem.messages,
        "seconds": solved.seconds,
    }
