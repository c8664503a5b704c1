"""Hooks on the gradient of a tied parameter see the sum over its places, once per step, as on one device.

An optimizer that steps in such a hook of another parameter, within the backward pass of a microbatch, is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerobubble as zb
from tests.procs.ranks import Ranks
from tests.procs.test_equal_optimizers import TOKENS, Language, loss_fn
from tests.refusals import states

Hooks = Callable[[nn.Parameter, list[float]], Any]


def clamp(parameter: nn.Parameter, seen: list[float]) -> None:
    parameter.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


def normalize_and_log(parameter: nn.Parameter, seen: list[float]) -> None:
    parameter.register_hook(lambda gradient: gradient / gradient.norm())
    parameter.register_hook(lambda gradient: seen.append(gradient.square().sum().item()))


def clamp_afterwards(parameter: nn.Parameter, seen: list[float]) -> None:
    def write(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.clamp_(-1e-3, 1e-3)

    parameter.register_post_accumulate_grad_hook(write)


def only_once(parameter: nn.Parameter, seen: list[float]) -> None:
    def halve(gradient: Tensor) -> Tensor:
        handle.remove()
        return gradient.sign()

    handle = parameter.register_hook(halve)


KINDS: dict[str, Hooks] = {
    "clamp": clamp,
    "normalize and log": normalize_and_log,
    "clamp afterwards": clamp_afterwards,
    "only once": only_once,
}


def train(model: Language, step: Callable[[], Any], parameters: Any, hooks: Hooks) -> list[float]:
    """Trains five steps of two updates with accumulated gradients, and returns what the hooks have seen."""
    seen: list[float] = []
    hooks(model.tok.weight, seen)
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for number in range(5):
        step()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    return seen


def difference(group: Any, schedule: str, kind: str) -> float:
    """Returns the largest difference of the rank's weights, and of what hooks saw, from one device."""
    whole = Language()

    def backward() -> None:
        loss_fn(whole(TOKENS), TOKENS.roll(-1, 1)).backward()

    seen_alone = train(whole, backward, whole.parameters(), KINDS[kind])
    model = Language()
    with zb.Pipeline(zb.split(model, example=TOKENS[:1]), schedule, 4, loss_fn, group=group) as pipe:
        seen = train(model, lambda: pipe.step(TOKENS, TOKENS.roll(-1, 1)), pipe.parameters(), KINDS[kind])
        of_model = dict(whole.named_parameters(remove_duplicate=False))
        named = [entry for module in pipe.modules.values() for entry in module.named_parameters()]
    holds = any(name in ("tok.weight", "head.weight") for name, _ in named)
    assert len(seen) == len(seen_alone) * holds
    differences = [(parameter - of_model[name]).abs().max().item() for name, parameter in named]
    return max(*differences, *(abs(a - b) for a, b in zip(seen, seen_alone, strict=False)))


def differences(group: Any) -> dict[str, float]:
    return {f"{kind}, {schedule}": difference(group, schedule, kind) for schedule in ("1f1b", "zb-v") for kind in KINDS}


def test_hooks_on_a_tied_parameter_see_the_sum_of_its_gradients(world: Ranks) -> None:
    for results in world.run(differences, ranks=2):
        assert len(results) == 2 * len(KINDS)
        assert results == pytest.approx(dict.fromkeys(results, 0.0), abs=1e-9)


def fail(gradient: Tensor) -> None:
    raise ArithmeticError("5 of 7")


def step_in_backward(optimizer: torch.optim.Optimizer, parameter: Tensor) -> None:
    optimizer.step()


def failed(group: Any, kind: str) -> tuple[str, int]:
    """Returns the error of a step, and the hooks that the parameter has afterwards."""
    model = Language()
    parameter = model.tok.weight if kind == "fails" else next(model.blocks.parameters())
    with zb.Pipeline(zb.split(model, example=TOKENS[:1]), "1f1b", 4, loss_fn, group=group) as pipe:
        if kind == "fails":
            parameter.register_hook(fail)
        elif dist.get_rank(group) == 0:
            parameter.register_post_accumulate_grad_hook(partial(step_in_backward, torch.optim.SGD([parameter])))
        try:
            pipe.step(TOKENS, TOKENS.roll(-1, 1))
        except zb.PipelineError as error:
            hooks = [*(parameter._backward_hooks or {}), *(getattr(parameter, "_post_accumulate_grad_hooks", None) or {})]
            return str(error), len(hooks)
    return "", 0


def test_a_hook_that_fails_stays_on_its_parameter(world: Ranks) -> None:
    for text, hooks in world.run(failed, "fails", ranks=2):
        states(text, "ArithmeticError", foreign="5 of 7")
        assert hooks == 1


def test_an_optimizer_that_steps_within_the_backward_pass_of_a_microbatch_is_refused(world: Ranks) -> None:
    for text, _ in world.run(failed, "steps", ranks=2):
        states(text, "SGD", 4, "pipe.step", "rank 0")
