"""The answer to a question: its schedule, its costs, what runs when, and the figures next to the picture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from zerobubble.bounds import Bounds, lower_bounds
from zerobubble.cost_model import Estimate
from zerobubble.costs import KEPT_WORDS, NS_PER_MS, UNIT_BYTES, Costs, Limits
from zerobubble.errors import InputError, ScheduleError, ZeroBubbleError
from zerobubble.explain import attribute, gaps
from zerobubble.explorer.estimating import GPU_MEMORY, estimate_figures, estimate_of
from zerobubble.explorer.question import (
    BY_COMMAND,
    MOST_PASSES,
    RANGES,
    REMEDIES,
    FieldError,
    Question,
    errors_at,
    faults_to_list,
    read_options,
)
from zerobubble.export.document import describe_document, loads, schedule_of
from zerobubble.export.svg import period_caption
from zerobubble.ir import Placement, Schedule
from zerobubble.planning.answer import Plan
from zerobubble.planning.problem.from_work import has_ample_memory
from zerobubble.planning.problem.problem import microbatch_bytes
from zerobubble.planning.problem.workload import Workload
from zerobubble.schedules import SCHEDULES, Recipe, find, make
from zerobubble.simulation import period, simulate
from zerobubble.timeline import Timeline
from zerobubble.units import MOST_MS, show_bytes, show_ms, show_percent
from zerobubble.view import Viewed
from zerobubble.view.page import viewer_data

PEAK = "peak memory"
_FEWER = f"give fewer microbatches or ranks, or {BY_COMMAND}"
_REPAIR = "repair the file, or write it anew with zerobubble make or plan"
MOST_EXPLAINED = 30_000
"""Passes up to which idle time is explained by its causes, which plays the schedule several times."""
CAUSES = {
    "dependency": "no pass is ready",
    "comm": "messages",
    "imbalance": "less work than the busiest rank",
    "memory": "forward passes wait to save memory",
    "reduction": "gradient sums over replicas",
}
"""The causes of `zb.explain.attribute` in words."""


@dataclass(frozen=True)
class Answer:
    """A schedule with its costs and timeline. `limits` are the bytes that each rank may hold, empty without a limit.

    `plan` is set if a plan file is open, and `estimate` if the costs are those of a model on GPUs.
    """

    question: Question
    schedule: Schedule
    costs: Costs
    timeline: Timeline
    limits: tuple[int, ...] = ()
    plan: Plan | None = None
    estimate: Estimate | None = None

    @cached_property
    def below(self) -> Below:
        """The curves drawn below the schedule."""
        return _below(self)

    @property
    def in_bytes(self) -> bool:
        """Whether the bytes in the costs are real, or stand for microbatches."""
        if self.estimate is not None:
            return True
        measured = bool(self.question.costs) or (self.plan is not None and self.plan.problem.workload is None)
        return measured and set(self.costs.held_after_f) != {UNIT_BYTES}

    @cached_property
    def period(self) -> int:
        """The time of a step without global operations between steps, in ns."""
        return period(self.schedule, self.costs)

    @property
    def microbatch_bytes(self) -> tuple[int, ...]:
        """Per rank, the bytes of one microbatch in all its stages."""
        return microbatch_bytes(self.schedule.placement, self.costs)

    @property
    def viewed(self) -> Viewed:
        """The data that the viewer draws."""
        kept = self.costs.kept_bytes(self.schedule.placement) if self.in_bytes else ()
        layers, unit = {KEPT_WORDS: kept} if kept else {}, () if self.in_bytes else self.microbatch_bytes
        caption = period_caption(self.timeline, self.period)
        return Viewed(self.timeline, self.costs, limits=self.limits, constant_bytes=layers, microbatch_bytes=unit, caption=caption)


@dataclass(frozen=True)
class Below:
    """What the question draws below the schedule: the `other` schedule of a comparison, and a measured `run`.

    If one of them cannot be drawn, its error is in `faults`, and the schedule is drawn without it.
    """

    other: Answer | None
    run: Viewed | None
    faults: tuple[FieldError, ...]


def answer(question: Question) -> Answer:
    """The schedule of the question, played. Raises `FieldError` naming the field that cannot be used."""
    schedule, plan = _from_file(question) if question.file else (_made(question), None)
    _require_size(schedule.num_stages * schedule.num_microbatches, "file" if question.file else "microbatches")
    estimate: Estimate | None = None
    limits: tuple[int, ...] = ()
    if question.model and not question.costs:
        estimate = estimate_of(question, schedule)
        costs, limits, plan = estimate.costs, _left_by(estimate, schedule.placement), None
    elif plan is not None and not question.costs:
        costs, limits = plan.problem.costs, _limits_of(plan)
    else:
        costs = _costs(question, schedule)
    try:
        timeline = simulate(schedule, costs)
    except ScheduleError as error:
        raise FieldError("file" if question.file else "schedule", f"the schedule cannot run: {error.faults[0].message}", _REPAIR) from error
    return Answer(question, schedule, costs, timeline, _limits(question, schedule, costs) or limits, plan, estimate)


def _below(played: Answer) -> Below:
    faults: list[FieldError] = []
    other, run = None, None
    with _noted(faults):
        other = _compared(played)
    with _noted(faults):
        run = _measured_run(played)
    return Below(other, run, tuple(faults))


@contextmanager
def _noted(faults: list[FieldError]) -> Iterator[None]:
    """Append an error raised inside to `faults`."""
    try:
        yield
    except FieldError as error:
        faults.append(error)


def _compared(played: Answer) -> Answer | None:
    """The schedule that the question compares with: of the same shape, with the same times. Raises `FieldError` at its field."""
    question, shape = played.question, played.schedule
    if not question.versus:
        return None
    asked = replace(question, schedule=question.versus, ranks=shape.num_ranks, microbatches=shape.whole_microbatches)
    try:
        other = answer(replace(asked, **_shape_of_other(question), file="", file_name=""))
        if played.plan is None or question.costs:
            return other
        workload = played.plan.problem.workload
        costs = played.costs if workload is None else workload.costs(other.schedule.placement)
        return replace(other, costs=costs, timeline=simulate(other.schedule, costs))
    except ZeroBubbleError as error:
        raise FieldError("versus", str(error), str(error.fields.get("remedy", ""))) from error


def _shape_of_other(question: Question) -> dict[str, Any]:
    """The stages per rank and options of the compared schedule: as in `zerobubble compare`, those given that it supports."""
    recipe = find(question.versus)
    if question.file:
        return {"stages": None, "options": ""}
    words = [word for word in question.options.split(",") if word.partition("=")[0].strip() in recipe.options]
    return {"stages": question.stages if recipe.any_stages else None, "options": ",".join(words)}


def _measured_run(played: Answer) -> Viewed | None:
    """The run that the schedule is compared with, and what its ranks waited for. Raises `FieldError` for one of another schedule."""
    if not played.question.run:
        return None
    with errors_at("run"):
        run = loads(played.question.run)
        if not isinstance(run, Timeline):
            raise InputError("this is {got}, not a timeline of a run", got=describe_document(run), remedy=REMEDIES["run"])
        return Viewed(run, gaps=gaps(played.schedule, played.costs, run))


def _limits_of(plan: Plan) -> tuple[int, ...]:
    """Returns the limits for which a plan was made; empty if it was made without any, since the limits of its problem then never bind."""
    return () if has_ample_memory(plan.problem) else plan.problem.limits.memory


def _left_by(estimate: Estimate, placement: Placement) -> tuple[int, ...]:
    """The bytes that a model leaves for activations on each rank; empty if it does not fit even without activations."""
    try:
        return estimate.limits(placement).memory
    except InputError:
        return ()


def _require_size(work: int, field: str) -> None:
    """Raises if a schedule of `work` stages times microbatches, with split backward passes, would have too many passes."""
    if 3 * work > MOST_PASSES:
        raise FieldError(field, f"the schedule would have up to {3 * work:,} passes; the page takes at most {MOST_PASSES:,}", _FEWER)


def _made(question: Question) -> Schedule:
    with errors_at("schedule"):
        recipe = find(question.schedule)
    if question.stages not in (None, recipe.stages_per_rank) and not recipe.any_stages:
        remedy = f"give {recipe.stages_per_rank}, or leave it empty"
        raise FieldError("stages", recipe.refusal(question.ranks, question.microbatches, question.stages), remedy)
    _require_size(question.ranks * (question.stages or recipe.stages_per_rank) * question.microbatches, "microbatches")
    options = read_options(question.options)
    with errors_at("options"):
        recipe.check_options(options, SCHEDULES.values())
    if refusal := recipe.refusal(question.ranks, question.microbatches, question.stages):
        raise FieldError(*_refused_field(recipe, question, refusal))
    with errors_at("options" if options else "schedule"):
        return make(question.schedule, question.ranks, question.microbatches, question.stages, **options)


def _refused_field(recipe: Recipe, question: Question, refusal: str) -> tuple[str, str, str]:
    """The field of a refused shape, the sentence and the remedy: the first field whose change alone can make the shape possible."""
    ranks, microbatches, stages = question.ranks, question.microbatches, question.stages
    others = _near("microbatches", microbatches, lambda other: recipe.allows(ranks, other, stages))
    if others:
        return "microbatches", refusal, f"give {others} microbatches"
    if others := _near("ranks", ranks, lambda other: recipe.allows(other, microbatches, stages)):
        return "ranks", refusal, f"give {others} ranks"
    return "schedule" if stages is None else "stages", refusal, ""


def _near(field: str, number: int, allows: Callable[[int], bool]) -> str:
    """The next smaller and the next larger number that are allowed, such as `2 or 4`; empty if there are none up to four times as many."""
    most = min(int(RANGES[field][1]), max(64, 4 * number))
    below = next((other for other in range(number - 1, 0, -1) if allows(other)), None)
    above = next((other for other in range(number + 1, most + 1) if allows(other)), None)
    return " or ".join(str(other) for other in (below, above) if other is not None)


def _from_file(question: Question) -> tuple[Schedule, Plan | None]:
    with errors_at("file"):
        document = loads(question.file, question.file_name or "file")
        return schedule_of(document), document if isinstance(document, Plan) else None


def _costs(question: Question, schedule: Schedule) -> Costs:
    if question.costs:
        return _pasted_costs(question, schedule)
    per_rank = max(1, schedule.num_stages // schedule.num_ranks)
    if (whole := sum(question.times)) > MOST_MS:
        raise FieldError("forward", f"F, B and W together must be at most {MOST_MS:,} ms, got {whole:,.12g} ms", "give shorter times")
    with errors_at("forward"):
        costs = Costs.uniform(schedule.num_stages, question.times, question.comm, stages_per_rank=per_rank, held=question.held)
    if question.slow_link is None and question.slow_comm is None:
        return costs
    return _with_slow_link(question, schedule.placement, costs)


def _pasted_costs(question: Question, schedule: Schedule) -> Costs:
    with errors_at("costs"):
        document = loads(question.costs)
        if isinstance(document, Plan):
            document = document.problem.costs
        elif isinstance(document, Workload):
            document = document.costs(schedule.placement)
        if not isinstance(document, Costs):
            raise InputError("this is {got}, not costs of stages, the work of ranks or a plan", got=describe_document(document))
        document.require_schedule(schedule)
    return document


def _with_slow_link(question: Question, placement: Placement, costs: Costs) -> Costs:
    """The costs with other messages between a rank and the next one."""
    slow_link, slow_comm = question.slow_link, question.slow_comm
    if slow_link is not None and slow_link + 1 >= placement.num_ranks:
        last = placement.num_ranks - 1
        remedy = f"give a rank from 0 to {last - 1}" if last else "leave it empty"
        raise FieldError("slow_link", f"there is no link after rank {slow_link}, since the last rank is {last}", remedy)
    if slow_link is None:
        raise FieldError("slow_link", "the slow link has a time but no rank", "give the rank before it, too, or leave both empty")
    if slow_comm is None:
        raise FieldError("slow_comm", "the slow link has a rank but no time", "give the time of its messages, too, or leave both empty")
    if len(placement.routes) > 1:
        message = "this schedule has each stage on two ranks, so that no stage boundary lies on one link alone"
        raise FieldError("slow_link", message, "leave both empty")
    ends = {slow_link, slow_link + 1}
    slow = round(slow_comm * NS_PER_MS)
    on_link = [{here, there} == ends for here, there in pairwise(placement.routes[0])]
    return costs.with_columns(comm=[slow if slowed else usual for slowed, usual in zip(on_link, costs.comm, strict=True)])


def _limits(question: Question, schedule: Schedule, costs: Costs) -> tuple[int, ...]:
    if question.memory is None:
        return ()
    return tuple(max(1, round(question.memory * size)) for size in microbatch_bytes(schedule.placement, costs))


def answer_to_dict(played: Answer) -> dict[str, Any]:
    """What the page shows: the viewer's data, the figures, and what is noteworthy, in sentences.

    `faults` are the errors of fields whose timelines are drawn below the schedule.
    """
    exceeded = (PEAK,) if _overfull(played) else (GPU_MEMORY,) if played.estimate and not played.limits else ()
    schedule, other, run = played.schedule, played.below.other, played.below.run
    viewed = (played.viewed, None if other is None else other.viewed, run)
    return {
        "data": viewer_data([view for view in viewed if view is not None]),
        "name": schedule.name,
        "ranks": schedule.num_ranks,
        "microbatches": schedule.whole_microbatches,
        "stages": schedule.placement.stages_per_rank,
        "isPlan": played.plan is not None,
        "figures": [
            {"label": label, "value": value, "detail": detail, "exceeds": label in exceeded}
            for label, value, detail in _figures(played, other, run)
        ],
        "misfits": list(_misfits(played)),
        "notes": list(_notes(played)),
        "assumptions": list(played.estimate.assumptions) if played.estimate else [],
        "faults": faults_to_list(played.below.faults),
    }


def _figures(played: Answer, other: Answer | None, run: Viewed | None) -> Iterator[tuple[str, str, str]]:
    """Label, value and lines of detail for each figure."""
    timeline, step = played.timeline, played.period
    bounds = _bounds(played)
    for label, meaning, time, bound in (
        ("period", "time per step without global operations between steps", step, bounds and bounds.span),
        ("makespan", "time per step with one, such as clipping by the global norm", timeline.makespan, bounds and bounds.makespan),
    ):
        bubble = f"bubble {show_percent(timeline.bubble_at(time))}"
        yield label, show_ms(time), f"{meaning}\n{_against(time, bound.time)}; {bubble}" if bound and bound.time else f"{meaning}\n{bubble}"
    if other is not None:
        theirs = other.period
        detail = f"its period is {show_ms(theirs)}, bubble {show_percent(other.timeline.bubble_at(theirs))}; peak {_peak(other)[0]}"
        yield f"speed against {other.schedule.name}{_memory_against(played, other)}", f"{theirs / step:.3f}×" if step else "–", detail
    if run is not None:
        took = run.timeline
        detail = f"bubble {show_percent(took.bubble_makespan)}, {show_percent(took.makespan / timeline.makespan - 1)} longer than the plan"
        yield "run", show_ms(took.makespan), detail
    yield PEAK, *_peak(played)
    if played.estimate is not None:
        yield from estimate_figures(played.estimate, played.schedule)


def _against(time: int, bound: int) -> str:
    """Describes the excess of a time over its lower bound."""
    if time == bound:
        return "optimal: equal to its lower bound"
    return f"{show_percent(time / bound - 1)} above its lower bound, {show_ms(bound)}"


def _bounds(played: Answer) -> Bounds | None:
    """The lower bounds of this placement; None if there are none, as for stages with copies.

    A plan shown with its own costs and limits keeps its own bounds. If the schedule exceeds the limits, the bounds are those without
    limits, since such a schedule may be shorter.
    """
    if played.plan is not None and (played.costs, played.limits) == (played.plan.problem.costs, _limits_of(played.plan)):
        return played.plan.bounds
    placement = played.schedule.placement
    if len(placement.routes) > 1 or played.schedule.is_forward_only:
        return None
    limits = Limits(played.limits) if played.limits and not _overfull(played) else None
    return lower_bounds(placement, played.schedule.num_microbatches, played.costs, limits)


def _overfull(played: Answer) -> list[int]:
    """The ranks that hold more than their limit."""
    return [rank for rank, (peak, limit) in enumerate(zip(_held(played), played.limits, strict=False)) if peak > limit]


def _held(played: Answer) -> list[int]:
    """The peak of each rank in bytes."""
    return [figures.peak_bytes or 0 for figures in played.timeline.ranks]


def _amounts(played: Answer, in_bytes: bool) -> list[float]:
    """The peak of each rank, in bytes or else in microbatches."""
    return [count / (1 if in_bytes else size) for count, size in zip(_held(played), played.microbatch_bytes, strict=True)]


def _memory_against(played: Answer, other: Answer) -> str:
    """Compares peak memory, as a multiple of the other schedule's. Empty if they are equal."""
    shown, theirs = (max(_amounts(side, played.in_bytes)) for side in (played, other))
    ratio = f"{shown / theirs:.3g}" if theirs else "1"
    return "" if ratio == "1" else f", at {ratio}× its memory"


