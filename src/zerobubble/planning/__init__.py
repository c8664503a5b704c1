"""The planner: the best schedule for given costs and memory, over all placements, with a proof of how far from perfect it can be."""

from __future__ import annotations

from zerobubble.planning.choose import Choice, Plan, plan, solve
from zerobubble.planning.joint import LayersPlan, plan_layers
from zerobubble.planning.plan_file import load_plan, save_plan
from zerobubble.planning.problem import Objective, Problem, Solved, Status, Workload
from zerobubble.planning.robust import Sensitivity, sensitivity
from zerobubble.planning.steady import steadiest

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
