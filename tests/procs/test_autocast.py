"""Autocast around a step: forwards and losses run under it, backward and weight passes outside of it, as torch recommends."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import zerobubble as zb
from tests.device import DEVICE
from tests.procs.meshes import init_device_mesh
from tests.procs.models import batch, loss_fn
from tests.procs.ranks import Ranks
from tests.thinned import every
from zerobubble.runtime.split.layers.weight_work import CAN_SEE_HOOKS
from zerobubble.runtime.stage.stage import make_stage


class Mixed(nn.Module):
    """A Linear under autocast, and another one with autocast disabled."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.lowered, self.island, self.way = nn.Linear(16, 16), nn.Linear(16, 16), way
        self.matrix = nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "checkpoint":
            return checkpoint(self.run, x, use_reentrant=False)  # type: ignore[no-any-return]
        return self.run(x)

    def run(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.lowered(x))
        with torch.autocast(DEVICE.type, enabled=False):
            y = torch.tanh(self.island(y.float())) @ self.matrix
        return x + y


def stage_of(stage: int, num_stages: int, way: str) -> nn.Module:
    torch.manual_seed(stage)
    mixed: nn.Module = Mixed(way)
    if way == "compiled":
        mixed.compile(backend="aot_eager")
    first: list[nn.Module] = [nn.Embedding(11, 16)] if stage == 0 else []
    last: list[nn.Module] = [nn.Linear(16, 11)] if stage == num_stages - 1 else []
    return nn.Sequential(*first, mixed, *last)


def largest_error(group: Any, schedule: str, split: str, way: str) -> float:
    """The largest gradient error of a step under autocast, compared with one device that runs backward outside of autocast."""
    inputs, targets = batch(4)
    with zb.Pipeline(lambda s, n: stage_of(s, n, way), schedule, 4, loss_fn, group=group, split=split) as pipe:
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            pipe.step(inputs, targets)
        stages = [stage_of(s, pipe.schedule.num_stages, way) for s in range(pipe.schedule.num_stages)]
        for x, y in zip(inputs.chunk(4), targets.chunk(4), strict=True):
            with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
                loss = loss_fn(nn.Sequential(*stages)(x), y) / 4
            loss.backward()
        pairs = [pair for s, m in pipe.modules.items() for pair in zip(m.parameters(), stages[s].parameters(), strict=True)]
        return max(((mine.grad - theirs.grad).norm() / theirs.grad.norm()).item() for mine, theirs in pairs)


@pytest.mark.sweep
@pytest.mark.parametrize("way", ["plain", "checkpoint", "compiled"])
@pytest.mark.parametrize(("schedule", "split"), [("1f1b", "whole"), ("zb-h1", "deferred"), ("zb-v", "deferred"), ("zb-h1", "graph")])
def test_gradients_go_back_outside_of_autocast(world: Ranks, schedule: str, split: str, way: str) -> None:
    if (way, split) == ("compiled", "graph"):
        pytest.skip("a graph is traced from plain modules")
    if (way, split) == ("checkpoint", "graph") and not CAN_SEE_HOOKS:
        pytest.skip("a graph stage takes checkpoints from torch 2.8 on")
    assert max(world.run(largest_error, schedule, split, way, ranks=2)) <= 1e-6


class Symmetric(nn.Module):
    """A parametrization whose backward needs no saved tensor, so that `cached` may keep one weight for several microbatches."""

    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


def parametrized(stage: int, num_stages: int) -> nn.Module:
    """A stage whose weight torch caches in another form, under autocast and in `parametrize.cached()`."""
    torch.manual_seed(stage)
    layer = nn.Linear(16, 16)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    first: list[nn.Module] = [nn.Embedding(11, 16)] if stage == 0 else []
    return nn.Sequential(*first, layer, nn.Tanh(), nn.Linear(16, 16 if stage < num_stages - 1 else 11))


CACHES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "autocast": lambda: torch.autocast(DEVICE.type, dtype=torch.bfloat16),
    "parametrize": parametrize.cached,
}


def train_in(group: Any, schedule: str, cache: str, split: str, max_norm: float, *, waits: bool) -> list[float]:
    """Losses of steps inside a context that caches weights, clipped with or without a barrier."""
    losses = []
    with zb.Pipeline(parametrized, schedule, 4, loss_fn, group=group, split=split) as pipe:
        inner = torch.optim.AdamW(pipe.parameters(), lr=0.05)
        optimizer = None if waits else zb.PostValidation(inner, pipe, max_norm, undo="copy")
        for step in range(3):
            with CACHES[cache]():
                losses.append(pipe.step(*batch(4, seed=step)).item())
            if optimizer is None:
                pipe.clip_grad_norm_(max_norm)
            (optimizer or inner).step()
            inner.zero_grad()
    return losses