def _peak(played: Answer) -> tuple[str, str]:
    held, sizes = _held(played), played.microbatch_bytes

    def show(rank: int, count: int) -> str:
        return show_bytes(count) if played.in_bytes else f"{count / sizes[rank]:.4g}"

    amounts = _amounts(played, played.in_bytes)
    fullest, least = amounts.index(max(amounts)), amounts.index(min(amounts))
    unit = "" if played.in_bytes else " microbatches"
    value = f"{show(fullest, held[fullest])}{unit}"
    detail = f"rank {fullest} holds most, rank {least} least: {show(least, held[least])}"
    if amounts[fullest] == amounts[least]:
        detail = "the same on every rank" if len(held) > 1 else "on the only rank"
    if played.limits:
        detail += f"; limit {show(fullest, played.limits[fullest])}"
    return value, detail


def _misfits(played: Answer) -> Iterator[str]:
    """Describes what does not fit in memory."""
    if played.estimate is not None and not played.limits:
        yield "Does not fit: parameters, gradients and optimizer state leave no memory. Use a larger tp, more ranks or more replicas."
    if over := _overfull(played):
        ranks = f"rank {over[0]} holds" if len(over) == 1 else f"{len(over)} ranks hold"
        yield f"Does not fit: {ranks} more than the limit. Use Search below to find a schedule within the limit."


