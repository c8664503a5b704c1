"""`zerobubble pareto`: how small the bubble can be for how much memory, over all placements."""

from __future__ import annotations

import json
from math import floor

import click

from zerobubble.cli.files import write_text
from zerobubble.cli.plan import figures, progress_bar
from zerobubble.cli.workload import Times, asked_placements, asked_work, planning_options
from zerobubble.errors import InputError
from zerobubble.export.front import front_html, front_svg
from zerobubble.planning.pareto import Point, pareto

MOST_POINTS = 100


def memory_range(ctx: click.Context, param: click.Parameter, value: str | None) -> list[float] | None:
    """The value of an option that takes LO:HI:STEP: every memory limit from the lowest to the highest."""
    if value is None:
        return None
    try:
        low, high, step = map(float, value.split(":"))
    except ValueError:
        raise click.BadParameter(f"{value!r} is not LO:HI:STEP, such as 4:16:2", ctx, param) from None
    if not (0 < low <= high < float("inf") and 0 < step < float("inf")):
        raise click.BadParameter(f"{value!r} has no limit: give 0 < LO <= HI and a STEP above 0", ctx, param)
    if (high - low) / step >= MOST_POINTS:
        raise click.BadParameter(f"{value!r} has more than {MOST_POINTS} limits: give a larger STEP", ctx, param)
    return [round(low + number * step, 6) for number in range(floor((high - low) / step + 1e-9) + 1)]


@click.command("pareto")
@planning_options
@click.option("--memory", "memories", callback=memory_range, metavar="LO:HI:STEP", help="Limits in microbatches; P/4:2P:P/8 if not given.")
@click.option("--svg", metavar="FILE", help="Also write the picture to this file.")
@click.option("--html", metavar="FILE", help="Also write picture and figures to this file, as a page.")
def pareto_verb(
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
    memories: list[float] | None,
    svg: str | None,
    html: str | None,
) -> None:
    """Find the smallest bubble for each amount of memory, over all placements of stages.

    The budget is for each limit. Each line is the best plan found for a limit, with the bound that no schedule on any of the
    placements can beat.

    \b
    Examples:
      zerobubble pareto --ranks 8 --microbatches 24 --times 18.522,18.086,9.337 --comm 0.601 --held 0.941
      zerobubble pareto --ranks 8 --microbatches 24 --memory 4:12:1 --budget 20 --html front.html
    """
    work, microbatches = asked_work("pareto", ranks, microbatches, times, comm, held, per_rank)
    p = work.num_ranks
    limits = memories or [p * eighth / 8 for eighth in range(2, 17)]
    with progress_bar(budget * len(limits) if evaluations is None else None) as watch:
        front = pareto(
            work,
            microbatches,
            limits,
            placements=asked_placements(placement, p, microbatches),
            objective=objective,
            seconds=budget,
            seed=seed,
            evaluations=evaluations,
            progress=watch,
        )
    last = front.points[-1].plan.best
    if last.schedule is None:
        raise InputError(f"no schedule fits at any of the limits: {last.reason}")
    title = f"Bubble and memory: {p} ranks, {microbatches} microbatches"
    for file, text in ((svg, front_svg), (html, front_html)):
        if file is not None:
            write_text(file, text(front, title))
    click.echo(json.dumps([_as_dict(point) for point in front.points], indent=2) if as_json else front)


def _as_dict(point: Point) -> dict[str, object]:
    """One limit: the winner's figures, None without one, and those of every placement; the bound is a bubble rate over all."""
    answers = [figures(choice.name, choice.solved) for choice in point.plan.choices]
    best = answers[0] if point.plan.best.schedule is not None else None
    return {"memory": point.memory, "lower_bound": point.plan.lower_bound, "best": best, "choices": answers}
