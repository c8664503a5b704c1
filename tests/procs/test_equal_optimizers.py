"""Copies of a parameter stay equal, or are refused: tied places, routes and replicas under optimizers of other classes, options or states.

They are refused at the end of the first step in which they differ, before an optimizer uses its gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import zerobubble as zb
from tests.procs.meshes import init_device_mesh
from tests.procs.ranks import Ranks
from tests.refusals import states
from zerobubble.runtime.hooks.equal_optimizers import neighbors

TOKENS = torch.arange(48).reshape(8, 6) % 16


class Language(nn.Module):
    """One matrix is embedding and head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tok = nn.Embedding(16, 8, dtype=torch.float64)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)).double()
        self.head = nn.Linear(8, 16, bias=False, dtype=torch.float64)
        self.head.weight = self.tok.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.tok(x)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits.flatten(0, 1)


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits, targets.flatten())


Named = list[tuple[str, nn.Parameter]]


def decayed(named: Named, decays: Callable[[str], bool]) -> Optimizer:
    groups = [[parameter for name, parameter in named if decays(name) is wanted] for wanted in (True, False)]
    return AdamW([{"params": groups[0], "weight_decay": 0.1, "name": "decayed"}, {"params": groups[1], "weight_decay": 0.0}], lr=0.01)


class Wrapper(Optimizer):
    """Holds another optimizer, as frameworks do."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.inner = inner
        self.param_groups, self.defaults, self.state = inner.param_groups, inner.defaults, inner.state

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def wrapped(named: Named, rank: int) -> Optimizer:
    return Wrapper(decayed(named, lambda name: "weight" in name))


def with_state(named: Named, rank: int) -> Optimizer:
    optimizer = AdamW([parameter for _, parameter in named])
    for _, parameter in named if rank else ():
        optimizer.state[parameter] = {"step": torch.tensor(3.0), "exp_avg": parameter.detach(), "exp_avg_sq": parameter.detach() ** 2}
    return optimizer


def with_frozen(named: Named, rank: int) -> Optimizer:
    optimizer = AdamW([parameter for _, parameter in named])
    for name, parameter in named:
        parameter.requires_grad_(name != "head.weight")
    return optimizer


MAKE: dict[str, tuple[Callable[[Named, int], Optimizer], tuple[str, ...]]] = {
    "equal": (lambda named, rank: decayed(named, lambda name: "weight" in name), ()),
    "wrapped": (wrapped, ()),
    "other groups on each rank": (
        lambda named, rank: decayed(named, lambda name: name.endswith("weight") if rank else name == "tok.weight"),
        (),
    ),
    "by names": (
        lambda named, rank: decayed(named, lambda name: name != "tok.weight"),
        ("tok.weight", "head.weight", "weight_decay=0.0", "weight_decay=0.1", "AdamW"),
    ),
    "other classes": (
        lambda named, rank: (AdamW if rank else SGD)([parameter for _, parameter in named], lr=0.1),
        ("AdamW", "SGD", "tok.weight"),
    ),
    "left out": (
        lambda named, rank: AdamW([parameter for name, parameter in named if name != "head.weight"]),
        ("head.weight", "tok.weight"),
    ),
    "state": (with_state, ("AdamW", "head.weight")),
    "frozen": (with_frozen, ("frozen", "head.weight")),
}


def drop_rate(optimizer: Optimizer, rank: int) -> None:
    optimizer.param_groups[0]["lr"] *= 1.0 if rank else 0.5


def train(
    group: Any, make: Callable[[Named, int], Optimizer], *, posts: bool = False, change: Callable[[Optimizer, int], None] | None = None
) -> tuple[int, float | str]:
    """Returns the steps that ran, and the largest difference of the rank's parameters from one device, or the error."""
    model, rank, done = Language(), dist.get_rank(group), 0
    whole = decayed(list(model.named_parameters()), lambda name: "weight" in name)
    try:
        with zb.Pipeline(zb.split(Language(), example=TOKENS[:1]), "1f1b", 4, loss_fn, group=group) as pipe:
            named = [entry for module in pipe.modules.values() for entry in module.named_parameters()]
            optimizer = make(named, rank)
            stepping: Any = zb.PostValidation(optimizer, pipe) if posts else optimizer
            for _ in range(3):
                pipe.step(TOKENS, TOKENS.roll(-1, 1))
                done += 1
                loss_fn(model(TOKENS), TOKENS.roll(-1, 1)).backward()
                for each in (stepping, whole):
                    each.step()
                    each.zero_grad()
                if change is not None:
                    change(optimizer, rank)
            if posts:
                stepping.settle()
            of_model = dict(model.named_parameters(remove_duplicate=False))
            return done, max((parameter - of_model[name]).abs().max().item() for name, parameter in named)
    except zb.PipelineError as error:
        return done, str(error)


