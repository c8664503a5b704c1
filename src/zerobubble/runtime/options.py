"""The arguments of `Pipeline`: what each must be, judged before anything is made of them, and all that is wrong told at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zerobubble.arguments import NUMBER, Wanted, each, either, instance, optional, require
from zerobubble.costs import Costs
from zerobubble.errors import InputError
from zerobubble.ir import Schedule
from zerobubble.planning import LayersPlan, Plan, Solved
from zerobubble.runtime.executor.executor import Overlap
from zerobubble.runtime.executor.program_cache import MICROBATCHES, MakeSchedule
from zerobubble.runtime.hooks.auto import Auto
from zerobubble.runtime.hooks.shared_parameters import Tied
from zerobubble.runtime.stage.rank_stages import Build
from zerobubble.runtime.step.hook import StepHook
from zerobubble.runtime.step.loss import LossFunction, LossWeight, OnLoss
from zerobubble.runtime.transport.endpoint import Endpoint

TIMEOUT = 120.0
"""Seconds that a rank waits for a message where nobody says."""
SHORTEST_S, LONGEST_S = 0.1, 1e6
"""The timeouts that make sense: a rank looks for failures ten times a second, and backends count in numbers that do not hold years."""


@dataclass(frozen=True)
class PipelineOptions:
    """The arguments of `Pipeline`, by their names."""

    build_or_modules: Build | nn.Module | Sequence[nn.Module]
    schedule: str | Schedule | Solved | Plan | LayersPlan | MakeSchedule | Auto
    num_microbatches: int
    loss_fn: LossFunction
    loss_weight: LossWeight | None
    tied: Tied
    split: str | Mapping[int, str]
    cuda_graphs: bool
    main_grad: torch.dtype | None
    overlap: Overlap | None
    group: dist.ProcessGroup | None
    timeout: float
    hooks: Sequence[StepHook]
    on_loss: OnLoss | None
    pace: Costs | None
    transport: str | Endpoint


def function(call: str) -> Wanted:
    """Something that can be called as `call` says."""
    return Wanted(f"a function {call}", callable)


def _are_modules(given: Any) -> bool:
    return isinstance(given, (nn.Module, Sequence)) and not isinstance(given, str)


WANTED: dict[str, Wanted | type] = {
    "build_or_modules": either(function("(stage_index, num_stages) -> nn.Module"), Wanted("the modules of this rank", _are_modules)),
    "schedule": either(
        Wanted("a name", lambda given: isinstance(given, str)),
        instance(Schedule, Solved, Plan, LayersPlan, Auto),
        function("(num_ranks, num_microbatches) -> Schedule"),
    ),
    "num_microbatches": MICROBATCHES,
    "loss_fn": function("(output, target) that gives the mean loss of a microbatch"),
    "loss_weight": optional(function("(target) that gives the weight of a microbatch")),
    "tied": Wanted("a list of groups such as [(0, 'tok.weight'), (3, 'head.weight')]", lambda given: isinstance(given, Sequence)),
    "split": instance(str, Mapping),
    "cuda_graphs": bool,
    "main_grad": optional(torch.dtype),
    "overlap": optional(function("(first, second) that runs both passes")),
    "timeout": Wanted(
        f"a number of seconds from {SHORTEST_S:g} to {LONGEST_S:.0f}",
        lambda given: NUMBER.accepts(given) and SHORTEST_S <= given <= LONGEST_S,
    ),
    "hooks": Wanted("a list or tuple of hooks", each(object).accepts),
    "on_loss": optional(function("(microbatch, loss)")),
    "pace": optional(Costs),
    "transport": instance(str, Endpoint),
}
"""What each argument must be. Whether names are known and values fit each other is judged where they are used."""


def refuse_unreachable(options: PipelineOptions) -> None:
    """Raise `InputError` where this rank cannot even talk to others: no process group, another one, or something else in its place."""
    given: object = options.group
    is_outside = given is dist.GroupMember.NON_GROUP_MEMBER
    if not is_outside:
        require("Pipeline: group", given, optional(dist.ProcessGroup))
    if isinstance(options.transport, Endpoint):
        return
    if not dist.is_initialized():
        raise InputError("a Pipeline connects the ranks of a process group: call torch.distributed.init_process_group first")
    if is_outside or _rank_in(options.group) < 0:
        raise InputError("Pipeline: this rank is not in `group`: make a Pipeline on the ranks of the group alone")


def _rank_in(group: dist.ProcessGroup | None) -> int:
    """This rank's number in the group, below 0 where it has none there."""
    try:
        return dist.get_rank(group)
    except ValueError as error:
        raise InputError(f"Pipeline: group cannot be used on this rank: {error}") from error


def refuse_wrong(options: PipelineOptions) -> None:
    """Raise `InputError` with every argument that is not what it must be."""
    faults = faults_in(options)
    if faults:
        raise InputError(faults)


def faults_in(options: PipelineOptions) -> str:
    """Every argument that is not what it must be, in one sentence; empty where all are."""
    return "; ".join(
        fault for field in fields(options) if field.name in WANTED for fault in _faults(field.name, getattr(options, field.name))
    )


def _faults(name: str, value: Any) -> list[str]:
    try:
        require(name, value, WANTED[name])
    except InputError as error:
        return [str(error)]
    return []


def usable_timeout(options: PipelineOptions) -> float:
    """The timeout, or the usual one where it is none: ranks need one to tell each other that it is wrong."""
    return options.timeout if not _faults("timeout", options.timeout) else TIMEOUT


def planned_schedule(given: Solved | Plan | LayersPlan) -> Schedule:
    """The schedule of a plan; raises `InputError` for one that found none."""
    solved = given.solved if isinstance(given, LayersPlan) else given.best if isinstance(given, Plan) else given
    if solved.schedule is None:
        raise InputError("this plan has no schedule, because none fits into its limits; give one that has")
    return solved.schedule
