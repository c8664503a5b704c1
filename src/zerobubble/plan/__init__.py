"""The planner: the best schedule for given costs and memory, over all placements, with a proof of how far from perfect it can be."""

from __future__ import annotations

from zerobubble.plan.choose import Choice, Plan, plan, solve
from zerobubble.plan.joint import LayersPlan, plan_layers
from zerobubble.plan.plan_file import load_plan, save_plan
from zerobubble.plan.problem import Objective, Problem, Solved, Status, Workload
from zerobubble.plan.robust import Sensitivity, sensitivity
from zerobubble.plan.steady import steadiest

__all__ = [
    "Choice",
    "LayersPlan",
    "Objective",
    "Plan",
    "Problem",
    "Sensitivity",
    "Solved",
    "Status",
    "Workload",
    "load_plan",
    "plan",
    "plan_layers",
    "save_plan",
    "sensitivity",
    "solve",
    "steadiest",
]
