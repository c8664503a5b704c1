"""The compiled simulator on schedules, for tests that compare it with the plain one."""

from __future__ import annotations

from dataclasses import replace

from zerobubble.errors import InputError
from zerobubble.ir import Schedule
from zerobubble.planning import Objective, Problem
from zerobubble.planning.kernels import load_kernels


def simulate_compiled(problem: Problem, schedule: Schedule) -> tuple[int, int, bool]:
    """Span and makespan of `schedule` in ns by the compiled simulator, and whether it fits the limits.

    A BW is played as B and W if memory holds what B leaves to W, unless combined steps save time: then all steps are played as they are.
    Raises `InputError` for a schedule that cannot run.
    """
    kernels = load_kernels()
    if problem.plans_steps:
        span, makespan, fits = kernels.play_in_steps(problem, schedule)
        if span < 0:
            raise InputError(f"the schedule {schedule.name!r} cannot run: see schedule_faults")
        return span, makespan, fits
    order = kernels.order_of(schedule)
    both = [kernels.tables_of(replace(problem, objective=one), joins=True) for one in (Objective.PERIOD, Objective.MAKESPAN)]
    rows = [kernels.rows_of(tables, order) for tables in both]
    fits, _ = map(kernels.all_ranks_fit, both, rows)  # this also decides which B and W are fused
    span, makespan = map(kernels.longest_time, both, rows)
    if span < 0:
        raise InputError(f"the schedule {schedule.name!r} cannot run: see schedule_faults")
    return span, makespan, fits