def losses_of_both(group: Any, *args: Any) -> list[list[float]]:
    return [train_in(group, *args, waits=waits) for waits in (True, False)]


@pytest.mark.sweep
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(("schedule", "split"), [("1f1b", "whole"), ("zb-h1", "deferred"), ("zb-v", "deferred")])
def test_a_step_taken_back_leaves_no_cached_weights(world: Ranks, schedule: str, split: str, cache: str) -> None:
    for expected, found in world.run(losses_of_both, schedule, cache, split, 0.05, ranks=2):
        assert found == expected


def is_used_after(write: Callable[[], object], module: nn.Module, cache: str) -> bool:
    """Whether a module uses the values that `write` puts into its weights, in the context that has cached the old ones."""
    x = torch.ones(2, 16)
    with CACHES[cache]():
        before = module(x)
        write()
        found = module(x)
    with CACHES[cache]():
        return torch.equal(module(x), found) and not torch.equal(found, before)


def first_values(group: Any, cache: str) -> list[bool]:
    """Whether this rank uses the values that a pipeline starts with: for a replica, and for a tied parameter."""
    mesh = init_device_mesh(DEVICE.type, (4, 1), mesh_dim_names=("dp", "pp"))
    weight = "0.parametrizations.weight.original"
    found = []
    for options in ({"mesh": mesh}, {"group": group, "tied": [[(0, weight), (1, weight)]]}):
        module = parametrized(1 + group.rank(), 6)
        found.append(is_used_after(lambda: zb.Pipeline(module, "gpipe", 4, loss_fn, **options).close(), module, cache))  # noqa: B023
    return found


@pytest.mark.parametrize("cache", CACHES)
def test_first_values_are_used_where_others_were_cached(world: Ranks, cache: str) -> None:
    assert world.run(first_values, cache, ranks=4)[1] == [True, True]


@pytest.mark.parametrize("cache", CACHES)
def test_a_checkpoint_is_used_where_other_weights_were_cached(tmp_path: Path, cache: str) -> None:
    zb.save(tmp_path / "saved", parametrized(1, 4))
    module = parametrized(2, 4)
    assert is_used_after(lambda: zb.load(tmp_path / "saved", module), module, cache)


class GradientWithin(nn.Module):
    """Its forward computes the gradient of a matrix that one region of autocast uses twice."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(16, 16))
        self.gradient = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            y = (torch.tanh(x @ self.matrix) @ self.matrix).float()
        (self.gradient,) = torch.autograd.grad(y.square().sum(), self.matrix, retain_graph=True)
        return y


def test_a_gradient_within_the_forward_is_summed_in_the_type_of_autocast() -> None:
    torch.manual_seed(0)
    module, x = GradientWithin().to(DEVICE), torch.randn(8, 16, device=DEVICE)
    module(x)
    expected = module.gradient
    stage = make_stage("deferred", module, 0)
    with stage.stepping():
        stage.forward(0, (x,))
    assert torch.equal(module.gradient, expected)


def switched(group: Any, schedule: str) -> list[tuple[float, float]]:
    """Losses of steps and evaluations of one batch with and without autocast, and those of one device."""
    found = []
    with zb.Pipeline(lambda s, n: stage_of(s, n, "plain"), schedule, 4, loss_fn, group=group) as pipe:
        stages = [stage_of(stage, pipe.schedule.num_stages, "plain") for stage in range(pipe.schedule.num_stages)]
        inputs, targets = batch(4)
        for enabled in (False, True, False, True):
            with torch.autocast(DEVICE.type, torch.bfloat16, enabled=enabled):
                loss, (evaluated, _) = pipe.step(inputs, targets).item(), pipe.eval_step(inputs, targets)
                parts = zip(inputs.chunk(4), targets.chunk(4), strict=True)
                expected = sum(loss_fn(nn.Sequential(*stages)(x), y).item() / 4 for x, y in parts)
            found += [(loss, expected), (evaluated.item(), expected)]
    return found


@pytest.mark.parametrize("schedule", every(2, ["zb-v", "1f1b", "dualpipe"]))
def test_autocast_may_be_switched_between_calls(world: Ranks, schedule: str) -> None:
    for losses in world.run(switched, schedule, ranks=2):
        for loss, expected in losses:
            assert loss == pytest.approx(expected, rel=1e-6)
        assert losses[0][1] != losses[2][1]