def _notes(played: Answer) -> Iterator[str]:
    """Where the times come from, and why ranks are idle."""
    if played.plan is not None and not played.question.costs:
        yield "Times, messages and memory come from the plan. The fields for them are ignored."
    elif played.estimate is not None:
        yield "Times, messages and memory are estimates from data sheets. Use them to compare schedules; real times are often longer."
    elif played.question.costs:
        yield "Times and messages come from the costs file. The fields for them are ignored."
    if sum(map(len, played.timeline.rows)) <= MOST_EXPLAINED:
        yield _causes(played)


def _causes(played: Answer) -> str:
    """The bubble of the makespan by its causes, on the mean of the ranks, and the work of ranks that have unequal work."""
    whole = max(1, played.timeline.num_ranks * played.timeline.makespan)
    idle = attribute(played.schedule, played.costs)
    causes = ", ".join(f"{CAUSES[cause]} {show_percent(time / whole)}" for cause, time in idle.overall._asdict().items() if time)
    works = [figures.work for figures in played.timeline.ranks]
    unequal = f" Ranks have {show_ms(min(works))} to {show_ms(max(works))} of work." if idle.overall.imbalance else ""
    return f"Why ranks are idle, in shares of the makespan on average: {causes}.{unequal}" if causes else "No rank is ever idle."
