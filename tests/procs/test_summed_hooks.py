"""Hooks on the gradient of a parameter see its sum over microbatches, places and replicas, once per step, as on one device.

An optimizer may step in such a hook. One that steps within the backward pass of a microbatch is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import zerobubble as zb
from tests.procs.meshes import init_device_mesh
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


def descend(parameter: nn.Parameter, seen: list[float]) -> None:
    """Changes the parameter itself and frees the gradient, as LOMO does."""

    def step(parameter: Tensor) -> None:
        parameter.data.add_(parameter.grad, alpha=-0.1)  # type: ignore[arg-type]
        parameter.grad = None

    parameter.register_post_accumulate_grad_hook(step)


def step_early(parameter: nn.Parameter, seen: list[float]) -> None:
    optimizer = torch.optim.Adam([parameter], lr=0.01)

    def step(parameter: Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    parameter.register_post_accumulate_grad_hook(step)


KINDS: dict[str, Hooks] = {
    "clamp": clamp,
    "normalize and log": normalize_and_log,
    "clamp afterwards": clamp_afterwards,
    "only once": only_once,
    "descend": descend,
    "step early": step_early,
}


def add_hooks(model: Language, hooks: Hooks) -> list[float]:
    """Returns the list to which the hooks on the tied parameter add what they see."""
    seen: list[float] = []
    for parameter in model.parameters():
        hooks(parameter, seen if parameter is model.tok.weight else [])
    return seen


def train(step: Callable[[], Any], parameters: Any) -> None:
    """Trains three steps, of which the first two make an update with accumulated gradients."""
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for number in range(3):
        step()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()


def difference(group: Any, schedule: str, kind: str, *, before_split: bool) -> float:
    """Returns the largest difference of the rank's weights, and of what hooks saw, from one device with the whole batch."""
    whole = Language()

    def backward() -> None:
        loss_fn(whole(TOKENS), TOKENS.roll(-1, 1)).backward()

    seen_alone = add_hooks(whole, KINDS[kind])
    train(backward, whole.parameters())
    model = Language()
    seen = add_hooks(model, KINDS[kind]) if before_split else []
    with zb.Pipeline(zb.split(model, example=TOKENS[:1]), schedule, 4, loss_fn, group=group) as pipe:
        if not before_split:
            seen = add_hooks(model, KINDS[kind])
        train(lambda: pipe.step(TOKENS, TOKENS.roll(-1, 1)), pipe.parameters())
        of_model = dict(whole.named_parameters(remove_duplicate=False))
        named = [entry for module in pipe.modules.values() for entry in module.named_parameters()]
    holds = any(name in ("tok.weight", "head.weight") for name, _ in named)
    assert len(seen) == len(seen_alone) * holds
    differences = [(parameter - of_model[name]).abs().max().item() for name, parameter in named]
    return max(*differences, *(abs(a - b) for a, b in zip(seen, seen_alone, strict=False)))


def differences(group: Any) -> dict[str, float]:
    return {
        f"{kind}, {schedule}": difference(group, schedule, kind, before_split=before_split)
        for schedule, before_split in (("1f1b", True), ("zb-v", False))
        for kind in KINDS
    }


def test_hooks_on_a_parameter_see_the_sum_of_its_gradients(world: Ranks) -> None:
    for results in world.run(differences, ranks=2):
        assert len(results) == 2 * len(KINDS)
        assert results == pytest.approx(dict.fromkeys(results, 0.0), abs=1e-9)


def layer(stage: int) -> nn.Linear:
    torch.manual_seed(stage)
    return nn.Linear(6, 6, dtype=torch.float64)


def clamp_all(module: nn.Module, calls: list[int]) -> None:
    for parameter in module.parameters():
        clamp(parameter, [])
        parameter.register_post_accumulate_grad_hook(lambda _: calls.append(1))


def with_replicas(group: Any, dimension: str, scale: str) -> tuple[float, int, int]:
    """Returns the largest difference of a gradient from one device, the number of parameters, and the calls of hooks after two steps."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=(dimension, "pp"))
    calls: list[int] = []

    def build(stage: int, num_stages: int) -> nn.Module:
        module: nn.Module = layer(stage)
        if dimension == "dp_shard":
            module = fully_shard(module, mesh=mesh[dimension])
        clamp_all(module, calls)
        return module

    x = torch.linspace(-1, 1, 48, dtype=torch.float64).view(8, 6)
    whole = nn.Sequential(layer(0), layer(1))
    clamp_all(whole, [])
    for _ in range(2):
        nn.functional.mse_loss(whole(x), x.cos()).backward()
    mine = x.chunk(2)[mesh.get_local_rank(dimension)]
    with zb.Pipeline(build, "zb-h1", 2, nn.functional.mse_loss, mesh=mesh, scale=scale) as pipe:
        for _ in range(2):
            pipe.step(mine, mine.cos())
        num_calls = len(calls)
        pipe.profile(mine, mine.cos())
        assert len(calls) == num_calls
        (expected,) = (list(whole[stage].parameters()) for stage in pipe.modules)
        gradients = [parameter.grad for module in pipe.modules.values() for parameter in module.parameters()]
        found = [getattr(gradient, "full_tensor", lambda gradient=gradient: gradient)() for gradient in gradients]
        return max((a - b.grad).abs().max().item() for a, b in zip(found, expected, strict=True)), len(expected), num_calls


@pytest.mark.parametrize(("dimension", "scale"), [("dp", "loss"), ("dp", "gradients"), ("dp_shard", "loss")])
def test_hooks_see_the_sum_over_replicas(world: Ranks, dimension: str, scale: str) -> None:
    for error, num_parameters, num_calls in world.run(with_replicas, dimension, scale, ranks=4):
        assert error < 1e-12
        assert num_calls == 2 * num_parameters


def fail(gradient: Tensor) -> None:
    raise ArithmeticError("5 of 7")


def failed(group: Any, kind: str) -> tuple[str, int]:
    """Returns the error of a step, and the hooks that the parameter has afterwards."""
    model = Language()
    parameter = model.tok.weight if kind == "fails" else next(model.blocks.parameters())
    optimizer = torch.optim.SGD([parameter])
    with zb.Pipeline(zb.split(model, example=TOKENS[:1]), "1f1b", 4, loss_fn, group=group) as pipe:
        if kind == "fails":
            parameter.register_hook(fail)
        elif dist.get_rank(group) == 0:
            model.blocks[0].register_full_backward_hook(lambda *_: optimizer.step())
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