def tied_cases(group: Any) -> dict[str, tuple[int, float | str]]:
    results = {case: train(group, make) for case, (make, _) in MAKE.items()}
    results["by names, validated"] = train(group, MAKE["by names"][0], posts=True)
    results["a rate that changes"] = train(group, MAKE["equal"][0], change=drop_rate)
    return results


def test_a_tied_parameter_has_equal_optimizers_or_is_refused_before_they_step(world: Ranks) -> None:
    wanted = {case: values for case, (_, values) in MAKE.items()}
    wanted |= {"by names, validated": MAKE["by names"][1], "a rate that changes": ("lr=0.005", "lr=0.01")}
    for results in world.run(tied_cases, ranks=2):
        assert set(results) == set(wanted)
        for case, (done, outcome) in results.items():
            if case in ("equal", "wrapped"):
                assert (done, outcome) == (3, pytest.approx(0, abs=1e-9)), case
            elif case == "other groups on each rank":
                assert (done, type(outcome)) == (3, float)
            else:
                assert done == (1 if case == "a rate that changes" else 0), case
                states(str(outcome), "rank 0", "rank 1", *wanted[case])


def stage(index: int, num_stages: int) -> nn.Module:
    torch.manual_seed(index)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh())


def copied(group: Any, schedule: str, dimensions: tuple[str, ...], rate: float) -> str:
    """Trains two steps with rates that differ by `rate` on the last rank."""
    where: dict[str, Any] = {"group": group}
    if dimensions:
        where = {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=dimensions)}
    x = torch.rand(8, 8, generator=torch.Generator().manual_seed(0))
    try:
        with zb.Pipeline(stage, schedule, 4, nn.functional.mse_loss, **where) as pipe:
            optimizer = AdamW(pipe.parameters(), lr=0.1 + rate * (dist.get_rank(group) == dist.get_world_size(group) - 1))
            for _ in range(2):
                pipe.step(x, x)
                optimizer.step()
                optimizer.zero_grad()
        return ""
    except zb.PipelineError as error:
        return str(error)


@pytest.mark.parametrize(("schedule", "dimensions"), [("dualpipe", ()), ("1f1b", ("dp", "pp"))])
def test_routes_and_replicas_have_equal_optimizers_or_are_refused(world: Ranks, schedule: str, dimensions: tuple[str, ...]) -> None:
    ranks = 4 if dimensions else 2
    for text in world.run(copied, schedule, dimensions, 0.1, ranks=ranks):
        states(text, "0.weight", f"rank {ranks - 1}", "lr=0.1", "lr=0.2", "AdamW")
    assert world.run(copied, schedule, dimensions, 0.0, ranks=ranks) == [""] * ranks


def test_all_ranks_of_a_ring_are_compared() -> None:
    assert [neighbors([4, 7, 9], rank) for rank in (4, 7, 9)] == [[9, 7], [4, 9], [7, 4]]
    assert neighbors([4, 7], 4) == [7]
    assert neighbors([4], 4) == [4]
