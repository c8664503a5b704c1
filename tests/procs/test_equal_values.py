"""Copies of a parameter have equal values, or the step that first finds other values raises one error on every rank.

Each case changes gradients or weights between two steps, as a rank's own code may.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerobubble as zb
from tests.procs.ranks import Ranks
from tests.procs.test_equal_optimizers import TOKENS, Language, loss_fn
from tests.refusals import states
from zerobubble.runtime.hooks.equal_values import Measure

Named = list[tuple[str, nn.Parameter]]


def gradient_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def add_noise(named: Named, optimizer: torch.optim.Optimizer, draws: torch.Generator) -> None:
    for _, parameter in named:
        gradient_of(parameter).add_(0.1 * torch.randn(parameter.shape, generator=draws, dtype=parameter.dtype))
    optimizer.step()


def freeze_row(named: Named, optimizer: torch.optim.Optimizer, draws: torch.Generator) -> None:
    for name, parameter in named:
        if name == "tok.weight":
            gradient_of(parameter)[0] = 0
    optimizer.step()


def skip(named: Named, optimizer: torch.optim.Optimizer, draws: torch.Generator) -> None:
    if not any(name == "tok.weight" for name, _ in named):
        optimizer.step()


def reset_row(named: Named, optimizer: torch.optim.Optimizer, draws: torch.Generator) -> None:
    optimizer.step()
    for name, parameter in named:
        if name == "head.weight":
            parameter.data[3] = 0.0


def scale(named: Named, optimizer: torch.optim.Optimizer, draws: torch.Generator) -> None:
    for _, parameter in named:
        gradient_of(parameter).mul_(0.5)
    optimizer.step()


CHANGES: dict[str, Callable[[Named, torch.optim.Optimizer, torch.Generator], None]] = {
    "noise": add_noise,
    "a row of one place": freeze_row,
    "a skipped step": skip,
    "values of one place": reset_row,
    "alike": scale,
}


def train(group: Any, case: str) -> tuple[int, str]:
    """Returns the steps that ran, and the error."""
    done = 0
    draws = torch.Generator().manual_seed(0)
    try:
        with zb.Pipeline(zb.split(Language(), example=TOKENS[:1]), "1f1b", 4, loss_fn, group=group) as pipe:
            named = [entry for module in pipe.modules.values() for entry in module.named_parameters()]
            optimizer = torch.optim.SGD([parameter for _, parameter in named], lr=0.5, momentum=0.9)
            for _ in range(3):
                pipe.step(TOKENS, TOKENS.roll(-1, 1))
                done += 1
                CHANGES[case](named, optimizer, draws)
                optimizer.zero_grad()
    except zb.PipelineError as error:
        return done, str(error)
    return done, ""


def cases(group: Any) -> dict[str, tuple[int, str]]:
    return {case: train(group, case) for case in CHANGES}


def test_copies_that_drift_apart_are_refused_in_the_next_step(world: Ranks) -> None:
    for results in world.run(cases, ranks=2):
        assert results.pop("alike") == (3, "")
        assert len(results) == 4
        for done, text in results.values():
            assert done == 1
            states(text, "'tok.weight'", "'head.weight'", "rank 0", "rank 1")


def stage(index: int, num_stages: int) -> nn.Module:
    torch.manual_seed(index)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh())


def copied(group: Any, noise: float) -> str:
    """Trains on two routes, of which the last rank adds noise to its weights."""
    x = torch.rand(8, 8, generator=torch.Generator().manual_seed(0))
    try:
        with zb.Pipeline(stage, "dualpipe", 4, nn.functional.mse_loss, group=group) as pipe:
            optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1)
            for _ in range(2):
                pipe.step(x, x)
                optimizer.step()
                optimizer.zero_grad()
                for parameter in pipe.parameters():
                    parameter.data.add_(noise * dist.get_rank(group))
        return ""
    except zb.PipelineError as error:
        return str(error)


def test_routes_that_drift_apart_are_refused(world: Ranks) -> None:
    assert world.run(copied, 0.0, ranks=2) == ["", ""]
    for text in world.run(copied, 0.01, ranks=2):
        states(text, "0.weight", "rank 0", "rank 1")


@pytest.mark.in_process
def test_values_are_close_up_to_rounding_and_where_they_are_not_finite() -> None:
    first = Measure(1.0, 2.0)
    assert first.is_close(Measure(1.0 + 1e-7, 2.0), 1e-6)
    assert not first.is_close(Measure(1.0 + 1e-5, 2.0), 1e-6)
    assert not first.is_close(Measure(1.0, 2.0 - 1e-5), 1e-6)
    assert first.is_close(Measure(float("nan"), float("inf")), 1e-6)
