"""Refuses one whole model in place of stages: every rank would run all of it as its stage, as programs for replicas do.

Ranks compare short digests of the stages that their users passed. Stages that `zb.split` made need no comparison.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from zerobubble.error_reports.user_code import warn_user
from zerobubble.errors import InputError
from zerobubble.runtime.split.stage_with_loss import stage_alone
from zerobubble.runtime.stage.rank_stages import Stages
from zerobubble.runtime.stage.whole_model import digest, kinds, sampled
from zerobubble.runtime.values.memory import local_part
from zerobubble.units import counted


class RankStages(NamedTuple):
    """The `stages` of a rank, and a digest of each; `are_modules` if the user passed modules and not a function."""

    stages: tuple[int, ...]
    digests: tuple[str, ...]
    are_modules: bool

    @classmethod
    def of(cls, stages: Stages, build_or_modules: Any) -> RankStages:
        """Returns the stages that Pipeline made from `build_or_modules`."""
        digests = tuple(stage_digest(stage_alone(module)) for module in stages.modules.values())
        return cls(tuple(stages.modules), digests, isinstance(build_or_modules, (nn.Module, Sequence)))


def refuse_uncut_models(pipelines: Iterable[Sequence[int]], gathered: Mapping[int, Any], *, warns: bool) -> None:
    """Compares the ranks of each pipeline by their `gathered` stages, None for stages that `zb.split` made."""
    for pipeline in pipelines:
        ranks = [RankStages(*gathered[rank]) for rank in pipeline if gathered[rank] is not None]
        digests = {of_stage for rank in ranks for of_stage in rank.digests}
        if len(ranks) == len(pipeline) and "" not in digests:
            _refuse_uncut_model(ranks, len({stage for rank in ranks for stage in rank.stages}), len(digests), warns=warns)


def _refuse_uncut_model(ranks: Sequence[RankStages], num_stages: int, num_digests: int, *, warns: bool) -> None:
    """Raises `InputError` if all ranks of a pipeline pass one module, or one list of different modules, for different stages.

    Several stages that a function builds, or a list has, may start equal: they share weights, or were seeded alike. So with `warns`,
    this is only warned of.
    """
    is_one_list = len({rank.digests for rank in ranks}) == 1 < len({rank.stages for rank in ranks})
    differ = len(ranks[0].digests) == 1 or num_digests > 1
    if is_one_list and differ and all(rank.are_modules for rank in ranks):
        raise InputError(
            "every rank passes {modules} with the same parameters, and the pipeline has {num_stages} different stages",
            argument="build_or_modules",
            modules=counted(len(ranks[0].digests), "module"),
            num_stages=num_stages,
            remedy="to cut one model into stages, pass zb.split(model); for stages that start equal, pass build(stage_index, num_stages)",
        )
    if warns and num_digests == 1 < num_stages:
        warn_user(
            f"all {num_stages} stages have the same layers and values, and microbatches pass through all of them in turn: to cut one model "
            "into stages, pass zb.split(model); for stages with values of their own, let build(stage_index, num_stages) not seed all alike"
        )


def stage_digest(module: nn.Module) -> str:
    """Returns a digest of the names, kinds and values of the parameters of a module.

    Empty if they do not identify it: if they cannot be read, or none has two different values, as in a new LayerNorm.
    """
    held = [local_part(parameter.detach()) for parameter in module.parameters()]
    samples = [sampled(tensor) for tensor in held if tensor.numel()]
    readable = [sample for sample in samples if sample is not None]
    if len(readable) < len(samples) or not any((sample != sample[0]).any() for sample in readable):
        return ""
    return hashlib.sha256(f"{kinds(module)}{list(map(digest, held))}".encode()).hexdigest()
