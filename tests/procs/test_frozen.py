"""Frozen stages: no unneeded gradient is computed or sent, `describe` reports that, and every rank can make an optimizer.

Below the lowest stage that trains, nothing is computed, sent or waited for in the backward pass.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerobubble as zb
from tests.device import DEVICE
from tests.procs.meshes import init_device_mesh
from tests.procs.models import InBackward, batch, build, gradient_error, loss_fn, one_device
from tests.procs.ranks import Ranks
from tests.procs.signs import await_signs
from tests.procs.test_fault_injection import MOMENTS, struck
from tests.refusals import states


def with_frozen(stage: int, num_stages: int, frozen: tuple[int, ...]) -> nn.Module:
    return build(stage, num_stages).requires_grad_(stage not in frozen)


def train(group: Any, name: str, frozen: tuple[int, ...], transport: str, folder: Path) -> tuple[float, list[str]]:
    """The error of the gradients after two steps, and what the stages say of themselves.

    In the second step the last gradient of the loss comes only when ranks 0 and 1 are at the end of their rows, which they say by signs.
    """
    num_stages = 4
    make = partial(with_frozen, frozen=frozen)
    at_the_end = [folder / str(rank) for rank in (0, 1)]
    left: list[int] = []  # how many gradients of the loss come after each one that is still to come

    def await_the_frozen(gradient: Tensor) -> Tensor:
        if left and not left.pop():
            await_signs(*at_the_end)
        return gradient

    def loss_that_waits(logits: Tensor, targets: Tensor) -> Tensor:
        return loss_fn(InBackward.apply(logits, await_the_frozen), targets)

    with zb.Pipeline(make, name, 4, loss_that_waits, group=group, transport=transport) as pipe:
        message = str(pipe.describe(*batch(4))).splitlines()
        pipe.step(*batch(4))
        left += range(4)
        with struck(MOMENTS["after"], at_the_end[pipe.rank].touch) if pipe.rank < 2 else nullcontext():
            pipe.step(*batch(4))
        oracle = [make(stage, num_stages) for stage in range(num_stages)]
        for _ in range(2):
            one_device(oracle, 4, *batch(4))
        return gradient_error(pipe, oracle), [line for line in message if line.startswith("stage")]


@pytest.mark.sweep
@pytest.mark.parametrize("transport", ["gloo", "shared-memory"])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_below_the_lowest_stage_that_trains_there_are_forwards_alone(world: Ranks, name: str, transport: str, tmp_path: Path) -> None:
    """No frozen stage waits for a gradient: the last one of the loss waits until these stages are at the end of the step."""
    for error, result in world.run(train, name, (0, 1, 3), transport, tmp_path, ranks=4):
        assert error < 1e-12
        alone = "only F, nothing trains here and no input needs a gradient"
        assert result[:2] == [f"stage 0: {alone}", f"stage 1: {alone}"]
        assert not result[2].endswith("nothing trains here")
        states(result[3], "stage 3", "F", "B")


class Doubled(nn.Module):
    """A stage without parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def optimize(group: Any, validates_late: bool) -> tuple[float, int]:
    """Two steps of an optimizer of what trains on each rank, nothing on stages 1 and 2: the error of the parameters, and their number."""

    def make(stage: int, num_stages: int) -> nn.Module:
        return Doubled() if stage == 1 else with_frozen(stage, num_stages, (2,))

    with zb.Pipeline(make, "zb-h1", 4, loss_fn, group=group) as pipe:
        trained = [p for p in pipe.parameters() if p.requires_grad]
        own = torch.optim.AdamW(trained, lr=0.1, foreach=True)
        optimizer: Any = zb.hooks.PostValidation(own, pipe, max_norm=0.5) if validates_late else own
        oracle = [make(stage, 4) for stage in range(4)]
        theirs = torch.optim.AdamW([p for stage in oracle for p in stage.parameters()], lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            theirs.zero_grad()
            pipe.step(*batch(4))
            one_device(oracle, 4, *batch(4))
            if not validates_late:
                pipe.clip_grad_norm_(0.5)
            nn.utils.clip_grad_norm_([p for group in theirs.param_groups for p in group["params"]], 0.5)
            optimizer.step()
            theirs.step()
    pairs = [pair for stage, module in pipe.modules.items() for pair in zip(module.parameters(), oracle[stage].parameters(), strict=True)]
    return max([(a - b).abs().max().item() for a, b in pairs], default=0.0), sum(p.numel() for p in trained)


@pytest.mark.parametrize("validates_late", [True, False])
def test_a_rank_with_nothing_to_train_has_an_optimizer_too(world: Ranks, validates_late: bool) -> None:
    found = world.run(optimize, validates_late, ranks=4)
    assert all(error < 1e-9 for error, _ in found)
    assert [number == 0 for _, number in found] == [False, True, True, False]


class Detached(nn.Module):
    """A stage whose output has no graph."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.stage(x)
        return y.detach()


def detaching(stage: int, num_stages: int, which: int, frozen: tuple[int, ...] = ()) -> nn.Module:
    module = with_frozen(stage, num_stages, frozen)
    return Detached(module) if stage == which else module


class Reentrant(nn.Module):
    """A first stage in a checkpoint whose inputs, tokens, require no gradient."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.stage, x, use_reentrant=True)
        return y


def reentrant(stage: int, num_stages: int) -> nn.Module:
    module = with_frozen(stage, num_stages, (1, 2, 3))
    return Reentrant(module) if stage == 0 else module


def detached_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return loss_fn(logits, targets).detach()


def loss_as_number(logits: Tensor, targets: Tensor) -> Tensor:
    return torch.tensor(loss_fn(logits, targets).item())


def accuracy(logits: Tensor, targets: Tensor) -> Tensor:
    return (logits.argmax(-1) == targets).double().mean()


UNTRAINED: dict[str, tuple[Any, Any, str]] = {
    "frozen": (partial(with_frozen, frozen=(0, 1, 2, 3)), loss_fn, "no parameter of any stage"),
    "detached loss": (build, detached_loss, "loss_fn detaches it"),
    "number": (build, loss_as_number, "loss_fn detaches it"),
    "argmax": (build, accuracy, "loss_fn detaches it"),
    "last stage": (partial(detaching, which=1), loss_fn, "output of stage 1 does not require one although its parameters do"),
    "first stage": (partial(detaching, which=0, frozen=(1,)), loss_fn, "output of stage 0 does not require one although its parameters"),
    "reentrant checkpoint": (reentrant, loss_fn, "use_reentrant=False"),
    "frozen stage": (partial(detaching, which=1, frozen=(1,)), loss_fn, "output of stage 1 does not require one although its inputs do"),
}


def train_nothing(group: Any, case: str, schedule: str) -> tuple[str, int, bool]:
    """The error, how many parameters have a gradient, and whether the pipeline goes on."""
    make, loss, _ = UNTRAINED[case]
    with zb.Pipeline(make, schedule, 4, loss, group=group) as pipe:
        with pytest.raises(zb.InputError) as caught:
            pipe.step(*batch(4))
        evaluated, _ = pipe.eval_step(*batch(4))
        assert evaluated is not None
        return str(caught.value), sum(p.grad is not None for p in pipe.parameters()), bool(evaluated.isfinite())


@pytest.mark.sweep
@pytest.mark.parametrize(("case", "schedule"), [*((case, "zb-h1") for case in UNTRAINED), ("argmax", "chimera"), ("frozen", "zb-v")])
def test_a_step_that_trains_nothing_is_refused_with_the_reason(world: Ranks, case: str, schedule: str) -> None:
    first, second = world.run(train_nothing, case, schedule, ranks=2)
    assert first == second
    text, with_gradient, goes_on = first
    assert UNTRAINED[case][2] in text
    assert with_gradient == 0
    assert goes_on


def cut_off_in_replicas(group: Any, cut_off: tuple[int, ...]) -> tuple[str, int]:
    """The error of a step whose loss is detached in these replicas, and the number of parameters with a gradient."""
    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("dp", "pp"))
    loss = detached_loss if mesh.get_local_rank("dp") in cut_off else loss_fn
    with zb.Pipeline(build, "zb-h1", 4, loss, mesh=mesh) as pipe:
        try:
            pipe.step(*batch(4))
            text = ""
        except zb.InputError as error:
            text = str(error)
        return text, sum(p.grad is not None for p in pipe.parameters())


