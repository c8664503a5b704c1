"""`zb.split` of language model families in Transformers: the loss and every gradient match one device in float64.

Covers every family that docs/models.md lists as supported, under 1F1B, ZB-V or a planned schedule.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from docs.models import cut_families
from tests.families import in_double_precision, next_token_loss, split_of, text, tiny_model
from tests.procs.exhaustive import EXHAUSTIVE
from tests.procs.ranks import Ranks

pytestmark = pytest.mark.spread

TOLERANCE = 1e-12
MICROBATCHES = 4
LEAST = 1e-6
"""A gradient is held to its norm, or where that is less, to this share of the largest: the bias of keys has none but rounding."""
ROUNDING = 1e-6
"""The error of losses of models that give their logits in float32, whatever type they are of."""
STRUCTURES = ("bloom", "gemma2", "gpt_neox", "mamba", "qwen2_moe", "zamba")
"""One family per structure: ALiBi, tied and scaled embeddings, parallel blocks, states, experts, shared blocks with embedding skips."""


FEW_PARTS = ("hrm_text",)
"""Families whose layers run in a loop, so that all of them are one part: for two stages."""


@cache
def planned() -> zb.Schedule:
    """A schedule that was planned for stages of unequal times on two ranks that hold two each."""
    costs = zb.Costs.from_ms([6, 10, 9, 4], [8, 9, 13, 6], [3, 8, 6, 5], comm=0.5)
    return zb.plan(costs, MICROBATCHES, placements=zb.Placement.vee(2), evaluations=200).schedule


def errors(group: Any, family: str, schedules: list[Any]) -> list[dict[str, float]]:
    """For each schedule, by name: the relative error of the loss and of the gradient of each parameter that this rank holds."""
    with in_double_precision():
        model = tiny_model(family)
        inputs, ids = text()
        wanted = one_device(copy.deepcopy(model), inputs, ids)
        split = split_of(model, inputs)
        return [errors_of(group, split, schedule, (inputs, ids), wanted) for schedule in schedules]


def errors_of(group: Any, split: Any, schedule: Any, batch: tuple[dict[str, Any], Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """The errors of a step with this schedule, after which no parameter has a gradient."""
    least = LEAST * max(gradient.norm().item() for name, gradient in wanted.items() if name != "loss")
    with zb.Pipeline(split, schedule, MICROBATCHES, next_token_loss, group=group) as pipe:
        found = {"loss": pipe.step(*batch)}
        for module in pipe.modules.values():
            found |= {name: gradient_of(parameter) for name, parameter in module.named_parameters(remove_duplicate=False)}
            assert not found.keys() - wanted.keys()
        for parameter in pipe.parameters():
            parameter.grad = None
    worst = {name: ((ours - wanted[name]).norm() / wanted[name].norm().clamp_min(least)).item() for name, ours in found.items()}
    if found["loss"].dtype == torch.float32 and worst["loss"] <= ROUNDING:
        del worst["loss"]
    return worst


def one_device(model: nn.Module, inputs: dict[str, Any], ids: Tensor) -> dict[str, Tensor]:
    """The loss and the gradients of the whole model, microbatch after microbatch."""
    total = torch.zeros(())
    for j in range(MICROBATCHES):
        part = {name: value.tensor_split(MICROBATCHES)[j] for name, value in inputs.items()}
        loss = next_token_loss(model(**part, use_cache=False), ids.tensor_split(MICROBATCHES)[j]) / MICROBATCHES
        loss.backward()
        total += loss.detach()
    return {"loss": total} | {name: gradient_of(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}


def gradient_of(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def judge(world: Ranks, family: str, schedules: list[Any]) -> None:
    names = {"loss", *(name for name, _ in tiny_model(family).named_parameters(remove_duplicate=False))}
    for result in zip(*world.run(errors, family, schedules, ranks=2, seconds=550), strict=True):
        assert {name for of_rank in result for name in of_rank} | {"loss"} == names
        assert not {name: error for of_rank in result for name, error in of_rank.items() if not error <= TOLERANCE}


@pytest.mark.long
@pytest.mark.parametrize("family", STRUCTURES)
def test_a_family_of_each_structure_has_one_devices_gradients(world: Ranks, family: str) -> None:
    judge(world, family, [planned()])


@pytest.mark.long
@pytest.mark.parametrize(("turn", "family"), [pytest.param(turn, name, id=name) for turn, name in enumerate(cut_families())])
def test_every_family_that_is_cut_has_one_devices_gradients(world: Ranks, turn: int, family: str) -> None:
    """Every family that docs/models.md says can be cut, on one of three schedules in turn, with ZEROBUBBLE_EXHAUSTIVE=1 on all three.

    The first schedule has two stages, and the others have four; the last is planned.
    """
    schedules = ["1f1b"] * 3 if family in FEW_PARTS else ["1f1b", "zb-v", planned()]
    judge(world, family, schedules if EXHAUSTIVE else [schedules[turn // 4 % 3]])
