"""What a pipeline runs of a plan, as one frozen value: the runtime knows this value and not the planner that made it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass

from zerobubble.costs import Costs, Limits
from zerobubble.ir import Schedule
from zerobubble.offload import RankOffloads

NOT_RUN = {
    ("sharded", "head"): "the head is already divided over the ranks",
    ("head", "host"): "offload moves activations of stages only",
}
"""Pairs of axes that can be planned but that no pipeline runs yet, with the reason. Only a divided head counts: a whole one is a layer."""
_RUN = {"sharded": "weights in shards", "head": "a divided head", "host": "offload"}


def not_run(used: Collection[str]) -> tuple[str, ...]:
    """A sentence with reason and remedy for each pair of the axes `used` that no pipeline runs.

    >>> not_run({"sharded", "shares"})
    ()
    >>> not_run({"head", "host"})
    ('No pipeline runs a divided head with offload yet: offload moves activations of stages only. To run the plan, leave one of the two \
out, or include the head in the last stage or layer.',)
    """
    pairs = [(first, second) for first, second in NOT_RUN if first in used and second in used]
    remedy = "To run the plan, leave one of the two out, or include the head in the last stage or layer"
    return tuple(
        f"No pipeline runs a divided head with {_RUN[first if second == 'head' else second]} yet: {NOT_RUN[first, second]}. {remedy}."
        for first, second in pairs
    )


@dataclass(frozen=True)
class PlannedRun:
    """What a pipeline runs: a schedule, and what belongs to it.

    Attributes:
        schedule: The order of the passes.
        costs: The planned times and bytes of the stages.
        limits: The bytes of activations that each rank may hold.
        levels: The name of the recompute level of each stage; empty without recomputation.
        offloads: What each rank copies to the host; empty without offload.
        first_layers: The names of the first layers of all stages but the first, if layers were planned and have names.
        is_sharded: Whether the weights were planned in shards, as of FSDP2.
        gathered_bytes: The bytes of a rank for gathered weights; None if all may stay gathered.
    """

    schedule: Schedule
    costs: Costs
    limits: Limits
    levels: tuple[str, ...] = ()
    offloads: tuple[RankOffloads, ...] = ()
    first_layers: tuple[str, ...] = ()
    is_sharded: bool = False
    gathered_bytes: int | None = None


class Planned(ABC):
    """A value that pipelines run in place of a schedule, such as a plan."""

    @property
    @abstractmethod
    def to_run(self) -> PlannedRun:
        """What a pipeline runs; raises `InputError` with the reason if there is nothing to run."""
