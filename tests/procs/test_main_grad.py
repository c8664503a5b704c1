"""`main_grad`: gradients of a bfloat16 model, accumulated in float32 as on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from tests.device import DEVICE
from tests.procs.models import batch, build, loss_fn
from tests.procs.ranks import Ranks
from tests.refusals import states

MICROBATCHES = 4


def half(stage: int, num_stages: int) -> nn.Module:
    return build(stage, num_stages, width=8, dtype=torch.bfloat16)


def summed_by_one_device(stages: list[nn.Module], inputs: Tensor, targets: Tensor) -> None:
    """Every microbatch's gradient, added in float32 to `main_grad`."""
    for x, y in zip(inputs.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True):
        (loss_fn(nn.Sequential(*stages)(x), y) / MICROBATCHES).backward()
        for parameter in nn.Sequential(*stages).parameters():
            gradient = parameter.grad.float()
            before = getattr(parameter, "main_grad", None)
            parameter.main_grad = gradient if before is None else before + gradient
            parameter.grad = None


def train(group: Any, name: str) -> dict[str, float]:
    """The largest difference to one device relative to its gradient, before and after clipping, and of the norm."""
    with zb.Pipeline(half, name, MICROBATCHES, loss_fn, group=group, main_grad=torch.float32) as pipe:
        stages = [half(s, pipe.schedule.num_stages) for s in range(pipe.schedule.num_stages)]
        for seed in range(2):
            inputs, targets = batch(MICROBATCHES, seed)
            pipe.step(inputs, targets)
            summed_by_one_device(stages, inputs, targets)
        errors = {"summed": worst(pipe, stages)}
        parameters = list(nn.Sequential(*stages).parameters())
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(p.main_grad) for p in parameters]))
        errors["norm"] = abs(pipe.clip_grad_norm_(0.01) / norm - 1).item()
        for parameter in parameters:
            parameter.main_grad *= 0.01 / norm
        return errors | {"clipped": worst(pipe, stages)}


def worst(pipe: zb.Pipeline, stages: list[nn.Module]) -> float:
    found = 0.0
    for index, module in pipe.modules.items():
        for mine, theirs in zip(module.parameters(), stages[index].parameters(), strict=True):
            assert mine.grad is None
            assert mine.main_grad.dtype == torch.float32
            found = max(found, ((mine.main_grad - theirs.main_grad).norm() / theirs.main_grad.norm()).item())
    return found


@pytest.mark.parametrize(("name", "tolerance"), [("1f1b", 0), ("zb-h1", 0), ("chimera", 1e-6)])
def test_gradients_are_summed_in_float32(world: Ranks, name: str, tolerance: float) -> None:
    for errors in world.run(train, name, ranks=2):
        assert errors["summed"] <= tolerance
        assert errors["norm"] <= 1e-5
        assert errors["clipped"] <= 1e-3


def refused(group: Any, make_stage: Any, main_grad: torch.dtype) -> str:
    with pytest.raises(zb.InputError) as found:
        zb.Pipeline(make_stage, "1f1b", MICROBATCHES, loss_fn, group=group, main_grad=main_grad)
    return str(found.value)


def test_a_type_that_cannot_hold_a_gradient_is_refused(world: Ranks) -> None:
    for result in world.run(refused, half, torch.int32, ranks=2):
        states(result, "main_grad", "torch.int32")


def complex_stage(stage: int, num_stages: int) -> nn.Module:
    return nn.Linear(2, 2, dtype=torch.complex64)


def test_complex_parameters_are_refused(world: Ranks) -> None:
    for result in world.run(refused, complex_stage, torch.float32, ranks=2):
        states(result, "weight", "torch.float32")


def post_validated(group: Any) -> str:
    with zb.Pipeline(half, "zb-h1", MICROBATCHES, loss_fn, group=group, main_grad=torch.float32) as pipe:
        with pytest.raises((zb.InputError, zb.PipelineError)) as found:
            zb.PostValidation(torch.optim.SGD(pipe.parameters(), lr=0.1), pipe)
        return str(found.value)


def test_post_validation_refuses_gradients_that_no_optimizer_sees(world: Ranks) -> None:
    for result in world.run(post_validated, ranks=2):
        states(result, "main_grad", "None")


def scaled(group: Any, spoiled: bool) -> tuple[float, bool]:
    """The largest difference between unscaled sums and those of a step without a scaler, and whether the step was taken."""
    sums: list[list[Tensor]] = []
    for scaler in (None, torch.amp.GradScaler(DEVICE.type, init_scale=4.0)):
        with zb.Pipeline(half, "zb-h1", MICROBATCHES, loss_fn, group=group, main_grad=torch.float32) as pipe:
            pipe.step(*batch(MICROBATCHES), scaler=scaler)
            if scaler is not None:
                if spoiled and group.rank() == 0:
                    next(pipe.parameters()).main_grad[0] = torch.inf
                masters = [p.detach().float().requires_grad_() for p in pipe.parameters()]
                optimizer = torch.optim.SGD(masters, lr=0.1)
                pipe.unscale_(scaler, optimizer)
                for master, parameter in zip(masters, pipe.parameters(), strict=True):
                    master.grad = parameter.main_grad
                before = [master.detach().clone() for master in masters]
                scaler.step(optimizer)
                stepped = any(not torch.equal(a, b) for a, b in zip(before, masters, strict=True))
            sums.append([p.main_grad for p in pipe.parameters()])
    return max((a - b).abs().max().item() for a, b in zip(*sums, strict=True)), stepped


@pytest.mark.long
def test_a_scaler_unscales_main_grad_and_every_rank_leaves_out_the_same_steps(world: Ranks) -> None:
    for difference, stepped in world.run(scaled, False, ranks=2):
        assert difference == 0
        assert stepped
    assert [stepped for _, stepped in world.run(scaled, True, ranks=2)] == [False, False]


def described(group: Any) -> zb.nn.SplitReport:
    with zb.Pipeline(half, "zb-h1", MICROBATCHES, loss_fn, group=group, main_grad=torch.float32) as pipe:
        return pipe.describe(*batch(MICROBATCHES))[0]


def test_what_stays_in_b_is_reported_under_main_grad_too(world: Ranks) -> None:
    for report in world.run(described, ranks=2):
        assert report.share == 1.0
        assert ("1.norm.weight", "LayerNorm") in [(each.parameter, each.vector_of) for each in report.in_b]
