"""`zerobubble pareto`: the smallest bubble for each memory limit, over all placements."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import floor

import click

from zerobubble.cli.inputs.options import PictureFiles, SectionedCommand, json_option, picture_options
from zerobubble.cli.inputs.problem import SearchOptions, WorkOptions, in_microbatches, read_question, search_options, work_options
from zerobubble.cli.outputs.plan import solved_to_dict
from zerobubble.cli.plan import search_progress
from zerobubble.errors import InputError
from zerobubble.export.front import front_svg
from zerobubble.export.png import write_picture
from zerobubble.planning import Objective
from zerobubble.planning.pareto import Front, Point, pareto
from zerobubble.units import counted, read_bytes
from zerobubble.view.front_page import front_html

MOST_POINTS = 100


@dataclass(frozen=True)
class Range:
    """The memory limits in ascending order, in microbatches or bytes."""

    limits: list[float]
    in_bytes: bool

    def in_microbatches(self, work: WorkOptions) -> list[float]:
        """Returns the limits in microbatches. Raises if they are in bytes and the bytes of a microbatch are unknown."""
        return [in_microbatches(round(limit), work) for limit in self.limits] if self.in_bytes else self.limits


def memory_range(ctx: click.Context, param: click.Parameter, value: str | None) -> Range | None:
    """Reads LO:HI:STEP, three numbers of microbatches or three amounts with units."""
    if value is None:
        return None
    sizes = [read_bytes(part) for part in value.split(":")]
    in_bytes = None not in sizes
    try:
        low, high, step = [float(size or 0) for size in sizes] if in_bytes else map(float, value.split(":"))
    except ValueError:
        raise click.BadParameter(f"{value!r} is not LO:HI:STEP, such as 4:16:2 or 8GB:40GB:4GB", ctx, param) from None
    if not (0 < low <= high < float("inf") and 0 < step < float("inf")):
        raise click.BadParameter(f"{value!r} must be LO:HI:STEP with 0 < LO <= HI and STEP above 0", ctx, param)
    if (high - low) / step >= MOST_POINTS:
        raise click.BadParameter(f"{value!r} has more than {MOST_POINTS} limits: give a larger STEP", ctx, param)
    return Range([round(low + number * step, 6) for number in range(floor((high - low) / step + 1e-9) + 1)], in_bytes)


@click.command("pareto", cls=SectionedCommand)
@work_options
@search_options
@click.option(
    "--memory",
    "memories",
    callback=memory_range,
    metavar="LO:HI:STEP",
    help="Memory limits in microbatches, or with units; P/4:2P:P/8 if not given.",
)
@picture_options
@json_option
def pareto_command(work: WorkOptions, search: SearchOptions, memories: Range | None, pictures: PictureFiles, as_json: bool) -> None:
    """Find the smallest bubble for each memory limit, over all placements of stages.

    \b
    Examples:
      zerobubble pareto --ranks 8 --microbatches 24 --times 18.522,18.086,9.337 --comm 0.601 --held 0.941
      zerobubble pareto --ranks 8 --microbatches 24 --memory 4:12:1 --budget 20 --html front.html
      zerobubble pareto --ranks 8 --microbatches 24 --memory 16GB:48GB:4GB --microbatch-bytes 4GB
      zerobubble pareto --costs plan.json --budget 1

    Each line is the best plan for a limit, with the lower bound over all placements. The budget applies to each limit. --costs takes a
    costs file, for the placement that it was measured on, or a plan, for its times or costs, microbatches and objective. Limits are in
    microbatches of all stages of a rank.
    """
    question = read_question("pareto", work, search)
    p = question.num_ranks
    limits = memories.in_microbatches(work) if memories else [p * eighth / 8 for eighth in range(2, 17)]
    with search_progress(search, searches=len(limits)) as progress:
        arguments = search.arguments(search.objective or question.objective or Objective.PERIOD, progress)
        front = pareto(question.work, question.microbatches, limits, placements=question.tried, **arguments)
    last = front.points[-1].plan
    if last.order is None:
        raise InputError("no schedule fits at any of the limits: {reason}", reason=last.reason, remedy="give a larger --memory")
    title = f"Bubble and memory: {counted(p, 'rank')}, {counted(question.microbatches, 'microbatch')}"
    for file, text in ((pictures.svg, front_svg), (pictures.html, front_html)):
        if file is not None:
            write_picture(file, text(front, title))
    click.echo(json.dumps([_as_dict(front, point) for point in front.points], indent=2) if as_json else front)


def _as_dict(front: Front, point: Point) -> dict[str, object]:
    """Returns the figures of one limit: the winner, None without one, every placement, and the bound as a bubble rate.

    `no_gain_over` is a smaller limit with the same time, None without one.
    """
    smaller = front.dominated_by(point)
    answers = [solved_to_dict(choice.name, choice.plan) for choice in point.plan.choices]
    best = answers[0] if point.plan.order is not None else None
    return {"memory": point.memory, "no_gain_over": smaller and smaller.memory} | {
        "lower_bound": point.plan.lower_bound,
        "best": best,
        "choices": answers,
    }
