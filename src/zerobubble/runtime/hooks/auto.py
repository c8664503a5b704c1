"""`schedule=zb.Auto(...)`: the first steps are measured, a plan is made beside the training, and all ranks change to it between two steps.

It trains from the first step on: microbatches go through one by one, which needs the least memory and measures passes undisturbed, then in
the best published schedule until the plan is there. Later steps are held against the plan's costs, and where passes have come to
take another time, or messages a longer one, there is a new plan. What messages on a bad link take differs from one to the next, which no
plan knows: so a plan for one has to be faster than the published schedules without W in steps that are measured.

A plan is advice. Where none can be made, for whatever reason, a warning says why and training goes on in the schedule there is.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from zerobubble.arguments import WHOLE, each, either, instance, optional, require
from zerobubble.costs import Costs, Limits
from zerobubble.errors import InputError, ScheduleError
from zerobubble.fit import fit_costs, late_messages
from zerobubble.ir import Placement, Schedule
from zerobubble.planning import Objective, Plan, Problem, seeds, solve
from zerobubble.planning.background import BackgroundPlanner, PlannerError
from zerobubble.planning.placements import family
from zerobubble.runtime.hooks.race import Race
from zerobubble.runtime.measure.profile import costs_of, one_by_one
from zerobubble.runtime.step.forecast import MemoryForecasts
from zerobubble.runtime.step.hook import AttachedPipeline, StepHook, TrainingStep
from zerobubble.timeline import Timeline

TIMED = 2
"""Steps that are timed, after one in which bytes are counted."""
SECONDS = 5.0
"""How long a plan is searched for."""
REVIEW = 50
"""Steps between two looks at whether the plan's costs still hold."""
DRIFT = 0.2
"""By how much of itself the time of a stage's passes must be off in two steps running before it is planned anew."""
LATE = 0.2
"""The share of a link's messages that a plan lets come later than it allows for."""
MOST_FAILURES = 3
"""Searches that may fail before no more are started."""

_log = logging.getLogger("zerobubble")


@dataclass(frozen=True)
class Auto:
    """What `Pipeline(schedule=zb.Auto(...))` plans for; the string "auto" stands for `zb.Auto()`.

    `placement` says which rank holds which stage: a name that `zerobubble plan --placement` knows, such as "linear", "vee" or "looped-2",
    or a `Placement` of one route. `memory_limit` bounds the bytes that a rank holds of activations and, in shared memory, for messages:
    one number for all ranks or one for each; None leaves them free. The first steps train with microbatches one by one and are measured;
    then the shortest schedule within the limit is planned beside the training and changed to between two steps, and planned anew when
    passes come to take another time.
    """

    placement: str | Placement = "linear"
    memory_limit: int | Sequence[int] | None = None


