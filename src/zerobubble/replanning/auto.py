"""Automatic replanning, `schedule=zb.Auto(...)`: measures the first steps, plans in the background, and switches between two steps.

Training makes progress from the first step on:

1. Microbatches run one by one, which needs the least memory and measures passes undisturbed.
2. The best published schedule runs while rank 0 searches for a plan in the background.
3. The plan runs. Every `REVIEW` steps, a step is compared with the plan's costs. Drift that lasts for `WINDOW` steps starts a new search.

A plan replaces the current schedule if it is shorter at the times of most measured steps, by enough to pay for the switch until the next
check. Each check that changes nothing doubles the number of steps to the next one.

The latency of a bad link varies from message to message, which no plan models. So a plan for a bad link must be faster, in measured steps,
than the published schedules without W. They only run if steps take nearly the same time: otherwise steps cannot show which is faster.

All ranks switch at the same step, or their messages would not match. So every decision here uses only gathered values.

Planning is optional. If it fails for any reason, a warning says why, and training continues with the current schedule.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from math import sqrt
from typing import Any

from zerobubble.arguments import BYTES, Wanted, each, either, instance, optional, require, takes
from zerobubble.costs import Costs, Limits
from zerobubble.errors import InputError, ScheduleError
from zerobubble.fit import fit_costs, late_messages
from zerobubble.installing import install
from zerobubble.ir import Placement, Schedule
from zerobubble.planning import Objective, Plan, Problem, seeds, solve
from zerobubble.planning.background import BackgroundPlanner, PlannerError
from zerobubble.planning.placements import family
from zerobubble.replanning.evidence import Sample, gain, how_far, how_late, typical_costs, unsteadiness
from zerobubble.replanning.measured_choice import MeasuredChoice
from zerobubble.replanning.switches import Switches
from zerobubble.runtime.measure.profile import costs_of, one_by_one
from zerobubble.runtime.step.hook import AttachedPipeline, TrainingStep
from zerobubble.runtime.step.memory_forecast import MemoryForecasts
from zerobubble.runtime.step.planner import Replanner, ReplanningHook, Switch
from zerobubble.timeline import Timeline
from zerobubble.units import show_ms

TIMED = 2
"""The number of timed steps, after one in which bytes are counted."""
SECONDS = 5.0
"""The duration of a search for a plan."""
REVIEW = 50
"""The number of steps between two checks of the plan's costs, after a switch."""
MOST_PATIENCE = 16
"""The largest factor of `REVIEW`, reached after checks that changed nothing."""
WINDOW = 8
"""The number of consecutive steps that must show a drift."""
DRIFT = 0.2
"""Relative drift in stage times, shared by most steps of a window, that triggers replanning."""
NOISE = 0.1
"""The unsteadiness of step times up to which measured steps can show which schedule is faster."""
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
class Auto(Replanner):
    """What `Pipeline(schedule=zb.Auto(...))` plans for; the string "auto" stands for `zb.Auto()`.

    The first steps train with microbatches one by one and are measured. Then the shortest schedule within the limit is planned during
    training and adopted between two steps, and replanned when the times of passes drift.

    Attributes:
        placement: Which rank holds which stage: a name that `zerobubble plan --placement` knows, such as "linear", "vee" or "looped-2", or
            a `Placement` of one route.
        memory: The most that a rank holds of activations and, in shared memory, for messages: bytes, or text such as "40GB", for all ranks
            or for each; None is no limit.
    """

    placement: str | Placement = "linear"
    memory: int | str | Sequence[int | str] | None = None

    def __post_init__(self) -> None:
        require("placement of Auto", self.placement, instance(str, Placement))
        require("memory of Auto", self.memory, _MEMORY)

    def hook_for(self, num_ranks: int, num_microbatches: int) -> AutoPlanner:
        """Returns the hook that plans during the run of a pipeline over `num_ranks` ranks, for steps of `num_microbatches`."""
        return AutoPlanner(self, num_ranks, num_microbatches)


