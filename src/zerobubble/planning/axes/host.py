"""Offload as an axis: orders of passes that need more memory than there is, with activations moved to the host.

Which orders suit offload is unknown before their offloads are chosen. So candidates have more memory than there is, and their orders get
the minimal offloads that they need. The quickest ones get a search over offloads. The bound for unlimited memory holds for any offloads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from zerobubble.bounds import Bound
from zerobubble.costs import MAX_LIMIT, Limits
from zerobubble.errors import InputError
from zerobubble.offload import HostLink, plan_offloads
from zerobubble.offload.choice import EVALUATIONS, ROUNDS
from zerobubble.planning.answer import Plan, Saving
from zerobubble.planning.attempt import PlanProgress, ProgressCallback
from zerobubble.planning.axes.axis import ChoicesOfAxis, Contest
from zerobubble.planning.candidate import UNBOUNDED, Candidate, Lift
from zerobubble.planning.problem.from_work import ample_limits
from zerobubble.planning.problem.problem import Objective, Problem
from zerobubble.planning.rounds import CtrlC
from zerobubble.simulation import metrics
from zerobubble.units import counted, ms, show_ms, show_percent

NAME, GIVEN = "host", "the given memory"

MEMORY_FACTORS = (1.5, 2.0, None)
"""Larger memories for which orders are planned, as multiples of the limits; None is unlimited."""

SHORT_LIST = 3
"""Orders that get a search over offloads: this many of the quickest with minimal offloads, and of the quickest without limits."""

PASSES_PLAYED, PASSES_A_SECOND = 1_200_000, 300_000
"""Passes that a search over the offloads of one order may play, and how many it plays in a second. Ranks refine their choice if the first
suffices."""

CANDIDATES = 56
"""Upper bound on the choices of a rank that refines its offloads."""

MOST_PASSES = 20_000
"""Offloads are planned for at most this many passes, because each activation that waits on a rank is compared with each of its steps."""


@dataclass(frozen=True)
class HostChoices(ChoicesOfAxis):
    """The given memory without offload, and larger ones for orders that offload over the `link`."""

    link: HostLink
    finish_share = 0.15

    def choices(self, candidate: Candidate) -> Iterator[Candidate]:
        problem, target = candidate.problem, candidate.target
        if problem.num_passes > MOST_PASSES:
            raise InputError(
                "offload is planned for up to {expected:,} passes, but {placement} has {got:,}",
                argument="num_microbatches",
                got=problem.num_passes,
                expected=MOST_PASSES,
                placement=candidate.name,
                remedy="plan fewer microbatches, or placements with fewer stages",
            )
        yield candidate.choose(NAME, GIVEN, problem)
        hosted = replace(target, host=self.link)
        ample = ample_limits(problem.placement, problem.costs, problem.num_microbatches)
        for factor in MEMORY_FACTORS:
            more = ample if factor is None else Limits(tuple(min(MAX_LIMIT, round(factor * limit)) for limit in problem.limits.memory))
            lift = Lift(lambda plan, _: self._offloaded(plan, problem.limits, 0, 0), lifts_published=factor is None)
            yield candidate.choose(NAME, f"{factor} times", replace(problem, limits=more), hosted, lift)

    def _offloaded(self, plan: Plan, limits: Limits, evaluations: int, rounds: int) -> Iterator[Plan]:
        """The plan within these limits, with offloads where it needs them; none if it does not fit with everything that waits offloaded."""
        problem = replace(plan.problem, limits=limits, host=self.link)
        with suppress(InputError):
            by_span = problem.objective is Objective.PERIOD
            offloads = plan_offloads(plan.schedule, problem.costs, limits, self.link, evaluations, rounds, by_span=by_span)
            yield Plan.from_schedule(problem, UNBOUNDED, plan.schedule, plan.seconds, plan.how, offloads)

    def finish(self, found: Plan, contest: Contest) -> Plan:
        answers = [replace(plan, problem=replace(plan.problem, host=self.link)) for plan in contest.answers]
        if not answers:
            remedy = f"give more memory; without offload {found.reason}"
            raise InputError("no schedule fits, even if every waiting activation is offloaded", remedy=remedy)
        best = min(answers, key=_price)
        if contest.is_searched and not contest.is_cut_short and best.time != contest.least_bound(best).time:
            with CtrlC():
                for better in self._searched([plan for plan in answers if plan.offloads], best, contest):
                    best = min(best, better, key=_price)
                    self.show([replace(best, bound=contest.least_bound(best))], contest.progress)
        best = contest.bounded(best)
        without = min((plan.time or 0 for plan in answers if not plan.offloads), default=None)
        return found.with_winner(
            replace(best, seconds=found.seconds), OffloadSavings(best, without, contest.least_bound(best)), *found.savings
        )

    def show(self, plans: Sequence[Plan], progress: ProgressCallback | None) -> None:
        if progress is not None:
            best = min(plans, key=_price)
            how = counted(sum(len(rank.offloads) for rank in best.offloads), "offload")
            progress(PlanProgress.for_problem(best.placement.name, best.problem, best.time or 0, best.bound.time, how))

    def _searched(self, answers: list[Plan], best: Plan, contest: Contest) -> Iterator[Plan]:
        """Plans after a search over their offloads: the quickest, and the quickest without limits, which minimal offloads often slow."""
        fastest = {id(plan): _without_limits(plan) for plan in answers}
        quickest, free = sorted(answers, key=_price)[:SHORT_LIST], sorted(answers, key=lambda plan: fastest[id(plan)])[:SHORT_LIST]
        end = contest.budget.end(contest.started)
        for early in [*quickest, *(plan for plan in free if not any(plan is other for other in quickest))]:
            if fastest[id(early)] < min(early.time or 0, best.time or 0) and perf_counter() < end:
                for plan in self._offloaded(early, early.problem.limits, *_effort(early.problem, contest, end - perf_counter())):
                    best = min(best, plan, key=_price)
                    yield plan


def _price(plan: Plan) -> tuple[int, int]:
    """The objective in ns and the bytes moved."""
    return plan.time or 0, sum(rank.bytes for rank in plan.offloads)


def _without_limits(plan: Plan) -> int:
    """The objective in ns with unlimited memory."""
    return plan.problem.objective.time_of(plan.schedule, plan.costs, metrics(plan.schedule, plan.costs))


def _effort(problem: Problem, contest: Contest, seconds: float) -> tuple[int, int]:
    """Changes of offloads to try for an order, and rounds in which ranks refine their choice, within `PASSES_PLAYED` and the seconds."""
    most = int(min(PASSES_PLAYED, seconds * PASSES_A_SECOND))
    changes = min(EVALUATIONS, most // problem.num_passes)
    refines = CANDIDATES * problem.placement.num_ranks * ROUNDS * problem.num_passes <= most
    counted_changes = contest.budget.evaluations
    return changes if counted_changes is None else min(changes, counted_changes), ROUNDS if refines else 0


@dataclass(frozen=True, repr=False)
class OffloadSavings(Saving):
    """What offload saved: `without` is the least objective in ns found without it, None if nothing fits.

    `found` is the quickest schedule with its offloads. `bound` is a lower bound for any offloads on all placements tried.
    """

    axis = "offload"

    found: Plan
    without: int | None
    bound: Bound

    @property
    def gain(self) -> float | None:
        """Share of the time without offload that it saves; None if nothing fits without."""
        time = self.found.time or 0
        return None if self.without is None else 1 - time / self.without if self.without else 0.0

    def _summary(self) -> str:
        bound = f"No schedule with any offloads takes less than {show_ms(self.bound.time)}: {self.bound.reason}"
        takes, moved = show_ms(self.found.time or 0), sum(len(rank.offloads) for rank in self.found.offloads)
        plan = f"{self.found.how} on {self.found.placement.name}"
        if not moved:
            return f"Offload saves no time: {plan} takes {takes} with everything on the device. {bound}"
        without = (
            "nothing fits without it"
            if self.without is None
            else f"without it the {self.found.problem.objective} is {show_ms(self.without)}"
        )
        gain = "" if self.gain is None else f", {show_percent(self.gain)} less"
        return f"Savings of offload: {without}, with it {takes}{gain} ({plan}, {counted(moved, 'offload')}). {bound}"

    def __str__(self) -> str:
        return f"{self._summary()}."

    def table(self, found: Plan) -> str:
        """The choices without offload."""
        return f"Without offload:\n\n{found.comparison}"

    def to_dict(self) -> dict[str, Any]:
        """The figures in JSON, times in ms, and the order as text."""
        return {
            "placement": self.found.placement.name,
            "how": self.found.how,
            "makespan_ms": ms(self.found.makespan or 0),
            "time_ms": ms(self.found.time or 0),
            "without_ms": None if self.without is None else ms(self.without),
            "gain": self.gain,
            "lower_bound_ms": ms(self.bound.time),
            "lower_bound_reason": self.bound.reason,
            "schedule": self.found.schedule.to_text(),
        }
