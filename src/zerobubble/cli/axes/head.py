"""The head of a model: its options, and schedules with the head divided."""

from __future__ import annotations

from dataclasses import dataclass, replace

import click

from zerobubble.cli.inputs.options import HEAD, NumberRange, Times, given_flags, if_given, milliseconds, option, option_group, three_times
from zerobubble.cli.inputs.problem import PlanQuestion
from zerobubble.cli.inputs.schedule_and_costs import NamedSchedule
from zerobubble.costs import Costs
from zerobubble.errors import InputError
from zerobubble.planning import Workload
from zerobubble.planning.problem.head import Head, has_parts
from zerobubble.planning.problem.problem import microbatch_bytes
from zerobubble.schedules import with_vocabulary


@dataclass(frozen=True, kw_only=True)
class HeadOptions:
    """The head of a model; `head` is None if there is none, or if a file has its costs."""

    head: Times | None = option(
        "--head",
        callback=if_given(three_times),
        metavar="F,B,W",
        help="Times of the head in ms per microbatch, in addition to --times. Plans it whole and divided over all ranks.",
    )
    head_held: float = option(
        "--head-held",
        type=NumberRange(0, 1000),
        default=0.0,
        metavar="X",
        help="Memory of the head, relative to the activations of the last rank.",
    )
    head_slowdown: float = option(
        "--head-slowdown",
        type=NumberRange(1, 1000),
        default=1.0,
        metavar="X",
        help="Time of a rank's part of the divided head, relative to an even share; published values are 1.07 to 1.32.",
    )
    collective: float = option(
        "--collective", callback=milliseconds, default="0", metavar="C", help="Time of a collective of the divided head in ms."
    )

    def head_for(self, question: PlanQuestion) -> Head | None:
        """Returns the head of the options, else the head of the costs or the plan. Raises `InputError` if they contradict each other."""
        in_plan, measured = _known(question), _measured(question)
        placement = next(iter(question.placements.values()))
        if measured is not None:
            if flags := given_flags("head", "head_held", "collective"):
                sentence = "the costs contain the head, so {argument} cannot be given"
                raise InputError(sentence, argument=" and ".join(flags), remedy="leave it out" if len(flags) == 1 else "leave them out")
            slowdown = self.head_slowdown if in_plan is None or given_flags("head_slowdown") else in_plan.slowdown
            return Head.from_parts(measured, placement, slowdown)
        if in_plan is None:
            self.require_times()
        elif isinstance(question.work, Costs):
            raise InputError(
                "the plan was made from costs with a head, and contains it whole", remedy="give the costs that it was made from"
            )
        if self.head is None:
            return in_plan
        saved = question.work.held_after_f if isinstance(question.work, Workload) else microbatch_bytes(placement, question.work)
        return Head(self.head, self.head_held * saved[-1], self.collective, self.head_slowdown)

    def require_times(self) -> None:
        """Raises if options of a head are given without its times."""
        if self.head is None and (flags := given_flags("head_held", "head_slowdown", "collective")):
            raise InputError("{argument} needs {needed}", argument=flags[0], needed="--head, or --costs of its parts", remedy="")


def has_head(question: PlanQuestion) -> bool:
    """Whether the costs or the plan have a head."""
    return _measured(question) is not None or _known(question) is not None


def _known(question: PlanQuestion) -> Head | None:
    return None if question.problem is None else question.problem.head


def _measured(question: PlanQuestion) -> Costs | None:
    """The costs, if they have the parts of a head."""
    return question.work if isinstance(question.work, Costs) and has_parts(question.work) else None


head_options = option_group(HeadOptions, "head", HEAD)
vocabulary_option = click.option(
    "--vocabulary",
    type=click.Choice(["1", "2"]),
    help="Divide the head over all ranks by vocabulary, with algorithm 1 (passes SL and TX) or 2 (S and T).",
)


def with_head_divided(named: NamedSchedule, algorithm: str | None) -> NamedSchedule:
    """Divides the head of the schedule by `algorithm`, if given; raises as `with_vocabulary` does."""
    return named if algorithm is None else replace(named, schedule=with_vocabulary(named.schedule, int(algorithm)))
