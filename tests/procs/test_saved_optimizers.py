"""`optimizer.state_dict()` of a rank trains on as before where this rank loads it, and is refused in other stages."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zerobubble as zb
from tests.device import cpu_only
from tests.procs.ranks import Ranks
from tests.refusals import raises

pytestmark = cpu_only("compares with one device")
WIDTH, MICROBATCHES, STEPS = 6, 4, 6
TOLERANCE = 1e-9


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))).double()


def batch(seed: int) -> tuple[Tensor, Tensor]:
    return torch.randn(2, 8, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).unbind()


class Loop:
    """A loop with `AdamW` over all parameters of the model (`whole`), or over the parameters of this rank."""

    def __init__(self, group: Any, *, whole: bool, schedule: str = "1f1b") -> None:
        self.model = net()
        parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(parameters, lr=0.05) if whole else None
        self.pipe = zb.Pipeline(zb.split(self.model, example=batch(0)[0]), schedule, MICROBATCHES, nn.functional.mse_loss, group=group)
        self.optimizer = self.optimizer or torch.optim.AdamW(self.pipe.parameters(), lr=0.05)

    def train(self, steps: range) -> list[float]:
        return [self.step(seed) for seed in steps]

    def step(self, seed: int) -> float:
        self.optimizer.zero_grad()
        loss = self.pipe.step(*batch(seed))
        self.optimizer.step()
        return loss.item()

    def weights(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.pipe.parameters()]


def alone() -> list[float]:
    model, losses = net(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for seed in range(STEPS):
        x, y = batch(seed)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def from_file(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def resumes(group: Any, folder: str, whole: bool) -> None:
    rank, files = group.rank(), [Path(folder) / f"{rank}.pt" for rank in range(2)]
    first = Loop(group, whole=whole)
    losses = first.train(range(3))
    zb.save(f"{folder}/checkpoint", first.pipe, first.optimizer)
    first.pipe.close()
    state = first.optimizer.state_dict()
    torch.save(state, files[rank])
    weights = first.weights()

    resumed = Loop(group, whole=whole)
    for parameter, weight in zip(resumed.pipe.parameters(), weights, strict=True):
        parameter.data.copy_(weight)
    resumed.optimizer.load_state_dict(from_file(files[rank]))
    losses += resumed.train(range(3, STEPS))
    assert max(abs(ours - theirs) for ours, theirs in zip(losses, alone(), strict=True)) < TOLERANCE

    for loop in (resumed, Loop(group, whole=whole)):  # an optimizer that has stepped, and a new one
        before = loop.weights()
        loop.optimizer.load_state_dict(from_file(files[1 - rank]))
        loop.pipe.step(*batch(9))
        with raises(
            zb.InputError, optimizer="AdamW", number=0, of_saved=f"that the rank of stage {1 - rank} saved", of_mine=f"stage {rank}"
        ):
            loop.optimizer.step()
        assert all(map(torch.equal, loop.weights(), before))
        loop.optimizer.load_state_dict(from_file(files[rank]))
        loop.step(9)
        if not whole:
            loop.optimizer.load_state_dict(from_file(files[1 - rank]))
            zb.load(f"{folder}/checkpoint", loop.pipe, loop.optimizer)
            loop.step(9)
        loop.pipe.close()
    other = Loop(group, whole=whole, schedule="zb-v")
    other.optimizer.load_state_dict(state)
    other.pipe.step(*batch(9))
    with raises(zb.InputError, optimizer="AdamW", of_saved=f"that the rank of stage {rank} saved"):
        other.optimizer.step()
    other.pipe.close()


def test_a_rank_loads_its_own_state_of_its_parameters(world: Ranks, tmp_path: Path) -> None:
    world.run(resumes, str(tmp_path), False, ranks=2)


def test_a_rank_loads_its_own_state_of_all_parameters(world: Ranks, tmp_path: Path) -> None:
    world.run(resumes, str(tmp_path), True, ranks=2)


def other_uses(group: Any) -> None:
    """Groups that grow, copies, and optimizers without a pipeline."""
    loop = Loop(group, whole=False)
    head, *rest = loop.pipe.parameters()
    loop.optimizer = torch.optim.AdamW([head], lr=0.05)
    loop.train(range(2))
    loop.optimizer.add_param_group({"params": rest[:1], "lr": 0.01})
    loop.optimizer.param_groups[0]["params"].append(rest[1])
    loop.train(range(2, 4))
    saved = io.BytesIO()
    torch.save(loop.optimizer, saved)
    state = copy.deepcopy(loop.optimizer.state_dict())
    loop.optimizer.load_state_dict(state)
    loop.step(4)
    copied = copy.deepcopy(loop.optimizer)  # of other parameters
    copied.step()
    parameters = [nn.Parameter(torch.zeros_like(parameter)) for parameter in (head, rest[1], rest[0])]
    outside = torch.optim.AdamW([{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.01}], lr=0.05)
    outside.load_state_dict(state)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    outside.step()
    loop.pipe.close()
    outside.load_state_dict(outside.state_dict())
    outside.step()
    loop.optimizer.step()


def test_groups_may_grow_and_optimizers_without_a_pipeline_load_a_state(world: Ranks) -> None:
    world.run(other_uses, ranks=2)
