"""The planner as the runtime knows it: who orders microbatches, and who changes the schedule between steps.

The runtime imports no planner. `zerobubble.replanning`, a layer above, implements these classes, and registers a planner when it is loaded:
when a pipeline first asks for one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

from zerobubble.costs import Costs, Limits
from zerobubble.ir import Schedule
from zerobubble.planned_run import Planned
from zerobubble.runtime.step.hook import StepHook

DEFAULT = "zerobubble.replanning"
"""The package that registers a planner when it is loaded."""


@dataclass(frozen=True)
class Switch:
    """A change of schedule between two training steps.

    Attributes:
        step: The number of the first step with the new schedule, counted from the first step of the pipeline.
        schedule: The name of the new schedule.
        cost_ms: The time of the change on the slowest rank, plus what the first step took longer than the second.
    """

    step: int
    schedule: str
    cost_ms: float


class ReplanningHook(StepHook):
    """A hook that changes the schedule between steps with `AttachedPipeline.change_schedule`. Every rank makes the same changes.

    Attributes:
        schedule: The current schedule; before the first step, the schedule to begin with.
        plan: The plan of the current schedule; None before there is one.
    """

    schedule: Schedule
    plan: Planned | None

    @property
    @abstractmethod
    def limits_in_words(self) -> str:
        """A description of the memory limits of its plans; all ranks must have the same limits."""

    @property
    @abstractmethod
    def switches(self) -> Sequence[Switch]:
        """The changes so far."""


class Replanner(ABC):
    """A value for `Pipeline(schedule=...)` that chooses the schedules of a run, such as `zb.Auto()`."""

    @abstractmethod
    def hook_for(self, num_ranks: int, num_microbatches: int) -> ReplanningHook:
        """Returns the hook of a pipeline. Raises `InputError` if it cannot plan for this number of ranks."""


class Planner(ABC):
    """Plans during a run."""

    @abstractmethod
    def auto(self) -> Replanner:
        """Returns what `schedule="auto"` stands for."""

    @abstractmethod
    def compile_search(self) -> None:
        """Compiles the search for `plan_passes`, so that no step waits for it."""

    @abstractmethod
    def order_microbatches(self, schedule: Schedule, costs: Costs, limits: Limits | None, evaluations: int) -> Schedule:
        """Returns `schedule` with its microbatches in the shortest order found in this number of evaluations."""

    @abstractmethod
    def plan_passes(self, ordered: Schedule, costs: Costs, limits: Limits | None, stops: Callable[[], bool]) -> Schedule | None:
        """Returns `ordered` with passes and microbatches moved; None if that saves too little. Searches until `stops` returns True."""


_registered: list[Planner] = []


def register(planner: Planner) -> None:
    """Makes `planner` the planner of all pipelines."""
    _registered[:] = [planner]


def planner() -> Planner:
    """Returns the planner of all pipelines."""
    if not _registered:
        import_module(DEFAULT)
    return _registered[0]