class AutoPlanner(ReplanningHook):
    """Chooses the schedule of each step. Every rank runs it after every step and gets the same answer.

    `schedule` is the current schedule, `plan` its plan once there is one. Raises `InputError` if the planner's search is not installed,
    for a placement that does not fit or has several routes, and if the number of limits differs from the number of ranks.
    """

    def __init__(self, options: Auto, num_ranks: int, num_microbatches: int) -> None:
        if find_spec("llvmlite") is None:
            raise InputError("schedule='auto' searches for plans with llvmlite", remedy=f"{install('plan')}, or name a schedule")
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
        self._patience = 1
        self._window: list[Sample] = []
        self._has_bad_links = False
        self._switches = Switches()
        self._choice: MeasuredChoice | None = None
        self._pipeline: AttachedPipeline

    @property
    def limits_in_words(self) -> str:
        """A description of the memory limit of its plans; all ranks must have the same limit."""
        return "no memory limit" if self._limits is None else f"a memory limit of {', '.join(map(str, self._limits.memory))} bytes"

    @property
    def switches(self) -> tuple[Switch, ...]:
        """The changes of schedule so far."""
        return tuple(self._switches.done)

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
            self._switches.after_step(self._pipeline)
            better = self._after_step()
            if better is not None:
                assert self.plan is not None
                self._switches.change(self._pipeline, better, self.plan.problem.costs)

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
        self._window.clear()
        better = self._change(plan)
        if better is not None:
            self._switches.change(self._pipeline, better, plan.problem.costs)

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
        if self._steps < REVIEW * self._patience:
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
        self._window = [Sample(step.makespan, costs_of(placement, self._measured[0], [step])) for step in self._measured[1:]]
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
        plan = None
        try:
            plan = solve(self._problem, evaluations=0)
        except Exception as error:  # noqa: BLE001 - a plan is advice
            _log.warning(
                "the published schedules could not be compared on rank %d: %s: %s", self._pipeline.rank, type(error).__name__, error
            )
        has_found = self._pipeline.gather(plan is not None, "choosing a published schedule")
        if not any(has_found):
            return None
        source = has_found.index(True)
        mine = plan.to_dict() if plan is not None and self._pipeline.rank == source else None
        return Plan.from_dict(self._pipeline.gather(mine, "choosing a published schedule")[source])

    def _wait(self) -> Schedule | None:
        """Polls the search on rank 0, and shares its plan with all ranks, or that there is none."""
        is_over, answer = self._pipeline.gather(self._search() if self._pipeline.rank == 0 else None, "waiting for a plan")[0]
        if not is_over:
            return None
        self.on_close()
        self._is_waiting, self._steps = False, 0
        plan = None if answer is None else Plan.from_dict(answer)
        samples, self._window = self._window, []
        if plan is None or not self._fits(plan):
            return None
        current = self._as_plan(plan, self.schedule, "as before")
        if self._has_bad_links and unsteadiness(samples) <= NOISE:
            self._choice = MeasuredChoice(self._candidates(plan, current, samples), self._cost_per_step)
            return self._change(self._choice.next)
        return self._settle(plan if current is None or self._pays_off(current, plan, samples) else current)

    def _pays_off(self, current: Plan, plan: Plan, samples: Sequence[Sample]) -> bool:
        """Returns whether `plan` is shorter in most sampled steps, by more than their noise and by enough to pay for a switch."""
        if plan.schedule.rows == current.schedule.rows:
            return True
        shorter = gain(current, plan, [sample.costs for sample in samples])
        noise = unsteadiness(samples) / sqrt(len(samples)) * (current.time or 0)
        figures = [show_ms(round(time)) for time in (shorter, noise, self._cost_per_step)]
        _log.info("%s takes %s less in most steps, which vary by %s; a switch costs %s of each", plan.schedule.name, *figures)
        return shorter > max(noise, self._cost_per_step)

    @property
    def _cost_per_step(self) -> float:
        """The cost of a switch in ns, shared by the steps to the next check."""
        return self._switches.cost / REVIEW

    def _settle(self, plan: Plan) -> Schedule | None:
        """Changes to a plan that stays until a later check."""
        change = self._change(plan)
        self._patience = 1 if change is not None else self._patience
        return change

    def _continue_choice(self, choice: MeasuredChoice) -> Schedule | None:
        """Adds a step of a measured choice; returns the schedule of the next one, or the fastest."""
        choice.add(self._pipeline.timeline().makespan)
        if choice.is_over:
            self._choice = None
            _log.info("with late messages, %s", choice)
            self._patience = 1 if choice.has_changed else self._patience
        return self._change(choice.next)

    def _as_plan(self, plan: Plan, schedule: Schedule, how: str) -> Plan | None:
        """Returns a plan of `schedule` for the problem of `plan`; None if it exceeds the limits."""
        try:
            return Plan.from_schedule(plan.problem, plan.bound, schedule, 0.0, how)
        except ScheduleError:
            return None

    def _candidates(self, plan: Plan, current: Plan | None, samples: Sequence[Sample]) -> list[Plan]:
        """Returns the candidates for bad links: the current schedule, the plan, and the published schedules without W that fit.

        A published schedule is left out if most samples predict it to be slower than the plan by more than steps vary.
        """
        problem, costs = plan.problem, [sample.costs for sample in samples]
        most = NOISE * (plan.time or 0)
        published = (
            self._as_plan(plan, schedule, "published")
            for schedule in seeds.published_schedules(problem.placement, problem.num_microbatches)
            if not schedule.split_stages
        )
        near = (other for other in published if other is not None and gain(other, plan, costs) <= most)
        candidates: dict[object, Plan] = {}
        for candidate in (current, plan, *near):
            if candidate is not None and candidate.schedule.rows not in candidates and (candidate is plan or self._fits(candidate)):
                candidates[candidate.schedule.rows] = candidate
        return list(candidates.values())

    def _search(self) -> tuple[bool, dict[str, Any] | None]:
        """Returns whether the search is over, and the plan in its JSON form, None if there is none."""
        assert self._problem is not None
        if self._failures >= MOST_FAILURES:
            return True, None
        try:
            if self._planner is None:
                self._planner = BackgroundPlanner(self._problem, SECONDS)
            plan = self._planner.answer()
        except PlannerError as error:
            self._failures += 1
            more = "no more searches start" if self._failures >= MOST_FAILURES else "drift in stage times may start the next"
            _log.warning("a search for a plan failed, and training continues with %r; %s: %s", self.schedule.name, more, error)
            return True, None
        return plan is not None, None if plan is None else plan.to_dict()

    def _review(self, timeline: Timeline) -> Schedule | None:
        """Compares steps with the plan's costs. A search starts if most steps of a window drifted, or if there is no plan."""
        assert self._problem is not None
        self._window.append(Sample(timeline.makespan, corrected(self._problem.costs, timeline)))
        samples = [sample.costs for sample in self._window]
        off, late = how_far(self._problem.costs, samples), how_late(self._problem.costs, samples)
        if max(off, late) <= DRIFT and self.plan is not None:
            self._steps = 0
            self._window.clear()
            return None
        if len(self._window) < WINDOW:
            return None
        if off > DRIFT:
            _log.info("stage times differ from the plan by up to %.0f %%: replanning", 100 * off)
        if late > DRIFT:
            _log.info("messages arrive later than planned, by up to %.0f %% of the passes of a microbatch: replanning", 100 * late)
        self._has_bad_links = late > DRIFT
        self._patience = min(2 * self._patience, MOST_PATIENCE)
        self._problem = replace(self._problem, costs=typical_costs(self._window), objective=self._objective)
        self._is_waiting = True
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
    family_placement = family(placement, num_ranks) if isinstance(placement, str) else placement
    if family_placement.num_ranks != num_ranks:
        message = "placement {placement!r} is for {got} ranks, the pipeline has {num_ranks}"
        raise InputError(message, placement=family_placement.name, got=family_placement.num_ranks, num_ranks=num_ranks)
    if len(family_placement.routes) > 1:
        message = "plans are made for one route, the placement {placement!r} has {got}"
        raise InputError(message, placement=family_placement.name, got=len(family_placement.routes), remedy="give its schedule by name")
    return family_placement


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
    fitted = fit_costs(replace(timeline, memory=()))
    backward, weight = list(fitted.backward), list(fitted.weight)
    for stage, alone in enumerate(fitted.weight):
        whole = planned.backward[stage] + planned.weight[stage]
        if not alone and whole:
            weight[stage] = fitted.backward[stage] * planned.weight[stage] // whole
            backward[stage] = fitted.backward[stage] - weight[stage]
    late = late_messages(timeline, LATE)
    comm = tuple(was if now is None else max(was, now) for was, now in zip(planned.comm, late, strict=True))
    return replace(planned, forward=fitted.forward, backward=tuple(backward), weight=tuple(weight), comm=comm)


def _plenty(costs: Costs, num_microbatches: int) -> int:
    """Returns the bytes of all microbatches at once."""
    return max(1, num_microbatches * (sum(costs.held_after_f) + sum(costs.held_after_b)))
