"""A head beside the stages: what the options say of it, and schedules with it divided."""

from __future__ import annotations

from dataclasses import dataclass, replace

import click

from zerobubble.cli.inputs.options import Times, given_flags, milliseconds, option_group, three_times
from zerobubble.cli.inputs.schedule_and_costs import Given
from zerobubble.cli.inputs.workload import Question
from zerobubble.costs import Costs
from zerobubble.errors import InputError
from zerobubble.planning import Workload
from zerobubble.planning.problem.head import Head, has_parts
from zerobubble.planning.problem.problem import microbatch_bytes
from zerobubble.schedules import with_vocabulary


def _times_or_none(ctx: click.Context, param: click.Parameter, value: str | None) -> Times | None:
    return None if value is None else three_times(ctx, param, value)


@dataclass(frozen=True)
class HeadOptions:
    """The head of a model, as the command line says it; `head` is None where nothing is said, or a file tells what the head takes."""

    head: Times | None
    head_held: float
    head_slowdown: float
    collective: float

    def asked(self, question: Question) -> Head | None:
        """The head to plan for: that of the options, or else of the costs or the plan that are given; raises for what contradicts them."""
        known, measured = _known(question), _measured(question)
        placement = next(iter(question.placements.values()))
        if measured is not None:
            if flags := given_flags("head", "head_held", "collective"):
                raise click.UsageError(f"the costs tell what the parts of their head take and hold: leave {' and '.join(flags)} out")
            slowdown = self.head_slowdown if known is None or given_flags("head_slowdown") else known.slowdown
            return Head.from_parts(measured, placement, slowdown)
        if known is None:
            self.require_times()
        elif isinstance(question.work, Costs):
            raise InputError("the plan was made from costs with a head, and holds it whole: give the costs that it was made from")
        if self.head is None:
            return known
        saved = question.work.held_after_f if isinstance(question.work, Workload) else microbatch_bytes(placement, question.work)
        return Head(self.head, self.head_held * saved[-1], self.collective, self.head_slowdown)

    def require_times(self) -> None:
        """Raise where something is said of a head whose times are not given."""
        if self.head is None and (flags := given_flags("head_held", "head_slowdown", "collective")):
            raise click.UsageError(f"{flags[0]} is for a head: give its times with --head, too, or costs of its parts with --costs")


def has_head(question: Question) -> bool:
    """Whether the costs or the plan in the file have a head."""
    return _measured(question) is not None or _known(question) is not None


def _known(question: Question) -> Head | None:
    """The head of the plan in the file."""
    return None if question.problem is None else question.problem.head


def _measured(question: Question) -> Costs | None:
    """The costs in the file, if they have the parts of a head."""
    return question.work if isinstance(question.work, Costs) and has_parts(question.work) else None


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
