"""`scale="gradients"`: auxiliary losses from an autograd function match one device that divides its accumulated gradients.

`scale="none"`: the loss and its gradients are sums over microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import zerobubble as zb
from tests.device import DEVICE, cpu_only
from tests.procs.meshes import init_device_mesh
from tests.procs.models import batch, build, gradient_error, loss_fn
from tests.procs.ranks import Ranks
from tests.procs.test_mesh import whole
from tests.procs.versions import needs_fsdp2_on_cpu, needs_scale_grads
from tests.refusals import states
from zerobubble.hooks import StepHook

COUNT = 3
"""Of microbatches: no power of 2, by which scaling would be exact."""


class AddAuxiliaryLoss(torch.autograd.Function):
    """A tensor as it is; `loss` has a gradient of 1 in every backward pass, as in the published code of DeepSeek-V2."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        return dy, torch.ones((), dtype=dy.dtype)


class Routed(nn.Module):
    """A stage whose router injects a balancing loss."""

    def __init__(self, stage: int, num_stages: int) -> None:
        super().__init__()
        self.inner = build(stage, num_stages)
        self.router = nn.Linear(11 if stage == num_stages - 1 else 6, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        aux = self.router(y).softmax(-1).mean((0, 1)).square().sum()
        injected: Tensor = AddAuxiliaryLoss.apply(y, aux)  # type: ignore[no-untyped-call]
        return injected


def tokens(targets: Tensor) -> Tensor:
    return (targets[..., 0] + 1).sum()


def oracle(stages: Sequence[nn.Module], parts: Sequence[tuple[Tensor, Tensor]], weigh: Any = len, scale: float = 1.0) -> None:
    """One device: losses gone back from as they are, weighted where weights differ, and the accumulated gradients divided."""
    parameters = list(nn.ModuleList(stages).parameters())
    earlier = [parameter.grad for parameter in parameters]
    nn.ModuleList(stages).zero_grad()
    total = sum(float(weigh(y)) for _, y in parts)
    for x, y in parts:
        (scale * loss_fn(nn.Sequential(*stages)(x), y) * (float(weigh(y)) * len(parts) / total)).backward()
    for parameter, before in zip(parameters, earlier, strict=True):
        assert parameter.grad is not None
        parameter.grad.div_(len(parts) * scale)
        if before is not None:
            parameter.grad.add_(before)


def cut(inputs: Tensor, targets: Tensor, count: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(inputs.tensor_split(count), targets.tensor_split(count), strict=True))


class Heard(StepHook):
    """Keeps the gradients that are reported to hooks as ready."""

    def __init__(self) -> None:
        self.gradients: dict[nn.Parameter, Tensor] = {}

    def on_stage_gradients_ready(self, stage: int, parameters: Sequence[nn.Parameter]) -> None:
        self.gradients |= {parameter: parameter.grad.clone() for parameter in parameters if parameter.grad is not None}


def two_steps(group: Any, schedule: str, options: dict[str, Any]) -> float:
    """The error of gradients that two steps have added up."""
    heard = Heard()
    with zb.Pipeline(Routed, schedule, 4, loss_fn, scale="gradients", group=group, hooks=[heard], **options) as pipe:
        stages = [Routed(s, pipe.schedule.num_stages) for s in range(pipe.schedule.num_stages)]
        count = COUNT if schedule != "chimera" else 4
        for seed in range(2):
            inputs, targets = batch(count, seed=seed)
            pipe.step(inputs, targets, num_microbatches=count)
            oracle(stages, cut(inputs, targets, count), options.get("loss_weight", len))
        for parameter in pipe.parameters() if "main_grad" in options else ():
            parameter.grad = parameter.main_grad.clone()  # type: ignore[attr-defined]
        if "main_grad" not in options:
            assert all(torch.equal(heard.gradients[p], p.grad) for p in pipe.parameters() if p.grad is not None)
        return gradient_error(pipe, stages)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("zb-h1", {}),
        ("zb-v", {"loss_weight": tokens}),
        ("chimera", {}),
        ("1f1b", {"split": "graph"}),
        ("zb-h1", {"main_grad": torch.float64}),
    ],
)
def test_injected_losses_count_as_on_one_device(world: Ranks, schedule: str, options: dict[str, Any]) -> None:
    assert max(world.run(two_steps, schedule, options, ranks=2)) < 1e-12


