"""Models written for torch.distributed.pipelining: those that call `pipe_split()`, and the pipes that its tracer makes.

They are cut where they say, and shared parameters stay tied.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import SplitPoint, pipe_split, pipeline

import zerobubble as zb
from tests.procs.ranks import Ranks
from tests.procs.test_models import differences, judge
from tests.procs.versions import needs_pipes_of_containers
from tests.refusals import Stated, raises

pytestmark = pytest.mark.filterwarnings("ignore:.*isinstance.treespec:FutureWarning")  # torch copies deprecated objects


class Model(nn.Module):
    """Its head is its embedding, what it embeds is used again at the end, and so is an argument."""

    def __init__(self, *splits: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.splits = splits

    def forward(self, tokens: Tensor, weight: Tensor) -> dict[str, Tensor]:
        x = first = self.embed(tokens)
        for number, layer in enumerate(self.layers):
            if number in self.splits:
                pipe_split()
            x = layer(x).tanh()
        return {"logits": self.head(x + first) * weight, "first": first}


def made(*splits: int) -> nn.Module:
    torch.manual_seed(0)
    return Model(*splits).double()


def batch() -> tuple[dict[str, Tensor], Tensor]:
    torch.manual_seed(1)
    tokens = torch.randint(0, 11, (8, 3))
    return {"tokens": tokens, "weight": torch.rand(8, 3, 1).double()}, tokens


def loss_of(output: Any, target: Tensor) -> Tensor:
    if isinstance(output, tuple):  # PyTorch's tracer makes tuples of dicts
        output = dict(zip(["logits", "first"], output, strict=True))
    return nn.functional.cross_entropy(output["logits"].flatten(0, 1), target.flatten()) + output["first"].square().mean()


SCHEDULES = {"1f1b": (2,), "zb-v": (1, 2, 3)}
"""Where stages begin, in front of which layers."""


def annotated(group: Any, schedule: str) -> tuple[dict[str, float], list[str]]:
    inputs, targets = batch()
    model = made(*SCHEDULES[schedule])
    held = [zb.split(model, example=inputs)(0, len(SCHEDULES[schedule]) + 1).model_parts()[-1].name]  # type: ignore[operator]
    return differences(group, model, schedule, inputs, targets, loss_of, example=inputs), held


@pytest.mark.long
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_model_that_says_where_it_is_split_is_cut_there(world: Ranks, schedule: str) -> None:
    results = world.run(annotated, schedule, ranks=2)
    judge([found for found, _ in results], made())
    assert all(held == [f"layers.{SCHEDULES[schedule][0] - 1}"] for _, held in results)


def piped(model: nn.Module, places: tuple[int, ...], rows: int = 2) -> Any:
    inputs, _ = batch()
    spec = {f"layers.{place}": SplitPoint.BEGINNING for place in places}
    return pipeline(model, tuple(value[:rows] for value in inputs.values()), split_spec=spec or None)


def split_of(places: tuple[int, ...], model: nn.Module) -> Any:
    return zb.split(piped(model, places))


def of_a_pipe(group: Any, schedule: str) -> dict[str, float]:
    inputs, targets = batch()
    return differences(group, made(), schedule, inputs, targets, loss_of, split=partial(split_of, SCHEDULES[schedule]))


@pytest.mark.sweep
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_pipe_trains_with_the_numbers_and_names_of_one_device(world: Ranks, schedule: str) -> None:
    """PyTorch trains the copies of a tied parameter apart; here they stay one."""
    judge(world.run(of_a_pipe, schedule, ranks=2), made())


def test_modules_that_pytorch_annotated_are_cut_there_themselves() -> None:
    """`pipeline` leaves its annotations in the model, in front of parts and behind them."""
    inputs, _ = batch()
    model = made()
    pipeline(model, tuple(inputs.values()), split_spec={"layers.1": SplitPoint.BEGINNING, "layers.2": SplitPoint.END})
    assert zb.split(model, example=inputs).cut(3).stage_of["layers.2"] == 1
    assert zb.split(model, example=inputs).cut(3).stage_of["layers.3"] == 2


class Inside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        pipe_split()
        found: Tensor = self.second(x)
        return found


class Twice(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for part in self:
            x = part(x)
        pipe_split()
        return x


def row(*parts: nn.Module) -> nn.Module:
    return nn.Sequential(*parts)


def wrong_cases() -> dict[str, tuple[Any, Stated]]:
    x, (inputs, _) = torch.ones(2, 6), batch()
    dropped = row(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6))
    return {
        "number": (
            lambda: zb.split(made(2), example=inputs).cut(3),
            ("pipe_split()", "2 stages", 3),
        ),
        "memory": (lambda: zb.split(made(2), example=inputs, memory="1GB"), ("memory", "cuts", "pipe_split()")),
        "inside": (lambda: zb.split(row(Inside(), Inside()), example=x), ("part '0'", "pipe_split()", "operations")),
        "behind": (
            lambda: zb.split(Twice(nn.Linear(6, 6), nn.Linear(6, 6)), example=x),
            ("pipe_split()", "1 times", "call"),
        ),
        "pipe": (
            lambda: zb.split(piped(made(), (2,)))(0, 4),
            ("torch.distributed.pipelining", "2 stages"),
        ),
        "options": (lambda: zb.split(piped(made(), (2,)), example=inputs), ("a Pipe", "example", "cuts")),  # type: ignore[call-overload]
        "mode": (
            lambda: zb.split(pipeline(dropped, (x,), split_spec={"2": SplitPoint.BEGINNING}))(0, 2).eval()(x),
            ("Pipe", "mode", "dropout"),
        ),
    }


@pytest.mark.parametrize(
    "case", ["number", "memory", "inside", "behind", "pipe", "options", pytest.param("mode", marks=needs_pipes_of_containers)]
)
def test_what_does_not_fit_is_refused(case: str) -> None:
    make, stated = wrong_cases()[case]
    with raises(zb.InputError, *stated):
        make()