class AutoPlanner(StepHook):
    """Chooses the schedule of each step; every rank asks alike, after every step, and gets the same answer.

    `schedule` is the one to run, `solved` the plan it comes from once there is one. Raises `InputError` where the planner's search is not
    installed, for a placement that does not fit or has several routes, and for another number of limits than ranks.
    """

    def __init__(self, options: Auto, num_ranks: int, num_microbatches: int) -> None:
        if find_spec("llvmlite") is None:
            raise InputError("schedule='auto' searches for plans with llvmlite: pip install 'zerobubble[plan]', or name a schedule")
        placement = _placement_for(options.placement, num_ranks)
        self.schedule = replace(one_by_one(seeds.serial_schedule(placement, num_microbatches)), name="one by one")
        self.solved: Plan | None = None
        self._limits = _limits_for(options.memory_limit, num_ranks)
        self._measured: list[Timeline] = []
        self._problem: Problem | None = None
        self._planner: BackgroundPlanner | None = None
        self._failures = 0
        self._is_waiting = False
        self._steps = 0
        self._drifted = False
        self._has_bad_links = False
        self._race: Race | None = None
        self._pipeline: AttachedPipeline

    @property
    def limits_in_words(self) -> str:
        """What bounds the memory of its plans; all ranks must have it alike."""
        return "no memory limit" if self._limits is None else f"a memory limit of {', '.join(map(str, self._limits.memory))} bytes"

    def on_attach(self, pipeline: AttachedPipeline) -> None:
        """Plan for this pipeline."""
        self._pipeline = pipeline

    def on_step_begin(self, step: TrainingStep) -> None:
        """Have the bytes held counted in the first step."""
        step.measures_memory |= self._problem is None and not self._measured

    def on_step_end(self, step: TrainingStep) -> None:
        """Change to a better schedule where there is one.

        Raises `InputError` when no schedule fits into the memory, naming what is missing.
        """
        with self._pipeline.activity("while choosing a schedule"):
            better = self._after_step()
            if better is not None:
                assert self.solved is not None
                self._pipeline.change_schedule(better, self.solved.problem.costs)

    def on_close(self) -> None:
        """End a plan in the making."""
        if self._planner is not None:
            self._planner.close()
            self._planner = None

    def state_dict(self) -> dict[str, Any]:
        """The plan that is followed, so that a run that goes on need not measure and plan again."""
        return {} if self.solved is None else {"plan": self.solved.to_dict()}

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raise `InputError` if the plan of `state_dict` is for another placement or number of microbatches."""
        self._saved_plan(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Follow the plan of `state_dict`. Raises `InputError` as `check_state_dict`."""
        solved = self._saved_plan(state)
        self.on_close()
        self._problem = solved.problem
        self._is_waiting = False
        self._race = None
        better = self._change(solved)
        if better is not None:
            self._pipeline.change_schedule(better, solved.problem.costs)

    def _saved_plan(self, state: dict[str, Any]) -> Plan:
        solved = Plan.from_dict(state["plan"])
        wanted = (self.schedule.placement, self.schedule.num_microbatches)
        if (solved.problem.placement, solved.problem.num_microbatches) != wanted:
            raise InputError(
                f"the saved plan is for {solved.problem.placement} and {solved.problem.num_microbatches} microbatches, this pipeline has "
                f"{wanted[0]} and {wanted[1]}: make the pipeline as it was, or leave the plan out of the checkpoint"
            )
        return solved

    def _after_step(self) -> Schedule | None:
        """The schedule to change to before the next step, None to stay."""
        if self._problem is None:
            return self._measure(self._pipeline.timeline())
        if self._is_waiting:
            return self._wait()
        if self._race is not None:
            return self._race_on(self._race)
        self._steps += 1
        if self._steps < REVIEW:
            return None
        return self._review(self._pipeline.timeline())

    def _measure(self, timeline: Timeline) -> Schedule | None:
        self._measured.append(timeline)
        if len(self._measured) <= TIMED:
            return None
        placement = self.schedule.placement
        costs = costs_of(placement, self._measured[0], self._measured[1:])
        limits = Limits((_plenty(costs, self.schedule.num_microbatches),) * placement.num_ranks)
        self._problem = Problem(placement, self.schedule.num_microbatches, costs, limits, self._objective)
        if self._limits is not None:
            told = self._pipeline.memory_forecast_of(self.schedule, costs)
            self._problem = self._problem_beside(told)
            if self._problem.shortage_reason:
                taken = ", ".join(str(rank.messages) for rank in told)
                limit = f"the memory limit, of which messages take {taken} bytes on the ranks in turn"
                raise InputError(f"no schedule fits into {limit}: {self._problem.shortage_reason}")
        self._measured.clear()
        self._is_waiting = True
        published = self._published_that_fits()
        return None if published is None else self._change(published)

    @property
    def _objective(self) -> Objective:
        """The time per step as this run pays it."""
        return Objective.MAKESPAN if self._pipeline.ranks_meet else Objective.PERIOD

    def _problem_beside(self, forecasts: MemoryForecasts) -> Problem:
        """The problem with what the messages of these forecasts leave of the memory limit."""
        assert self._problem is not None
        assert self._limits is not None
        rooms = [max(1, limit - told.messages) for limit, told in zip(self._limits.memory, forecasts, strict=True)]
        return replace(self._problem, limits=Limits(tuple(rooms)))

    def _fits(self, solved: Plan) -> bool:
        """Whether a schedule and its messages together fit into the memory limit; where not, plans from here on leave these more room."""
        if self._limits is None:
            return True
        told = self._pipeline.memory_forecast_of(solved.schedule, solved.problem.costs)
        _log.info("%s: %s", solved.schedule.name, "; ".join(map(str, told)))
        if all(rank.total <= limit for rank, limit in zip(told, self._limits.memory, strict=True)):
            return True
        tighter = self._problem_beside(told)
        if not tighter.shortage_reason:
            self._problem = tighter
        return False

    def _published_that_fits(self) -> Plan | None:
        """The best published schedule within the memory limit, its messages included; None where two looks find none."""
        for _ in range(2):
            published = self._best_published()
            if published is None or self._fits(published):
                return published
        return None

    def _best_published(self) -> Plan | None:
        """The best published schedule, as the first rank found it that could, None where none could.

        Every rank looks for it, so that none waits for another's search.
        """
        assert self._problem is not None
        found = None
        try:
            found = solve(self._problem, evaluations=0)
        except Exception as error:  # noqa: BLE001 - a plan is advice
            _log.warning(
                "the published schedules could not be compared on rank %d: %s: %s", self._pipeline.rank, type(error).__name__, error
            )
        able = self._pipeline.gather(found is not None, "choosing a published schedule")
        if not any(able):
            return None
        teller = able.index(True)
        mine = found.to_dict() if found is not None and self._pipeline.rank == teller else None
        return Plan.from_dict(self._pipeline.gather(mine, "choosing a published schedule")[teller])

    def _wait(self) -> Schedule | None:
        """Ask for the plan, on rank 0, which makes it; the others hear of it, or that there will be none."""
        is_over, plan = self._pipeline.gather(self._search() if self._pipeline.rank == 0 else None, "waiting for a plan")[0]
        if not is_over:
            return None
        self.on_close()
        self._is_waiting, self._steps = False, 0
        solved = None if plan is None else Plan.from_dict(plan)
        if solved is None or not self._fits(solved):
            return None
        if not self._has_bad_links:
            return self._change(solved)
        self._race = Race([solved, *self._rivals(solved)])
        return self._change(self._race.next)

    def _race_on(self, race: Race) -> Schedule | None:
        """After a step of a race: what runs next in it, or what has won."""
        race.took(self._pipeline.timeline().makespan)
        if race.is_over:
            self._race, self._has_bad_links = None, False
            _log.info("with messages that come late, %s", race)
        return self._change(race.next)

    def _rivals(self, plan: Plan) -> list[Plan]:
        """What a plan for bad links has to be faster than: the schedule at hand, and the published ones that fit and have no W."""
        problem, found = plan.problem, {plan.schedule.rows: plan}
        published = (schedule for schedule in seeds.published(problem.placement, problem.num_microbatches) if not schedule.split_stages)
        for schedule, how in ((self.schedule, "as before"), *((schedule, "published") for schedule in published)):
            if schedule.rows not in found:
                try:
                    found[schedule.rows] = Plan.of(problem, plan.bound, schedule, 0.0, how)
                except ScheduleError:
                    continue  # it holds more than the limits allow
        return [solved for solved in found.values() if solved is not plan and self._fits(solved)]

    def _search(self) -> tuple[bool, dict[str, Any] | None]:
        """Whether the search is over, and the plan in its JSON form, None where there is none."""
        assert self._problem is not None
        if self._failures >= MOST_FAILURES:
            return True, None
        try:
            if self._planner is None:
                self._planner = BackgroundPlanner(self._problem, SECONDS)
            found = self._planner.answer()
        except PlannerError as error:
            self._failures += 1
            again = "no more are started" if self._failures >= MOST_FAILURES else "the next may be started when passes take another time"
            _log.warning("a search for a plan failed, and training goes on in %r; %s: %s", self.schedule.name, again, error)
            return True, None
        return found is not None, None if found is None else found.to_dict()

    def _review(self, timeline: Timeline) -> Schedule | None:
        """Hold a step against the plan's costs; the second in a row that is off starts a new plan, and so it does where there is none."""
        assert self._problem is not None
        now = corrected(self._problem.costs, timeline)
        off, late = how_far(self._problem.costs, now), how_late(self._problem.costs, now)
        if max(off, late) <= DRIFT and self.solved is not None:
            self._steps, self._drifted = 0, False
            return None
        if not self._drifted:
            self._drifted = True
            return None
        if off > DRIFT:
            _log.info("passes take up to %.0f %% more or less than planned: planning anew", 100 * off)
        if late > DRIFT:
            _log.info("messages come later than planned, by up to %.0f %% of the passes of a microbatch: planning anew", 100 * late)
            self._has_bad_links = True
        self._problem = replace(self._problem, costs=now, objective=self._objective)
        self._is_waiting, self._drifted = True, False
        return self._wait()

    def _change(self, solved: Plan) -> Schedule | None:
        """Take over a plan unless the schedule at hand is as short."""
        self.solved = solved
        if solved.schedule.rows == self.schedule.rows:
            return None
        self.schedule = solved.schedule
        _log.info("%s: a bubble of %.2f %%, at least %.2f %%", solved.schedule.name, 100 * (solved.bubble or 0), 100 * solved.least_bubble)
        return self.schedule