@pytest.mark.parametrize(("cut_off", "refused"), [((0, 1), True), ((0,), False)])
def test_replicas_decide_together_whether_anything_trains(world: Ranks, cut_off: tuple[int, ...], refused: bool) -> None:
    for text, with_gradient in world.run(cut_off_in_replicas, cut_off, ranks=4):
        assert ("loss_fn detaches it" in text) == refused
        assert (with_gradient == 0) == refused


def no_gradients_around(group: Any, context: str) -> tuple[str, bool]:
    with zb.Pipeline(build, "zb-h1", 4, loss_fn, group=group) as pipe:
        with getattr(torch, context)(), pytest.raises(zb.InputError) as caught:
            pipe.step(*batch(4))
        return str(caught.value), pipe.step(*batch(4)).item() > 0


@pytest.mark.parametrize("context", ["no_grad", "inference_mode"])
def test_a_step_without_gradients_around_it_is_refused(world: Ranks, context: str) -> None:
    for text, goes_on in world.run(no_gradients_around, context, ranks=2):
        assert f"torch.{context}()" in text
        assert goes_on


class Packed(nn.Module):
    """A frozen linear layer in 4 bits, two values in a byte, under a trained adapter, as in QLoRA. The bits are a buffer or a parameter."""

    def __init__(self, width: int, is_parameter: bool) -> None:
        super().__init__()
        weight = torch.randn(width, width, dtype=torch.float64) / width**0.5
        self.register_buffer("scale", weight.abs().amax(1, keepdim=True) / 7)
        bits = ((weight / self.scale).round() + 8).to(torch.uint8)
        packed = bits[:, ::2] * 16 + bits[:, 1::2]
        if is_parameter:
            self.packed: Tensor = nn.Parameter(packed, requires_grad=False)
        else:
            self.register_buffer("packed", packed)
        self.down = nn.Parameter(torch.randn(2, width, dtype=torch.float64))
        self.up = nn.Parameter(torch.full((width, 2), 0.01, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        bits = torch.stack((self.packed // 16, self.packed % 16), -1).flatten(1)
        return x @ ((bits - 8.0) * self.scale).T + x @ self.down.T @ self.up.T


def with_packed_weights(group: Any, name: str, is_parameter: bool) -> tuple[float, float]:
    """The loss of the third step, and that of one device."""
    x = torch.rand(8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(DEVICE)

    def model() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(*(nn.Sequential(Packed(8, is_parameter), nn.Tanh()) for _ in range(4))).to(DEVICE)

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([parameter for parameter in parameters if parameter.requires_grad], lr=0.5)

    whole = model()
    steps = optimizer(whole.parameters())
    with zb.Pipeline(zb.split(model(), example=x[:2]), name, 4, nn.functional.mse_loss, group=group) as pipe:
        own = optimizer(pipe.parameters())
        for _ in range(3):
            loss = pipe.step(x, x.sin()).item()
            own.step()
            own.zero_grad()
            expected = nn.functional.mse_loss(whole(x), x.sin())
            expected.backward()
            steps.step()
            steps.zero_grad()
        return loss, expected.item()


@pytest.mark.parametrize("is_parameter", [False, True])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_frozen_weights_in_4_bits_train_under_an_adapter(world: Ranks, name: str, is_parameter: bool) -> None:
    for loss, expected in world.run(with_packed_weights, name, is_parameter, ranks=2):
        assert loss == pytest.approx(expected, abs=1e-12)
