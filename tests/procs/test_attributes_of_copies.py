"""Attributes from which forwards continue, of stages with copies on two routes: the pipeline refuses them on all ranks.

What forwards only count, show or cache is no fault: losses and parameters are those of one device.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import zerobubble as zb
from tests.procs.ranks import Ranks
from tests.procs.test_changed_parameters import Outcome, accumulated, batch, train
from tests.refusals import states


class Layer(nn.Module):
    """A layer whose forward uses attributes in a `way`."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=torch.float64)
        self.way = way
        self.scale = 1.0
        self.mean = torch.zeros(8, dtype=torch.float64)
        self.seen = 0
        self.longest = 0
        self.table: Tensor | None = None
        self.shown: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = getattr(self, self.way)(self.linear(x))
        return y

    def scales(self, x: Tensor) -> Tensor:
        self.scale *= 0.9
        return x * self.scale

    def averages(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean

    def averages_in_place(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return x - self.mean.clone()

    def averages_from_none(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        self.shown = mean if self.shown is None else 0.9 * self.shown + 0.1 * mean
        return x - self.shown

    def counts(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        self.mean += x.detach().mean(0)
        return x.sin()

    def shows(self, x: Tensor) -> Tensor:
        self.shown = x.sin()
        self.scale = x.mean().item()
        return self.shown * self.scale

    def caches(self, x: Tensor) -> Tensor:
        if self.table is None or self.longest < len(x):
            self.longest = len(x)
            self.table = torch.arange(len(x), dtype=x.dtype, device=x.device)
        return x + self.table[: len(x), None]


REFUSED = {"scales": "'scale'", "averages": "'mean'", "averages_in_place": "'mean'", "averages_from_none": "'shown'"}
ALLOWED = ("counts", "shows", "caches")


def build(way: str, stage: int, num_stages: int) -> nn.Module:
    torch.manual_seed(stage)
    return Layer(way)


class Model(nn.Module):
    """Layers that `zb.split` cuts."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(way) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def train_cut(group: Any, way: str, schedule: str, num_microbatches: int) -> Outcome:
    """Returns the largest difference of a loss from one device in three steps, or the error."""
    ours, model = Model(way), Model(way)
    try:
        with zb.Pipeline(zb.split(ours, example=batch(0)[0][:2]), schedule, num_microbatches, nn.functional.mse_loss, group=group) as pipe:
            worst = 0.0
            optimizers = [torch.optim.SGD(parameters, lr=0.1) for parameters in (pipe.parameters(), model.parameters())]
            for step in range(3):
                worst = max(worst, abs(pipe.step(*batch(step)).item() - accumulated(model, *batch(step))))
                for each in optimizers:
                    each.step()
                    each.zero_grad()
            return worst
    except zb.PipelineError as error:
        return f"{type(error).__name__}: {error}"


def on_routes(group: Any) -> dict[tuple[str, str], Outcome]:
    results: dict[tuple[str, str], Outcome] = {}
    for way in (*REFUSED, *ALLOWED):
        results[way, "stages"] = train(group, partial(build, way), "dualpipe")
        results[way, "split"] = train_cut(group, way, "chimera", 4)
    return results


def one_of_each_route(group: Any) -> dict[str, Outcome]:
    return {way: train_cut(group, way, "chimera", 2) for way in REFUSED}


def test_attributes_from_which_forwards_of_copies_continue_are_refused(world: Ranks) -> None:
    first, second = world.run(on_routes, ranks=2)
    for (way, case), outcome in first.items():
        if way in REFUSED:
            assert isinstance(outcome, str), (way, case, outcome)
            states(outcome, REFUSED[way], "bidirectional")
            states(str(second[way, case]), REFUSED[way], "bidirectional")
        else:
            assert not isinstance(outcome, str), (way, case, outcome)
            assert outcome < 1e-9, (way, case)


def test_with_one_microbatch_a_route_the_second_step_refuses_them(world: Ranks) -> None:
    for results in world.run(one_of_each_route, ranks=2):
        for way, outcome in results.items():
            states(str(outcome), REFUSED[way], "bidirectional")
