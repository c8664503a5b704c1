"""The Pareto front of memory and bubble: a plan for each memory limit, started from those for less memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from textwrap import fill

from zerobubble.bounds.overlap import fusing_saves
from zerobubble.costs import Costs
from zerobubble.errors import InputError
from zerobubble.ir import Placement
from zerobubble.planning.answer import Plan
from zerobubble.planning.attempt import ProgressCallback, as_budget
from zerobubble.planning.competition import compete
from zerobubble.planning.problem.from_work import placements_for, problems_of
from zerobubble.planning.problem.problem import Objective
from zerobubble.planning.problem.workload import Workload
from zerobubble.planning.rounds import CtrlC
from zerobubble.planning.seeds import published_schedules
from zerobubble.planning.table import NOTE_WIDTH, SPLIT, STEPS, aligned
from zerobubble.units import show_ms, show_percent


@dataclass(frozen=True)
class Point:
    """The plan for one limit: `memory` in microbatches of all stages of a rank."""

    memory: float
    plan: Plan


@dataclass(frozen=True)
class Front:
    """Points by ascending memory; the bubble never grows with memory. `str` gives a table.

    `interrupted` says that Ctrl-C ended the search before all limits had their plan.
    """

    points: tuple[Point, ...]
    interrupted: bool = False

    @property
    def titles(self) -> tuple[str, ...]:
        """The column titles of the table."""
        objective = self.points[0].plan.problem.objective.value
        return "memory", "placement", objective, "bubble", "bound", "peak", "messages", "schedule"

    def dominated_by(self, point: Point) -> Point | None:
        """Returns the point with the least memory that is as short as `point`; None if that is `point` itself."""
        first = next(one for one in self.points if one.plan.time == point.plan.time)
        return None if first is point or point.plan.time is None else first

    def rows(self) -> list[tuple[str, ...]]:
        """The figures of each point, under `titles`. Those that gain nothing from their memory are marked."""
        smaller = map(self.dominated_by, self.points)
        return [
            cells if first is None else (*cells[:-1], f"{cells[-1]}; no gain over {first.memory:g}")
            for cells, first in zip(map(point_cells, self.points), smaller, strict=True)
        ]

    def __str__(self) -> str:
        objective = self.points[0].plan.problem.objective.value
        legend = LEGEND.format(title=objective.capitalize(), steps=STEPS[objective])
        legend += SPLIT if fusing_saves(self.points[0].plan.costs) else ""
        notes = [fill(legend, NOTE_WIDTH), *(["", CUT_SHORT] if self.interrupted else [])]
        return "\n".join([*aligned([self.titles, *self.rows()], left=(1, 7)), "", *notes])


CUT_SHORT = "Ctrl-C ended the front early: larger limits were not planned, and the search for the last one is incomplete."


LEGEND = (
    "Memory and peak: in microbatches of all the stages of a rank. {title}: the time per step if {steps}. Bubble: its idle share. Bound: "
    "no schedule with this memory has a smaller bubble on the placements tried."
)


def point_cells(point: Point) -> tuple[str, ...]:
    """The figures of one point, under `Front.titles`."""
    plan, memory = point.plan, f"{point.memory:g}"
    bound = show_percent(point.plan.lower_bound)
    if plan.time is None:
        return memory, "nothing fits", "–", "–", "–", "–", "–", "–"
    step = show_ms(plan.time), show_percent(plan.bubble_at(plan.time))
    name, peak = point.plan.choices[0].name, f"{plan.peak_microbatches:.4g}"
    return memory, name, *step, bound, peak, f"{plan.problem.messages:,}", plan.how


def pareto(
    work: Workload | Costs,
    num_microbatches: int,
    memories: Iterable[float],
    *,
    placements: str | Placement | Iterable[str | Placement] | None = None,
    objective: str = Objective.PERIOD,
    seconds: float | None = None,
    seed: int = 0,
    evaluations: int | None = None,
    progress: ProgressCallback | None = None,
    on_point: Callable[[Front], object] | None = None,
) -> Front:
    """Finds the best plan for each of `memories`, in microbatches of all stages of a rank. Each search gets the full budget.

    A schedule that fits in less memory fits in more, so each plan starts from those before it. `on_point` is called after each point, with
    the front so far. Ctrl-C returns the points made so far. Other arguments are as in `plan`. Raises `InputError` for an argument that
    cannot be used.
    """
    limits = sorted(set(memories))
    if not limits:
        raise InputError("a front needs at least one memory limit")
    tried = placements_for(work, placements)
    seeds = {name: list(published_schedules(placement, num_microbatches)) for name, placement in tried.items()}
    points: list[Point] = []
    with CtrlC() as ctrl_c:
        for memory in limits:
            problems = problems_of(work, num_microbatches, memory, tried, objective)
            made = compete(problems, as_budget(seconds, evaluations), seed, progress=progress, seeds=seeds)
            points.append(Point(memory, made))
            if made.interrupted:
                break
            if on_point is not None:
                on_point(Front(tuple(points), False))
            for choice in made.choices:  # before the published ones: a short budget may last for the first seed only
                seeds[choice.name][:0] = [choice.plan.schedule] if choice.plan.order else []
    if not points:
        raise KeyboardInterrupt
    return Front(tuple(points), ctrl_c.came or points[-1].plan.interrupted)
