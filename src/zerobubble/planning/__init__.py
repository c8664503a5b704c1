"""The planner: the best schedule for given costs and memory, over all placements, with a proof of how far from perfect it can be."""

from __future__ import annotations

from zerobubble.planning.competition import Choice, Plan, plan, solve
from zerobubble.planning.layer_plan import LayersPlan, plan_layers
from zerobubble.planning.problem import Objective, Problem, Solved, Status, Workload
from zerobubble.planning.robust_order import most_robust_order
from zerobubble.planning.sensitivity_analysis import Sensitivity, sensitivity

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
    "most_robust_order",
    "plan",
    "plan_layers",
    "sensitivity",
    "solve",
]
