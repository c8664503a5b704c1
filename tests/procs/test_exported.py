"""Programs of torch.export and graphs of torch.fx, cut like the models that they were made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from tests.procs.models import Block, batch, loss_fn
from tests.procs.ranks import Ranks
from tests.refusals import raises, states

MICROBATCHES = 4


class Model(nn.Module):
    """A language model whose head is its embedding; `scale` is a named argument."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(Block(6) for _ in range(5))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, scale: Tensor | None = None) -> dict[str, Tensor]:
        x = first = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x + first)
        return {"logits": logits if scale is None else logits * scale, "first": first}


def made() -> Model:
    torch.manual_seed(0)
    model = Model().double()
    for block in model.blocks:
        block.act = nn.ReLU()  # type: ignore[assignment, union-attr]
    return model


def output_loss(output: Any, targets: Tensor) -> Tensor:
    return loss_fn(output["logits"], targets) + output["first"].square().mean()


def trained(group: Any, schedule: str) -> float:
    """The worst relative difference of the loss and the gradients of a step."""
    inputs, targets = batch(MICROBATCHES)
    split = zb.split(torch.export.export(made(), (inputs[:2],)))
    with zb.Pipeline(split, schedule, MICROBATCHES, output_loss, group=group) as pipe:
        loss = pipe.step(inputs, targets)
        model = made()
        total = torch.zeros((), dtype=torch.float64)
        for x, y in zip(inputs.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True):
            part = output_loss(model(x), y) / MICROBATCHES
            part.backward()
            total += part.detach()
        expected = dict(model.named_parameters(remove_duplicate=False))
        found = [abs(loss.item() / total.item() - 1)]
        for module in pipe.modules.values():
            for name, parameter in module.named_parameters(remove_duplicate=False):
                assert parameter.grad is not None
                theirs = expected[name].grad
                assert theirs is not None
                found.append(((parameter.grad - theirs).norm() / theirs.norm()).item())
    return max(found)


def trains_the_model(group: Any) -> None:
    """The parameters of the exported model are those that the pipeline trains."""
    inputs, targets = batch(MICROBATCHES)
    model, alone = made(), made()
    with zb.Pipeline(zb.split(torch.export.export(model, (inputs[:2],))), "1f1b", MICROBATCHES, output_loss, group=group) as pipe:
        for trained, loss in ((model, pipe.step), (alone, lambda x, y: output_loss(alone(x), y).backward())):
            optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
            for _ in range(2):
                optimizer.zero_grad()
                loss(inputs, targets)
                optimizer.step()
        with raises(zb.InputError, rank=group.rank()):
            model(inputs)
        with zb.gathered(model):
            for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
                assert torch.allclose(ours, theirs, rtol=0, atol=1e-9)


def test_a_pipeline_of_an_exported_program_trains_the_exported_model(world: Ranks) -> None:
    world.run(trains_the_model, ranks=2)


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_an_exported_program_trains_with_the_numbers_and_names_of_its_model(world: Ranks, schedule: str) -> None:
    assert max(world.run(trained, schedule, ranks=2)) < 1e-12


@pytest.mark.long
def test_the_cut_of_an_exported_program_is_proved() -> None:
    inputs, _ = batch(1)
    message = zb.split(torch.export.export(made(), (inputs,))).describe(2)
    states(message, "Proved", "uncut")
    states(message, "embed.weight", "stage 0", "head.weight", "stage 1")


def test_a_graph_of_fx_is_cut() -> None:
    graph = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)))
    states(zb.split(graph, example=torch.ones(1, 3)).describe(2), "Proved", "uncut")


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*isinstance.treespec:FutureWarning")  # torch 2.13 copies deprecated objects
def test_programs_that_cannot_be_cut_are_refused() -> None:
    inputs, _ = batch(1)
    scale = torch.ones(1, dtype=torch.float64)
    with_statistics = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    with raises(zb.InputError, "1.num_batches_tracked", "buffer"):
        zb.split(torch.export.export(with_statistics, (torch.rand(4, 3),)).run_decompositions())
    named = torch.export.export(made(), (inputs,), {"scale": scale})
    with raises(zb.InputError, "example"):
        zb.split(named)
    with raises(zb.InputError, "('*',)", "scale", "structure"):
        zb.split(named, example=inputs)
