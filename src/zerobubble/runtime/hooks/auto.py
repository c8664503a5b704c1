"""Automatic replanning, `schedule=zb.Auto(...)`: measures the first steps, plans in the background, and switches between two steps.

Training makes progress from the first step on:

1. Microbatches run one by one, which needs the least memory and measures passes undisturbed.
2. The best published schedule runs while rank 0 searches for a plan in the background.
3. The plan runs. Every `REVIEW` steps, a step is compared with the plan's costs, and drift starts a new search.

The latency of a bad link varies from message to message, which no plan models. So a plan for a bad link must be faster, in measured steps,
than the published schedules without W.

All ranks switch at the same step, or their messages would not match. So every decision here uses only gathered values.

Planning is optional. If it fails for any reason, a warning says why, and training continues with the current schedule.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from statistics import median_low
from typing import Any

from zerobubble.arguments import BYTES, Wanted, each, either, instance, optional, require, takes
from zerobubble.costs import Costs, Limits
from zerobubble.errors import InputError, ScheduleError
from zerobubble.fit import fit_costs, late_messages
from zerobubble.ir import Placement, Schedule
from zerobubble.planning import Objective, Plan, Problem, seeds, solve
from zerobubble.planning.background import BackgroundPlanner, PlannerError
from zerobubble.planning.placements import family
from zerobubble.runtime.measure.profile import costs_of, one_by_one
from zerobubble.runtime.step.hook import AttachedPipeline, StepHook, TrainingStep
from zerobubble.runtime.step.memory_forecast import MemoryForecasts
from zerobubble.timeline import Timeline
from zerobubble.units import show_ms

TIMED = 2
"""The number of timed steps, after one in which bytes are counted."""
SECONDS = 5.0
"""The duration of a search for a plan."""
REVIEW = 50
"""The number of steps between two checks of the plan's costs."""
DRIFT = 0.2
"""Relative drift in stage times, over two consecutive steps, that triggers replanning."""
LATE = 0.2
"""The share of a link's messages that may arrive later than the plan assumes."""
MOST_FAILURES = 3
"""The number of failed searches after which no more start."""

_log = logging.getLogger("zerobubble")


_MEMORY = Wanted(
    "None, or bytes such as 40_000_000_000 or '40GB' for all ranks, or a list of those of each rank",
    optional(either(BYTES, each(BYTES))).accepts,
)


@takes()
@dataclass(frozen=True)
class Auto:
    """What `Pipeline(schedule=zb.Auto(...))` plans for; the string "auto" stands for `zb.Auto()`.

    `placement` says which rank holds which stage: a name that `zerobubble plan --placement` knows, such as "linear", "vee" or "looped-2",
    or a `Placement` of one route. `memory` limits what a rank holds of activations and, in shared memory, for messages: bytes, or text such
    as "40GB", for all ranks or for each; None is no limit. The first steps train with microbatches one by one and are measured; then the
    shortest schedule within the limit is planned during training and adopted between two steps, and replanned when the times of passes
    drift.
    """

    placement: str | Placement = "linear"
    memory: int | str | Sequence[int | str] | None = None

    def __post_init__(self) -> None:
        require("placement of Auto", self.placement, instance(str, Placement))
        require("memory of Auto", self.memory, _MEMORY)


