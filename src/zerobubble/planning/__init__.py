"""The planner: finds the shortest schedule for given costs and memory, over all placements, with a proven optimality gap.

To plan, call `zb.plan`, which is `plan` here. The other names are its arguments and results, `solve` for a `Problem` on one placement, and
the sensitivity of a plan to errors in measured times.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from zerobubble.listing import listing

if TYPE_CHECKING:
    from zerobubble.planning.answer import Choice, Plan, Status
    from zerobubble.planning.competition import solve
    from zerobubble.planning.front import plan
    from zerobubble.planning.problem.head import Head
    from zerobubble.planning.problem.problem import Objective, Problem
    from zerobubble.planning.problem.sharded import Sharded
    from zerobubble.planning.problem.workload import Workload
    from zerobubble.planning.sensitivities import Sensitivity, sensitivity
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

__dir__ = listing(__all__)

_HOMES = {
    "Choice": "zerobubble.planning.answer",
    "FewGathers": "zerobubble.planning.shards.few_gathers",
    "Head": "zerobubble.planning.problem.head",
    "Objective": "zerobubble.planning.problem.problem",
    "Plan": "zerobubble.planning.answer",
    "PlanWithGathers": "zerobubble.planning.shards.plan_with_gathers",
    "Problem": "zerobubble.planning.problem.problem",
    "Sensitivity": "zerobubble.planning.sensitivities",
    "Sharded": "zerobubble.planning.problem.sharded",
    "Status": "zerobubble.planning.answer",
    "Workload": "zerobubble.planning.problem.workload",
    "order_microbatches": "zerobubble.planning.unequal.order",
    "plan": "zerobubble.planning.front",
    "sensitivity": "zerobubble.planning.sensitivities",
    "solve": "zerobubble.planning.competition",
}
"""Where the names are. They load on first access, since a search takes long to load and most uses of this package need none."""


def __getattr__(name: str) -> Any:
    """Loads a name on first access."""
    if name not in _HOMES:
        raise AttributeError(f"module 'zerobubble.planning' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value
