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
    kernels, steps = load_kernels(), problem.plans_steps
    aims = (replace(problem, objective=objective) for objective in (Objective.PERIOD, Objective.MAKESPAN))
    both = [kernels.tables_of(one, joins=not steps, steps=steps) for one in aims]
    rows = [kernels.step_rows(tables, schedule) if steps else kernels.rows_of(tables, kernels.order_of(schedule)) for tables in both]
    fits, _ = map(kernels.all_ranks_fit, both, rows)  # this also decides which B and W are fused
    span, makespan = map(kernels.longest_time, both, rows)
    if span < 0:
        raise InputError(f"the schedule {schedule.name!r} cannot run: see schedule_faults")
    return span, makespan, fits
