"""Forwards that change parameters: numbers are those of one device where a parameter has no copies, and an error where it has.

Copies are tied places, the copies of a stage on routes, replicas, and several stages of a rank.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerobubble as zb
from tests.procs.meshes import init_device_mesh
from tests.procs.ranks import Ranks
from tests.refusals import states
from zerobubble.schedules import with_recompute

MICROBATCHES = 4


class Bounded(nn.Module):
    """An embedding whose rows have a bounded norm."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(16, 8, max_norm=0.5, dtype=torch.float64)
        self.out = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.rows((x.sum(-1) * 1000).long().abs() % 16))
        return y + x


class Codebook(nn.Module):
    """Moves a parameter toward its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Parameter(torch.randn(8, dtype=torch.float64))
        self.out = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.code.add_(0.1 * (x.mean(0) - self.code))
        y: Tensor = self.out(x + self.code)
        return y


class ByData(Codebook):
    """Moves it in a way that counts no version."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.code.data.lerp_(x.detach().mean(0), 0.1)
        y: Tensor = self.out(x + self.code)
        return y


class Evaluated(Codebook):
    """Moves it in evaluations."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            with torch.no_grad():
                self.code.add_(0.1 * x.mean(0))
        y: Tensor = self.out(x + self.code)
        return y


KINDS = (Bounded, Codebook, ByData, Evaluated)


class Checkpointed(Codebook):
    """Recomputes its forward in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return y


def build(kind: type[nn.Module], stage: int, num_stages: int) -> nn.Module:
    torch.manual_seed(stage)
    return kind()


class Shared:
    """The stages of a rank are one object."""

    def __init__(self) -> None:
        self.module = build(Codebook, 0, 0)

    def __call__(self, stage: int, num_stages: int) -> nn.Module:
        return self.module


def batch(step: int) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(step)
    x, y = (torch.randn(8, 8, dtype=torch.float64, generator=numbers) for _ in range(2))
    return x, y


def accumulated(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Returns the loss of one device, and leaves the gradients."""
    total = 0.0
    for inputs, targets in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
        loss = nn.functional.mse_loss(model(inputs), targets) / MICROBATCHES
        if torch.is_grad_enabled():
            loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    return total


Outcome = float | str


def train(group: Any, build_stage: Any, schedule: Any, *, validates: bool = False, profiles: bool = False, **options: Any) -> Outcome:
    """Returns the largest difference of a loss or parameter from one device after three steps and evaluations, or the error."""
    where = options if "mesh" in options else {"group": group, **options}
    try:
        with zb.Pipeline(build_stage, schedule, MICROBATCHES, nn.functional.mse_loss, **where) as pipe:
            count, rates = pipe.schedule.num_stages, 0.1
            model = nn.Sequential(*(build_stage(stage, count) for stage in range(count)))
            if profiles:
                pipe.describe(*batch(0))
                pipe.profile(*batch(0), steps=1)
            inner, whole = (torch.optim.SGD(parameters, lr=rates) for parameters in (pipe.parameters(), model.parameters()))
            optimizer: Any = zb.PostValidation(inner, pipe, max_norm=100.0) if validates else inner
            worst = 0.0
            for step in range(3):
                worst = max(worst, abs(pipe.step(*batch(step)).item() - accumulated(model, *batch(step))))
                for each in (optimizer, whole):
                    each.step()
                    each.zero_grad()
                if not validates:
                    loss, _ = pipe.eval_step(*batch(9))
                    with torch.no_grad():
                        worst = max(worst, abs(loss.item() - accumulated(model.eval(), *batch(9))))
                    model.train()
            pairs = (
                pair for stage, module in pipe.modules.items() for pair in zip(module.parameters(), model[stage].parameters(), strict=True)
            )
            return max(worst, *((mine - theirs).abs().max().item() for mine, theirs in pairs))
    except zb.PipelineError as error:
        return str(error)


def where_there_are_copies(group: Any) -> dict[str, Outcome]:
    results = {}
    for kind in KINDS:
        stage = partial(build, kind)
        results[f"{kind.__name__} on routes"] = train(group, stage, "dualpipe")
        name = "rows.weight" if kind is Bounded else "code"
        results[f"{kind.__name__} tied"] = train(group, stage, "1f1b", tied=[[(0, name), (1, name)]])
    results["one object"] = train(group, Shared(), "zb-v")
    return results


def in_replicas(group: Any) -> dict[str, Outcome]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    return {kind.__name__: train(group, partial(build, kind), "1f1b", mesh=mesh) for kind in KINDS}


def recomputing(num_ranks: int, num_microbatches: int) -> zb.Schedule:
    return with_recompute(zb.make("1f1b", num_ranks, num_microbatches))


def where_there_are_none(group: Any) -> dict[str, Outcome]:
    cases = [*((kind, "zb-v") for kind in KINDS), (Codebook, "zb-h1"), (Bounded, recomputing)]
    results = {f"{kind.__name__} {name}": train(group, partial(build, kind), name, profiles=True) for kind, name in cases}
    return results | {f"Codebook {split}": train(group, partial(build, Codebook), "zb-h1", split=split) for split in ("whole", "graph")}


def where_forwards_run_twice(group: Any) -> dict[str, Outcome]:
    return {
        "R": train(group, partial(build, Codebook), recomputing),
        "chosen by R": train(group, partial(build, Codebook), recomputing, recompute={"codes": lambda name, module: name == ""}),
        "checkpoint": train(group, partial(build, Checkpointed), "zb-h1"),
        "discarded": train(group, partial(build, Bounded), "zb-h1", validates=True),
    }


def test_parameters_without_copies_are_those_of_one_device(world: Ranks) -> None:
    for results in world.run(where_there_are_none, ranks=2):
        assert {case: outcome for case, outcome in results.items() if isinstance(outcome, str) or outcome > 1e-9} == {}


@pytest.mark.parametrize(("cases", "ranks"), [(where_there_are_copies, 2), (in_replicas, 4)])
def test_parameters_with_copies_are_refused(world: Ranks, cases: Any, ranks: int) -> None:
    for results in world.run(cases, ranks=ranks):
        for case, outcome in results.items():
            assert isinstance(outcome, str), (case, outcome)
            states(outcome, "'rows.weight'" if case.startswith("Bounded") else "'code'")


def test_forwards_that_run_twice_may_not_change_parameters(world: Ranks) -> None:
    for results in world.run(where_forwards_run_twice, ranks=2):
        for case, outcome in results.items():
            assert isinstance(outcome, str), (case, outcome)
            states(outcome, "'rows.weight'" if case == "discarded" else "'code'")