class AutoPlanner(StepHook):
    """Chooses the schedule of each step. Every rank runs it after every step and gets the same answer.

    `schedule` is the current schedule, `plan` its plan once there is one. Raises `InputError` if the planner's search is not installed,
    for a placement that does not fit or has several routes, and if the number of limits differs from the number of ranks.
    """

    def __init__(self, options: Auto, num_ranks: int, num_microbatches: int) -> None:
        if find_spec("llvmlite") is None:
            raise InputError(
                "schedule='auto' searches for plans with llvmlite", remedy="pip install 'zerobubble[plan]', or name a schedule"
            )
        placement = _placement_for(options.placement, num_ranks)
        self.schedule = replace(one_by_one(seeds.serial_schedule(placement, num_microbatches)), name="one by one")
        self.plan: Plan | None = None
        self._limits = _limits_for(options.memory, num_ranks)
        self._measured: list[Timeline] = []
        self._problem: Problem | None = None
        self._planner: BackgroundPlanner | None = None
        self._failures = 0
        self._is_waiting = False
        self._steps = 0
        self._drifted = False
        self._has_bad_links = False
        self._choice: MeasuredChoice | None = None
        self._pipeline: AttachedPipeline

    @property
    def limits_in_words(self) -> str:
        """A description of the memory limit of its plans; all ranks must have the same limit."""
        return "no memory limit" if self._limits is None else f"a memory limit of {', '.join(map(str, self._limits.memory))} bytes"

    def on_attach(self, pipeline: AttachedPipeline) -> None:
        """Keeps the pipeline to plan for."""
        self._pipeline = pipeline

    def on_step_begin(self, step: TrainingStep) -> None:
        """Counts the held bytes in the first step."""
        step.measures_memory |= self._problem is None and not self._measured

    def on_step_end(self, step: TrainingStep) -> None:
        """Switches to a better schedule if there is one.

        Raises `InputError` with the shortage if no schedule fits into the memory limit.
        """
        with self._pipeline.activity("while choosing a schedule"):
            better = self._after_step()
            if better is not None:
                assert self.plan is not None
                self._pipeline.change_schedule(better, self.plan.problem.costs)

    def on_close(self) -> None:
        """Ends a running search."""
        if self._planner is not None:
            self._planner.close()
            self._planner = None

    def state_dict(self) -> dict[str, Any]:
        """Returns the current plan, so that a resumed run need not measure and plan again."""
        return {} if self.plan is None else {"plan": self.plan.to_dict()}

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raises `InputError` if the plan of `state_dict` is for another placement or number of microbatches."""
        self._saved_plan(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Switches to the plan of `state_dict`. Raises `InputError` like `check_state_dict`."""
        plan = self._saved_plan(state)
        self.on_close()
        self._problem = plan.problem
        self._is_waiting = False
        self._choice = None
        better = self._change(plan)
        if better is not None:
            self._pipeline.change_schedule(better, plan.problem.costs)

    def _saved_plan(self, state: dict[str, Any]) -> Plan:
        plan = Plan.from_dict(state["plan"])
        wanted = (self.schedule.placement, self.schedule.num_microbatches)
        if (plan.problem.placement, plan.problem.num_microbatches) != wanted:
            raise InputError(
                (
                    "the saved plan is for {planned_placement} and {planned_microbatches} microbatches, this pipeline has "
                    "{placement_here} and {microbatches_here}"
                ),
                planned_placement=str(plan.problem.placement),
                planned_microbatches=plan.problem.num_microbatches,
                placement_here=str(wanted[0]),
                microbatches_here=wanted[1],
                remedy="make the pipeline as it was, or leave the plan out of the checkpoint",
            )
        return plan

    def _after_step(self) -> Schedule | None:
        """Returns the schedule to switch to before the next step, None to stay."""
        if self._problem is None:
            return self._measure(self._pipeline.timeline())
        if self._is_waiting:
            return self._wait()
        if self._choice is not None:
            return self._continue_choice(self._choice)
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
            forecasts = self._pipeline.memory_forecast_of(self.schedule, costs)
            self._problem = self._problem_after_messages(forecasts)
            if self._problem.shortage_reason:
                taken = ", ".join(str(rank.messages) for rank in forecasts)
                limit = f"the memory limit, of which messages take {taken} bytes on the ranks in turn"
                raise InputError("no schedule fits into {limit}: {reason}", limit=limit, reason=str(self._problem.shortage_reason))
        self._measured.clear()
        self._is_waiting = True
        published = self._published_that_fits()
        return None if published is None else self._change(published)

    @property
    def _objective(self) -> Objective:
        """The objective of this run: the makespan if all ranks meet after each step, else the period."""
        return Objective.MAKESPAN if self._pipeline.ranks_meet else Objective.PERIOD

    def _problem_after_messages(self, forecasts: MemoryForecasts) -> Problem:
        """Returns the problem with the memory limit reduced by the messages of these forecasts."""
        assert self._problem is not None
        assert self._limits is not None
        rests = [max(1, limit - rank.messages) for limit, rank in zip(self._limits.memory, forecasts, strict=True)]
        return replace(self._problem, limits=Limits(tuple(rests)))

    def _fits(self, plan: Plan) -> bool:
        """Returns whether a schedule and its messages fit into the memory limit. If not, later plans leave more memory for messages."""
        if self._limits is None:
            return True
        forecasts = self._pipeline.memory_forecast_of(plan.schedule, plan.problem.costs)
        _log.info("%s: %s", plan.schedule.name, "; ".join(map(str, forecasts)))
        if all(rank.total <= limit for rank, limit in zip(forecasts, self._limits.memory, strict=True)):
            return True
        tighter = self._problem_after_messages(forecasts)
        if not tighter.shortage_reason:
            self._problem = tighter
        return False

    def _published_that_fits(self) -> Plan | None:
        """Returns the best published schedule within the memory limit, messages included; None if two attempts find none."""
        for _ in range(2):
            published = self._best_published()
            if published is None or self._fits(published):
                return published
        return None

    def _best_published(self) -> Plan | None:
        """Returns the best published schedule, found by the first rank that succeeds; None if no rank does.

        Every rank searches, so that none waits for another's search. Only one rank's result counts, since all must play the same.
        """
        assert self._problem is not None
        found = None
        try:
            found = solve(self._problem, evaluations=0)
        except Exception as error:  # noqa: BLE001 - a plan is advice
            _log.warning(
                "the published schedules could not be compared on rank %d: %s: %s", self._pipeline.rank, type(error).__name__, error
            )
        has_found = self._pipeline.gather(found is not None, "choosing a published schedule")
        if not any(has_found):
            return None
        source = has_found.index(True)
        mine = found.to_dict() if found is not None and self._pipeline.rank == source else None
        return Plan.from_dict(self._pipeline.gather(mine, "choosing a published schedule")[source])

    def _wait(self) -> Schedule | None:
        """Polls the search on rank 0, and shares its plan with all ranks, or that there is none."""
        is_over, found = self._pipeline.gather(self._search() if self._pipeline.rank == 0 else None, "waiting for a plan")[0]
        if not is_over:
            return None
        self.on_close()
        self._is_waiting, self._steps = False, 0
        plan = None if found is None else Plan.from_dict(found)
        if plan is None or not self._fits(plan):
            return None
        if not self._has_bad_links:
            return self._change(plan)
        self._choice = MeasuredChoice([plan, *self._candidates(plan)])
        return self._change(self._choice.next)

    def _continue_choice(self, choice: MeasuredChoice) -> Schedule | None:
        """Adds a step of a measured choice; returns the schedule of the next one, or the fastest."""
        choice.add(self._pipeline.timeline().makespan)
        if choice.is_over:
            self._choice, self._has_bad_links = None, False
            _log.info("with late messages, %s", choice)
        return self._change(choice.next)

    def _candidates(self, plan: Plan) -> list[Plan]:
        """Returns the candidates besides a plan for bad links: the current schedule, and the published ones without W that fit."""
        problem, found = plan.problem, {plan.schedule.rows: plan}
        published = (
            schedule for schedule in seeds.published_schedules(problem.placement, problem.num_microbatches) if not schedule.split_stages
        )
        for schedule, how in ((self.schedule, "as before"), *((schedule, "published") for schedule in published)):
            if schedule.rows not in found:
                try:
                    found[schedule.rows] = Plan.from_schedule(problem, plan.bound, schedule, 0.0, how)
                except ScheduleError:
                    continue  # it exceeds the limits
        return [other for other in found.values() if other is not plan and self._fits(other)]

    def _search(self) -> tuple[bool, dict[str, Any] | None]:
        """Returns whether the search is over, and the plan in its JSON form, None if there is none."""
        assert self._problem is not None
        if self._failures >= MOST_FAILURES:
            return True, None
        try:
            if self._planner is None:
                self._planner = BackgroundPlanner(self._problem, SECONDS)
            found = self._planner.answer()
        except PlannerError as error:
            self._failures += 1
            more = "no more searches start" if self._failures >= MOST_FAILURES else "drift in stage times may start the next"
            _log.warning("a search for a plan failed, and training continues with %r; %s: %s", self.schedule.name, more, error)
            return True, None
        return found is not None, None if found is None else found.to_dict()

    def _review(self, timeline: Timeline) -> Schedule | None:
        """Compares a step with the plan's costs. A search starts after two drifting steps in a row, or if there is no plan."""
        assert self._problem is not None
        now = corrected(self._problem.costs, timeline)
        off, late = how_far(self._problem.costs, now), how_late(self._problem.costs, now)
        if max(off, late) <= DRIFT and self.plan is not None:
            self._steps, self._drifted = 0, False
            return None
        if not self._drifted:
            self._drifted = True
            return None
        if off > DRIFT:
            _log.info("stage times differ from the plan by up to %.0f %%: replanning", 100 * off)
        if late > DRIFT:
            _log.info("messages arrive later than planned, by up to %.0f %% of the passes of a microbatch: replanning", 100 * late)
            self._has_bad_links = True
        self._problem = replace(self._problem, costs=now, objective=self._objective)
        self._is_waiting, self._drifted = True, False
        return self._wait()

    def _change(self, plan: Plan) -> Schedule | None:
        """Makes `plan` the current plan; returns its schedule, None if it is the current one."""
        self.plan = plan
        if plan.schedule.rows == self.schedule.rows:
            return None
        self.schedule = plan.schedule
        _log.info("%s: a bubble of %.2f %%, at least %.2f %%", plan.schedule.name, 100 * (plan.bubble or 0), 100 * plan.least_bubble)
        return self.schedule