def over_replicas(group: Any, dimension: str) -> float:
    """The error of the clipped gradients of replicas, which play other numbers of microbatches where nothing gathers in lockstep."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=(dimension, "pp"))
    replica = mesh.get_local_rank(dimension)
    counts = (COUNT, COUNT) if dimension == "dp_shard" else (COUNT, 2)
    shares = [batch(count, seed=seed) for seed, count in enumerate(counts)]

    def make(stage: int, num_stages: int) -> nn.Module:
        module = Routed(stage, num_stages)
        return fully_shard(module, mesh=mesh[dimension]) if dimension == "dp_shard" else module

    with zb.Pipeline(make, "zb-h1", COUNT, loss_fn, scale="gradients", mesh=mesh) as pipe:
        stages = [Routed(s, 2) for s in range(2)]
        pipe.step(*shares[replica], num_microbatches=counts[replica])
        norm = pipe.clip_grad_norm_(0.1)
        oracle(stages, [part for share, count in zip(shares, counts, strict=True) for part in cut(*share, count)])
        expected = nn.utils.clip_grad_norm_(nn.ModuleList(stages).parameters(), 0.1)
        found = [abs(norm - expected).item()]
        for index, module in pipe.modules.items():
            for ours, theirs in zip(module.parameters(), stages[index].parameters(), strict=True):
                assert ours.grad is not None
                assert theirs.grad is not None
                found.append((whole(ours.grad) - theirs.grad).abs().max().item())
        return max(found)


@pytest.mark.parametrize("dimension", ["dp", pytest.param("dp_shard", marks=needs_fsdp2_on_cpu)])
def test_replicas_count_injected_losses_by_the_mean_over_the_whole_batch(world: Ranks, dimension: str) -> None:
    assert max(world.run(over_replicas, dimension, ranks=4)) < 1e-12


def with_optimizer(group: Any, validates_late: bool, scaled: bool) -> float:
    """The error of parameters after clipped steps of tied stages, the gradients scaled by a GradScaler or not."""
    tied = [[(s, "router.bias") for s in range(2)]]
    with zb.Pipeline(Routed, "zb-h1", COUNT, loss_fn, scale="gradients", tied=tied, group=group) as pipe:
        stages = [Routed(s, 2) for s in range(2)]
        stages[1].router.bias = stages[0].router.bias
        own, theirs = (torch.optim.SGD(p, lr=0.1) for p in (pipe.parameters(), nn.ModuleList(stages).parameters()))
        scaler = torch.amp.GradScaler(DEVICE.type, init_scale=1024.0) if scaled else None
        ours = zb.PostValidation(own, pipe, max_norm=0.5) if validates_late else own
        for seed in range(3):
            inputs, targets = batch(COUNT, seed=seed)
            ours.zero_grad()
            pipe.step(inputs, targets, scaler=scaler)
            if scaler is not None:
                pipe.unscale_(scaler, own)
            if not validates_late:
                pipe.clip_grad_norm_(0.5)
            if scaler is None:
                ours.step()
            else:
                scaler.step(own)
                scaler.update()
            theirs.zero_grad()
            oracle(stages, cut(inputs, targets, COUNT), scale=1024.0 if scaled else 1.0)
            nn.utils.clip_grad_norm_(nn.ModuleList(stages).parameters(), 0.5)
            theirs.step()
        if validates_late:
            ours.settle()
        pairs = [pair for s, module in pipe.modules.items() for pair in zip(module.parameters(), stages[s].parameters(), strict=True)]
        return max((a - b).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize(("validates_late", "scaled"), [(True, False), (False, True), (False, False)])
def test_clipped_steps_of_tied_stages_are_those_of_one_device(world: Ranks, validates_late: bool, scaled: bool) -> None:
    assert max(world.run(with_optimizer, validates_late, scaled, ranks=2)) < 1e-12


def with_torch(group: Any) -> tuple[float, float]:
    """The error of each way to scale against torch.distributed.pipelining with its `scale_grads`."""
    rank = group.rank()
    theirs = Routed(rank, 2)
    stage = PipelineStage(theirs, rank, 2, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, COUNT, loss_fn=loss_fn, scale_grads=True)
    inputs, targets = batch(COUNT)
    schedule.step(*((inputs,) if rank == 0 else ()), **({"target": targets} if rank else {}))
    stages = [theirs, theirs]
    found = []
    for scale in ("gradients", "loss"):
        with zb.Pipeline(Routed, "1f1b", COUNT, loss_fn, scale=scale, group=group) as pipe:
            pipe.step(inputs, targets)
            found.append(gradient_error(pipe, stages))
    return found[0], found[1]


@cpu_only("torch's pipelining over gloo needs tensors on CPUs")
@needs_scale_grads
def test_gradients_are_scaled_as_torch_scales_them(world: Ranks) -> None:
    for scaled_gradients, scaled_loss in world.run(with_torch, ranks=2):
        assert scaled_gradients < 1e-12
        assert scaled_loss > 1e-3  # the injected losses count as many times as there are microbatches


def summed(group: Any, schedule: str, split: str) -> tuple[float, float, float, list[float]]:
    """The error of gradients and of the loss of two steps that sum their losses, and what an evaluation and `on_loss` have."""
    heard: list[float] = []
    options: dict[str, Any] = {"split": split, "on_loss": lambda _, loss: heard.append(loss.item())}
    with zb.Pipeline(Routed, schedule, COUNT, loss_fn, scale="none", group=group, **options) as pipe:
        stages = [Routed(s, pipe.schedule.num_stages) for s in range(pipe.schedule.num_stages)]
        worst = 0.0
        for seed in range(2):
            inputs, targets = batch(COUNT, seed=seed)
            loss = pipe.step(inputs, targets).item()
            expected = 0.0
            for x, y in cut(inputs, targets, COUNT):
                alone = loss_fn(nn.Sequential(*stages)(x), y)
                alone.backward()
                expected += alone.item()
            worst = max(worst, abs(loss / expected - 1))
        heard.clear()
        mean, _ = pipe.eval_step(inputs, targets)
        assert mean is not None
        return gradient_error(pipe, stages), worst, mean.item(), heard


@pytest.mark.sweep
@pytest.mark.parametrize(("schedule", "split"), [("zb-v", "deferred"), ("1f1b", "whole"), ("zb-h1", "graph")])
def test_unscaled_losses_and_gradients_are_sums(world: Ranks, schedule: str, split: str) -> None:
    found = world.run(summed, schedule, split, ranks=2)
    assert max(error for error, _, _, _ in found) < 1e-12
    assert max(error for _, error, _, _ in found) < 1e-12
    evaluated = found[0][2]
    assert all(one[2] == evaluated for one in found)
    assert sum(loss for one in found for loss in one[3]) == pytest.approx(evaluated, rel=1e-12)


def refused(group: Any) -> Exception | None:
    try:
        zb.Pipeline(Routed, "zb-h1", COUNT, loss_fn, scale="none", loss_weight=tokens, group=group)
    except zb.InputError as error:
        return error
    return None


def test_unscaled_losses_have_no_weights(world: Ranks) -> None:
    for error in world.run(refused, ranks=2):
        assert error is not None
        states(error, "scale", "loss_weight")


def prompted(group: Any, scale: str) -> Tensor:
    """The gradient of a soft prompt."""

    def make(stage: int, num_stages: int) -> nn.Module:
        return nn.Linear(6, 6, dtype=torch.float64)

    with zb.Pipeline(make, "zb-h1", COUNT, nn.functional.mse_loss, scale=scale, group=group) as pipe:
        with torch.no_grad():
            for parameter in pipe.parameters():
                parameter.copy_(torch.linspace(-1, 1, parameter.numel(), dtype=torch.float64).view_as(parameter))
        prompt = torch.ones(2 * COUNT, 6, dtype=torch.float64, requires_grad=True)
        pipe.step(prompt, torch.zeros(2 * COUNT, 6, dtype=torch.float64))
        return torch.zeros(()) if prompt.grad is None else prompt.grad


def test_inputs_that_require_a_gradient_get_the_same_one_either_way(world: Ranks) -> None:
    scaled, plain = (world.run(prompted, scale, ranks=2)[0] for scale in ("gradients", "loss"))
    assert scaled.abs().max() > 0
    torch.testing.assert_close(scaled, plain)