def _placement_for(placement: str | Placement, num_ranks: int) -> Placement:
    require("placement of Auto", placement, instance(str, Placement))
    laid = family(placement, num_ranks) if isinstance(placement, str) else placement
    if laid.num_ranks != num_ranks:
        raise InputError(f"placement {laid.name!r} is for {laid.num_ranks} ranks, the pipeline has {num_ranks}")
    if len(laid.routes) > 1:
        raise InputError(f"plans are made for one route, the placement {laid.name!r} has {len(laid.routes)}: give its schedule by name")
    return laid


def _limits_for(memory: int | Sequence[int] | None, num_ranks: int) -> Limits | None:
    require("memory_limit of Auto", memory, optional(either(WHOLE, each(WHOLE))))
    if memory is None:
        return None
    of_ranks = (memory,) * num_ranks if isinstance(memory, int) else tuple(memory)
    if len(of_ranks) != num_ranks:
        raise InputError(f"memory_limit names the bytes of each of {num_ranks} ranks, or one number for all, got {len(of_ranks)}")
    return Limits(of_ranks)


def corrected(planned: Costs, timeline: Timeline) -> Costs:
    """`planned` with the times of passes measured in `timeline`, and those of messages that came late.

    B and W of a stage that ran them in one are scaled alike. What is not known of a link, because nobody waited for it, is as planned.
    """
    found = fit_costs(replace(timeline, memory=()))
    backward, weight = list(found.backward), list(found.weight)
    for stage, alone in enumerate(found.weight):
        whole = planned.backward[stage] + planned.weight[stage]
        if not alone and whole:
            weight[stage] = found.backward[stage] * planned.weight[stage] // whole
            backward[stage] = found.backward[stage] - weight[stage]
    late = late_messages(timeline, LATE)
    comm = tuple(was if now is None else max(was, now) for was, now in zip(planned.comm, late, strict=True))
    return replace(planned, forward=found.forward, backward=tuple(backward), weight=tuple(weight), comm=comm)


def how_far(planned: Costs, found: Costs) -> float:
    """The most by which F, or B and W together, of any stage are off, as a share of what was planned."""
    pairs = [*zip(planned.forward, found.forward, strict=True), *zip(_back(planned), _back(found), strict=True)]
    return max((abs(now - was) / was for was, now in pairs if was), default=0.0)


def how_late(planned: Costs, found: Costs) -> float:
    """The most by which messages of a link take longer than planned, as a share of the mean time of a stage's F, B and W."""
    work = sum(found.forward) + sum(_back(found))
    later = (now - was for was, now in zip(planned.comm, found.comm, strict=True))
    return max(later, default=0) * found.num_stages / work if work else 0.0


def _back(costs: Costs) -> list[int]:
    return [backward + weight for backward, weight in zip(costs.backward, costs.weight, strict=True)]


def _plenty(costs: Costs, num_microbatches: int) -> int:
    """Bytes in which every microbatch fits at once."""
    return max(1, num_microbatches * (sum(costs.held_after_f) + sum(costs.held_after_b)))
