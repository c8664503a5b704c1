"""Planning during a run: the planner that pipelines ask, registered when this package is loaded.

The runtime knows `zerobubble.runtime.step.planner` only: the protocol of a planner, and of a hook that changes the schedule.
"""

from __future__ import annotations

from collections.abc import Callable

from zerobubble.costs import Costs, Limits
from zerobubble.ir import Schedule
from zerobubble.planning.search import compile_joint_search
from zerobubble.planning.unequal.order import order_microbatches
from zerobubble.planning.unequal.passes import plan_passes
from zerobubble.replanning.auto import Auto
from zerobubble.runtime.step.planner import Planner, register


class SearchPlanner(Planner):
    """The planner that searches with the kernels of `zerobubble.planning`."""

    def auto(self) -> Auto:
        """Returns `zb.Auto()`."""
        return Auto()

    def compile_search(self) -> None:
        """Compiles the search for passes of microbatches of unequal cost."""
        compile_joint_search()

    def order_microbatches(self, schedule: Schedule, costs: Costs, limits: Limits | None, evaluations: int) -> Schedule:
        """Returns `schedule` with its microbatches in the shortest order found."""
        return order_microbatches(schedule, costs, limits=limits, evaluations=evaluations)

    def plan_passes(self, ordered: Schedule, costs: Costs, limits: Limits | None, stops: Callable[[], bool]) -> Schedule | None:
        """Returns `ordered` with passes and microbatches moved; None if that saves too little."""
        return plan_passes(ordered, costs, limits=limits, stops=stops)


register(SearchPlanner())
