"""The planner: finds the shortest schedule for given costs and memory, over all placements, with a proven optimality gap.

To plan, call `zb.plan`, which is `plan` here. The other names are its arguments and results, `solve` for a `Problem` on one placement, and
the sensitivity of a plan to errors in measured times.
"""

from __future__ import annotations

from zerobubble.planning.answer import Choice, Plan, Status
from zerobubble.planning.competition import solve
from zerobubble.planning.front import plan
from zerobubble.planning.problem.head import Head
from zerobubble.planning.problem.problem import Objective, Problem
from zerobubble.planning.problem.sharded import Sharded
from zerobubble.planning.problem.workload import Workload
from zerobubble.planning.sensitivity import Sensitivity, sensitivity
from zerobubble.planning.shards.few_gathers import FewGathers
from zerobubble.planning.shards.plan_with_gathers import PlanWithGathers
from zerobubble.planning.unequal.order import order_microbatches

__all__ = [
    "Choice",
    "FewGathers",
    "Head",
    "Objective",
    "Plan",
    "PlanWithGathers",
    "Problem",
    "Sensitivity",
    "Sharded",
    "Status",
    "Workload",
    "order_microbatches",
    "plan",
    "sensitivity",
    "solve",
]