def _placement_for(placement: str | Placement, num_ranks: int) -> Placement:
    found = family(placement, num_ranks) if isinstance(placement, str) else placement
    if found.num_ranks != num_ranks:
        message = "placement {placement!r} is for {got} ranks, the pipeline has {num_ranks}"
        raise InputError(message, placement=found.name, got=found.num_ranks, num_ranks=num_ranks)
    if len(found.routes) > 1:
        message = "plans are made for one route, the placement {placement!r} has {got}"
        raise InputError(message, placement=found.name, got=len(found.routes), remedy="give its schedule by name")
    return found


def _limits_for(memory: int | str | Sequence[int | str] | None, num_ranks: int) -> Limits | None:
    if memory is None:
        return None
    of_ranks = (memory,) * num_ranks if isinstance(memory, (int, str)) else tuple(memory)
    if len(of_ranks) != num_ranks:
        message = "memory has the bytes of each of {num_ranks} ranks, or one number for all, got {got}"
        raise InputError(message, num_ranks=num_ranks, got=len(of_ranks))
    return Limits(of_ranks)


def corrected(planned: Costs, timeline: Timeline) -> Costs:
    """Returns `planned` with the times of passes measured in `timeline`, and those of late messages.

    B and W of a stage that fused them are scaled alike. A link for which no rank waited keeps its planned time, since it was not measured.
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
    """Returns the largest relative drift of any stage's F, or of its B and W together."""
    pairs = [*zip(planned.forward, found.forward, strict=True), *zip(_back(planned), _back(found), strict=True)]
    return max((abs(now - was) / was for was, now in pairs if was), default=0.0)


