"""Another object for a parameter that several stages or replicas hold is one error on all ranks, before anything runs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from tests.device import cpu_only
from tests.procs.meshes import init_device_mesh
from tests.procs.ranks import Ranks
from tests.refusals import raises

pytestmark = cpu_only("compares with one device")
TOKENS, WIDTH, STEPS, CHANGED = 11, 6, 5, 2


class Tied(nn.Module):
    """A language model whose head has the weight of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tied() -> nn.Module:
    torch.manual_seed(0)
    return Tied().double()


def untied() -> nn.Module:
    model = tied()
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return model


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def batches(replicas: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(TOKENS, (8 * replicas, 5), generator=generator) for _ in range(STEPS)]


def replace_head(model: nn.Module) -> None:
    model.head.weight = nn.Parameter(torch.linspace(-1, 1, TOKENS * WIDTH, dtype=torch.float64).view(TOKENS, WIDTH))


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def of_one_device(model: nn.Module, data: list[Tensor], *, changes: bool) -> list[float]:
    optimizer, losses = optimizer_of(model.parameters()), []
    for step, x in enumerate(data):
        if changes and step == CHANGED:
            replace_head(model)
            optimizer = optimizer_of(model.parameters())
        loss = loss_fn(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def replaced_in(group: Any, goes_on: bool, replicas: int) -> None:
    ranks: dict[str, Any] = {"group": group}
    if replicas > 1:
        ranks = {"mesh": init_device_mesh("cpu", (replicas, 2), mesh_dim_names=("dp", "pp"))}
    model = tied() if replicas == 1 else untied()
    expected = of_one_device(copy.deepcopy(model), batches(replicas), changes=not goes_on)
    data = [x.chunk(replicas)[group.rank() // 2] for x in batches(replicas)]

    def pipeline() -> tuple[zb.Pipeline, torch.optim.Optimizer]:
        pipe = zb.Pipeline(zb.split(model, example=data[0]), "1f1b", 4, loss_fn, **ranks)
        return pipe, optimizer_of(pipe.parameters())

    pipe, optimizer = pipeline()
    losses = []
    for step, x in enumerate(data):
        if step == CHANGED:
            former = model.head.weight
            replace_head(model)
            for call in (pipe.step, pipe.eval_step):
                with raises(zb.InputError, "head.weight"):
                    call(x, x)
            if goes_on:
                model.head.weight = former
            else:
                with zb.gathered(model), pipe:
                    pass
                pipe, optimizer = pipeline()
        optimizer.zero_grad()
        losses.append(float(pipe.step(x, x).detach()))
        optimizer.step()
    pipe.close()
    assert losses == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("goes_on", [True, False], ids=["the former parameter again", "a new pipeline"])
def test_an_untied_head_is_refused_and_the_remedies_train_as_one_device(goes_on: bool, world: Ranks) -> None:
    world.run(replaced_in, goes_on, 1, ranks=2)


@pytest.mark.parametrize("goes_on", [True, False], ids=["the former parameter again", "a new pipeline"])
def test_a_replaced_head_of_replicas_is_refused_and_the_remedies_train_as_one_device(goes_on: bool, world: Ranks) -> None:
    world.run(replaced_in, goes_on, 2, ranks=4)


def untied_on_one_rank(group: Any) -> None:
    """The first rank of ZB-V has the embedding and the head, so nothing is sent for their parameter."""
    model = tied()
    expected = of_one_device(copy.deepcopy(model), batches(), changes=True)
    pipe = zb.Pipeline(zb.split(model, example=batches()[0]), "zb-v", 4, loss_fn, group=group)
    optimizer, losses = optimizer_of(pipe.parameters()), []
    for step, x in enumerate(batches()):
        if step == CHANGED:
            replace_head(model)
            optimizer = optimizer_of(pipe.parameters())
        optimizer.zero_grad()
        losses.append(float(pipe.step(x, x).detach()))
        optimizer.step()
    pipe.close()
    assert losses == pytest.approx(expected, rel=1e-9, abs=1e-9)


def tied_later(group: Any, schedule: str) -> None:
    model = untied()
    pipe = zb.Pipeline(zb.split(model, example=batches()[0]), schedule, 4, loss_fn, group=group)
    model.head.weight = model.embedding.weight
    expected = of_one_device(copy.deepcopy(model), batches(), changes=False)
    if schedule == "1f1b":
        for call in (pipe.step, pipe.eval_step):
            with raises(zb.InputError, "embedding.weight", "head.weight"):
                call(batches()[0], batches()[0])
        with zb.gathered(model), pipe:
            pass
        model.head.weight = model.embedding.weight
        pipe = zb.Pipeline(zb.split(model, example=batches()[0]), schedule, 4, loss_fn, group=group)
    optimizer, losses = optimizer_of(pipe.parameters()), []
    for x in batches():
        optimizer.zero_grad()
        losses.append(float(pipe.step(x, x).detach()))
        optimizer.step()
    pipe.close()
    assert losses == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_weights_that_are_tied_later_are_refused_unless_one_rank_holds_them(schedule: str, world: Ranks) -> None:
    world.run(tied_later, schedule, ranks=2)


def test_a_head_that_is_untied_on_one_rank_trains_as_on_one_device(world: Ranks) -> None:
    world.run(untied_on_one_rank, ranks=2)
