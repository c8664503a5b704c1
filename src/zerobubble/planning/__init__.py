"""The planner: the best schedule for given costs and memory, over all placements, with a proof of how far from perfect it can be."""

from __future__ import annotations

from zerobubble.planning.competition import Choice, Plan, plan, solve
from zerobubble.planning.head.choice import HeadChoice, HeadWay, place_head
from zerobubble.planning.head.plan import HeadPlan, PlannedHead, plan_head
from zerobubble.planning.layer_plan import LayersPlan, plan_layers
from zerobubble.planning.noise.robust_order import most_robust_order
from zerobubble.planning.noise.sensitivity import Sensitivity, sensitivity
from zerobubble.planning.offload_plan import OffloadedPlan, plan_offloaded
from zerobubble.planning.problem.head import Head
from zerobubble.planning.problem.problem import Objective, Problem, Solved, Status
from zerobubble.planning.problem.sharded import Sharded
from zerobubble.planning.problem.workload import Workload
from zerobubble.planning.shards.few_gathers import FewGathers
from zerobubble.planning.shards.priced import Priced
from zerobubble.planning.unequal.order import order_microbatches

__all__ = [
    "Choice",
    "FewGathers",
    "Head",
    "HeadChoice",
    "HeadPlan",
    "HeadWay",
    "LayersPlan",
    "Objective",
    "OffloadedPlan",
    "Plan",
    "PlannedHead",
    "Priced",
    "Problem",
    "Sensitivity",
    "Sharded",
    "Solved",
    "Status",
    "Workload",
    "most_robust_order",
    "order_microbatches",
    "place_head",
    "plan",
    "plan_head",
    "plan_layers",
    "plan_offloaded",
    "sensitivity",
    "solve",
]