def how_late(planned: Costs, found: Costs) -> float:
    """Returns the largest delay of a link's messages over the plan, relative to the mean time of a stage's F, B and W."""
    work = sum(found.forward) + sum(_back(found))
    later = (now - was for was, now in zip(planned.comm, found.comm, strict=True))
    return max(later, default=0) * found.num_stages / work if work else 0.0


def _back(costs: Costs) -> list[int]:
    return [backward + weight for backward, weight in zip(costs.backward, costs.weight, strict=True)]


def _plenty(costs: Costs, num_microbatches: int) -> int:
    """Returns the bytes of all microbatches at once."""
    return max(1, num_microbatches * (sum(costs.held_after_f) + sum(costs.held_after_b)))


STEPS = 5
"""Steps that each candidate runs."""


class MeasuredChoice:
    """Runs steps of the `candidates` in turns. `next` is the plan of the next step, and the fastest one once the choice `is_over`.

    Step times vary with the load of machines and links. So the candidates alternate, to meet the same load, and their medians count.
    """

    def __init__(self, candidates: Sequence[Plan]) -> None:
        self._candidates = candidates
        self._times: list[list[int]] = [[] for _ in candidates]
        self._num_steps = 0

    @property
    def is_over(self) -> bool:
        """Whether all candidates have run their steps."""
        return self._num_steps == STEPS * len(self._candidates)

    @property
    def next(self) -> Plan:
        """The plan of the next step; the fastest candidate once the choice is over."""
        if not self.is_over:
            return self._candidates[self._num_steps % len(self._candidates)]
        medians = self._medians()
        fastest = self._candidates[medians.index(min(medians))]
        return replace(fastest, how=f"{fastest.how}, measured to be the fastest of {len(medians)}")

    def add(self, makespan: int) -> None:
        """Adds the time in ns that the step of `next` took."""
        self._times[self._num_steps % len(self._candidates)].append(makespan)
        self._num_steps += 1

    def _medians(self) -> list[int]:
        return [median_low(times) for times in self._times]

    def __str__(self) -> str:
        pairs = zip(self._candidates, self._medians(), strict=True)
        return ", ".join(f"{plan.schedule.name} took {show_ms(time)}" for plan, time in pairs)
