"""A head beside the stages: planned whole on the last stage or divided over all ranks, and schedules with it divided."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import click

from zerobubble.cli.inputs.options import PLANNED_APART, PictureFiles, Times, given_flags, milliseconds, option_group, three_times
from zerobubble.cli.inputs.schedule_and_costs import Costed, Given
from zerobubble.cli.inputs.workload import Question, SearchOptions
from zerobubble.cli.outputs.evaluation import evaluate
from zerobubble.cli.outputs.forms import print_schedule
from zerobubble.cli.outputs.page import write_pictures
from zerobubble.costs import Costs, Limits
from zerobubble.errors import InputError
from zerobubble.planning import HeadPlan, Objective, PlannedHead, Workload
from zerobubble.planning.attempt import ProgressCallback
from zerobubble.planning.head.plan import plan_head
from zerobubble.planning.plan_file import plan_text
from zerobubble.planning.problem.head import Head, has_parts
from zerobubble.schedules import with_vocabulary
from zerobubble.whole_files import write_text


def _times_or_none(ctx: click.Context, param: click.Parameter, value: str | None) -> Times | None:
    return None if value is None else three_times(ctx, param, value)


@dataclass(frozen=True)
class HeadOptions:
    """The head of a model, as the command line says it; `head` is None where nothing is said, or a file tells what the head takes."""

    head: Times | None
    head_held: float
    head_slowdown: float
    collective: float

    def require_alone(self, costs_file: str | None) -> None:
        """Raise where something is said of a head that is not there, or beside one what is planned without a head only."""
        if costs_file is None:
            self._require_times()
        if self.head is not None and (others := given_flags(*PLANNED_APART, "offload")):
            raise click.UsageError(f"--head is not planned together with {' and '.join(others)}: leave one of them out")

    def asked(self, question: Question) -> Head | None:
        """The head to plan for: that of the options, or else of the costs or the plan that are given; raises for what has none to plan."""
        problem = question.problem
        known = None if problem is None else problem.head
        measured = question.work if isinstance(question.work, Costs) and has_parts(question.work) else None
        if self.head is None and known is None and measured is None:
            self._require_times()
            return None
        if self.head is None and (others := given_flags(*PLANNED_APART, "offload")):
            what = "the plan has" if known is not None else "the costs have"
            raise click.UsageError(f"{what} a head, which is not planned together with {' and '.join(others)}: leave them out")
        if measured is not None:
            return self._measured(measured, question, known)
        if self.head is None and isinstance(question.work, Costs):
            raise InputError("the plan was made from costs of parts of a head, and holds it whole: give the costs that it was made from")
        if not isinstance(question.work, Workload) or question.shares or (problem and (problem.recomputation or problem.sharded)):
            raise InputError(
                "--head is planned for the work of ranks, alike for all microbatches, with neither recomputation nor weights in shards: "
                "give --times or --per-rank instead of --costs, or costs that Pipeline.profile measured with a zb.nn.DividedHead"
            )
        if self.head is None:
            self._require_times()
            return known
        return Head(self.head, self.head_held * question.work.held_after_f[-1], self.collective, self.head_slowdown)

    def _measured(self, costs: Costs, question: Question, known: Head | None) -> Head:
        """The head whose parts are in `costs`, those of the plan with the head `known`, if there is one."""
        if flags := given_flags("head", "head_held", "collective"):
            raise click.UsageError(f"the costs tell what the parts of their head take and hold: leave {' and '.join(flags)} out")
        slowdown = self.head_slowdown if known is None or given_flags("head_slowdown") else known.slowdown
        return Head.of_parts(costs, next(iter(question.placements.values())), slowdown)

    def _require_times(self) -> None:
        """Raise where something is said of a head whose times are not given."""
        if self.head is None and (flags := given_flags("head_held", "head_slowdown", "collective")):
            raise click.UsageError(f"{flags[0]} is for a head: give its times with --head, too, or costs of its parts with --costs")


def plan_with_head(
    head: Head, question: Question, memory: Limits | float | None, search: SearchOptions, progress: ProgressCallback | None
) -> HeadPlan:
    """The plan for the work of ranks, or for the costs of stages and parts of a head, that the question asks for, with the head."""
    arguments: dict[str, Any] = search.arguments(search.objective or question.objective or Objective.SPAN, progress)
    arguments |= {"placements": question.tried, "slowdown": head.slowdown}
    if isinstance(question.work, Workload):
        saved = question.work.held_after_f[-1]
        arguments |= {"head": head.times, "held": head.held / saved if saved else 0.0, "collective": head.collective}
    return plan_head(question.work, question.microbatches, memory=memory, **arguments)


def tell_of_head(head: Head, found: HeadPlan, output: str | None, pictures: PictureFiles, form: str | None, as_json: bool) -> None:
    """Print the plan as it is asked for, save its winner, and draw the best schedule of each way to place the head."""
    if output is not None:
        write_text(output, plan_text(found))
    if pictures.svg is not None or pictures.html is not None:
        source = f"head of {', '.join(f'{time:g}' for time in head.times)} ms"
        write_pictures(pictures, [evaluate(_costed(way, source)) for way in found.ways])
    if as_json:
        click.echo(json.dumps(found.to_dict(), indent=2))
    elif form is not None:
        print_schedule(found.schedule, form)
    else:
        click.echo(str(found))


def _costed(way: PlannedHead, source: str) -> Costed:
    """The schedule of a way to place the head, named by its placement, with its costs."""
    named = replace(way.schedule, name=f"{way.placement}: {way.schedule.name}")
    return Costed(named, way.costs, source, of_head=way.solved.problem.bytes_of_whole_head)


head_options = option_group(
    HeadOptions,
    "head",
    click.option(
        "--head",
        callback=_times_or_none,
        metavar="F,B,W",
        help="Times of the whole head in ms for a microbatch, which --times leave out: on the last stage or divided over all ranks.",
    ),
    click.option(
        "--head-held",
        type=click.FloatRange(0, 1000),
        default=0.0,
        metavar="X",
        help="With --head: memory that it keeps from F to B, as a share of what the last rank's stages save.",
    ),
    click.option(
        "--head-slowdown",
        type=click.FloatRange(1, 1000),
        default=1.0,
        metavar="X",
        help="With a head: by how much a part takes longer than its even share; published are 1.07 to 1.32.",
    ),
    click.option(
        "--collective",
        callback=milliseconds,
        default="0",
        metavar="C",
        help="With --head: time until what a rank gives of a divided head has reached the others in ms.",
    ),
)
"""The options of a planning verb that say what the head takes; they make its argument `head`."""

vocabulary_option = click.option(
    "--vocabulary",
    type=click.Choice(["1", "2"]),
    help="Divide the head over all ranks by its vocabulary, by algorithm 1 (passes SL and TX) or 2 (S and T).",
)


def with_head_divided(given: Given, algorithm: str | None) -> Given:
    """The schedule with its head divided by `algorithm`, if that is given; raises as `with_vocabulary` does."""
    return given if algorithm is None else replace(given, schedule=with_vocabulary(given.schedule, int(algorithm)))
