"""Random models, split at random places: the stages in sequence match the model's outputs, gradients and running statistics."""

from __future__ import annotations

import copy
import os
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from tests.procs.ranks import Ranks
from tests.procs.test_models import differences, judge
from tests.thinned import every

WIDTH, ROWS = 4, 6
CASES = int(os.environ.get("ZEROBUBBLE_RANDOM_MODELS", "40"))


class Block(nn.Module):
    """A block that follows the usage pattern `kind`."""

    def __init__(self, kind: str, shared: nn.Parameter) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(WIDTH, WIDTH)
        if kind == "norm":
            self.norm = nn.BatchNorm1d(WIDTH, momentum=None if shared.sum() > 0 else 0.1)
        if kind == "buffer":
            self.register_buffer("scale", torch.rand(WIDTH))
        if kind == "tied":
            self.weight = shared
        if kind == "nested":
            self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))
        if kind == "dropout":
            self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        y = self.linear(x)
        if self.kind == "norm":
            y = self.norm(y)
        elif self.kind == "buffer":
            y = y * self.scale
        elif self.kind == "tied":
            y = y @ self.weight
        elif self.kind == "nested":
            y = self.inner(y) + y
        elif self.kind == "inplace":
            y.mul_(0.5).add_(1)
        elif self.kind == "dropout":
            y = self.dropout(y).tanh()
        elif self.kind == "masked" and mask is not None:
            y = y.masked_fill(mask, 0.0)
        elif self.kind == "several":
            return y.tanh(), {"kept": y.detach().clone(), "again": y}
        elif self.kind == "keeping":
            self.last = y[:, 0].detach()
            y = nn.functional.relu(y, inplace=True)
        return y.tanh()


KINDS = ("plain", "norm", "buffer", "tied", "nested", "inplace", "dropout", "masked", "several", "keeping")


class Random(nn.Module):
    """Blocks in lists, sequences and attributes, with skips, tied weights, and outputs in a dict."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        chance = random.Random(seed)
        self.shared = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)
        self.kinds = [chance.choice(KINDS) for _ in range(chance.randint(3, 7))]
        blocks = [Block(kind, self.shared) for kind in self.kinds]
        self.blocks = nn.ModuleList(blocks)
        self.tail = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(chance.randint(0, 3))))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.is_tied = chance.random() < 0.4
        if self.is_tied:
            self.head.weight = blocks[0].linear.weight
        self.skips = {to: chance.randrange(to) for to in range(1, len(blocks)) if chance.random() < 0.4}
        self.residual = chance.random() < 0.5
        self.in_place = chance.random() < 0.3
        self.use_shared = chance.random() < 0.3
        self.form = chance.choice(["tensor", "dict", "tuple"])
        if chance.random() < 0.4:  # a second name, of a block or of something inside of it
            block = chance.choice(blocks)
            self.also = chance.choice([block, *block.children()])

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        seen: list[Tensor] = []
        extra: list[Tensor] = []
        for number, block in enumerate(self.blocks):
            given = x + seen[self.skips[number]] if number in self.skips else x
            made = block(given, mask=mask)
            if isinstance(made, tuple):
                made, more = made
                extra += more.values()
            x = made + x if self.residual else made
            seen.append(x)
        if self.in_place:
            x = x * 1
            x += 1
        if self.use_shared:
            x = x @ self.shared
        x = self.head(self.tail(x))
        extra = [torch.stack(extra).mean(0)] if extra else [x]
        return {"out": x, "extra": extra[0]} if self.form == "dict" else (x, extra) if self.form == "tuple" else x


def leaves(output: Any) -> list[Tensor]:
    return [each for each in torch.utils._pytree.tree_leaves(output) if isinstance(each, Tensor)]


def arguments(seed: int, rows: int = ROWS) -> dict[str, Tensor]:
    torch.manual_seed(seed + 1000)
    found = {"x": torch.randn(rows, WIDTH).double()}
    return found | {"mask": torch.rand(rows, WIDTH) > 0.7} if seed % 2 else found


def loss_of(output: Any, target: Tensor | None = None) -> Tensor:
    return torch.stack([each.square().mean() for each in leaves(output)]).sum()


def in_stages(seed: int) -> None:
    """Cut at random places, or where it is best, and run the stages in training and in evaluation."""
    model, given, chance = Random(seed).double(), arguments(seed), random.Random(-seed)
    whole = copy.deepcopy(model)
    units = [cost.unit for cost in zb.split(model, example=given).costs()]
    count = chance.randint(2, min(4, len(units)))
    cuts = sorted(chance.sample(range(1, len(units)), count - 1))
    split = zb.split(model, example=given, cuts=[units[place] for place in cuts] if chance.random() < 0.7 else None)
    stages = [split(stage, count) for stage in range(count)]
    for rows in (ROWS, 3):
        inputs = arguments(seed, rows)
        passed: Any = inputs
        for stage in stages:
            passed = stage(**passed)
        expected = whole(**inputs)
        assert all(map(torch.equal, leaves(passed), leaves(expected)))
        loss_of(passed).backward()
        loss_of(expected).backward()
    theirs = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        wanted = theirs[name].grad
        assert (parameter.grad is None) == (wanted is None), name
        assert parameter.grad is None or torch.allclose(parameter.grad, wanted, rtol=1e-10, atol=1e-12), name
    held = {name for stage in stages for name, _ in stage.named_parameters(remove_duplicate=False)}
    assert held == {name for name, _ in whole.named_parameters(remove_duplicate=False)}
    statistics = {name: value for stage in stages for name, value in stage.state_dict().items() if name in dict(whole.named_buffers())}
    for module in (*stages, whole):
        module.eval()
    passed = given
    for stage in stages:
        passed = stage(**passed)
    assert all(map(torch.equal, leaves(passed), leaves(whole(**given))))
    for name, buffer in whole.named_buffers():
        assert torch.equal(statistics[name], buffer), name


@pytest.mark.long
@pytest.mark.parametrize("first", every(2, range(0, CASES, 10)))
def test_random_models_have_the_numbers_of_one_device(first: int) -> None:
    for seed in range(first, first + 10):
        try:
            in_stages(seed)
        except zb.InputError as error:
            raise AssertionError(f"model {seed} ({Random(seed).kinds}) was refused: {error}") from error
        except AssertionError as error:
            raise AssertionError(f"model {seed} ({Random(seed).kinds}): {error}") from error


ON_RANKS = {2: "1f1b", 5: "zb-v", 9: "zb-h1"}


def trained(group: Any, seed: int) -> dict[str, float]:
    return differences(group, Random(seed).double(), ON_RANKS[seed], arguments(seed, 16), torch.zeros(16), loss_of, example=arguments(seed))


@pytest.mark.sweep
@pytest.mark.parametrize("seed", ON_RANKS)
def test_random_models_train_on_ranks_with_the_numbers_of_one_device(world: Ranks, seed: int) -> None:
    judge(world.run(trained, seed, ranks=2), Random(seed).double())
