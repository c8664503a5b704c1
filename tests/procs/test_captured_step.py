"""Whole steps as CUDA graphs on the checked device: replays have the numbers of one device, and their order is proved.

A replay repeats the captured operations and runs no code of the stages, as on a GPU. Messages go over gloo, and streams wait for them as
for NCCL's.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

import zerobubble as zb
from tests.device import cpu_only
from tests.procs import models
from tests.procs.models import batch, build, loss_fn
from tests.procs.ranks import Ranks
from tests.procs.test_added_losses import Routed
from tests.refusals import states
from tests.thinned import every
from zerobubble.testing import checked_device

pytestmark = cpu_only("the CPU takes the part of an accelerator")
STEPS = 6


def captured(group: Any, name: Any = "zb-h1", built: Any = build, **options: Any) -> zb.Pipeline:
    return zb.Pipeline(built, name, 4, loss_fn, group=group, transport="gloo", cuda_graphs="step", **options)


def trained(group: Any, name: str, options: dict[str, Any]) -> tuple[float, bool, int, int]:
    """The largest error of a loss, whether the parameters are those of one device, and how often a step was replayed and the host waited.

    The gradients of steps 3 and 4 are summed before the optimizer's step, after others are dropped.
    """
    with checked_device() as device, captured(group, name, **options) as pipe:
        num_stages = pipe.schedule.num_stages
        oracle = [build(stage, num_stages) for stage in range(num_stages)]
        theirs = torch.optim.SGD([p for stage in oracle for p in stage.parameters()], lr=0.1)
        ours = torch.optim.SGD(pipe.parameters(), lr=0.1)
        error, waits = 0.0, 0
        for step in range(STEPS):
            inputs, targets = batch(4, seed=step)
            before = len(device.waits.by_host)
            loss = pipe.step(inputs, targets)
            waits = len(device.waits.by_host) - before
            error = max(error, abs((loss - models.one_device(oracle, 4, inputs, targets)).item()))
            pipe.eval_step(inputs, targets)
            if step != 3:
                for optimizer in (ours, theirs):
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=step % 2 == 0)
        pairs = [(p, q) for s, module in pipe.modules.items() for p, q in zip(module.parameters(), oracle[s].parameters(), strict=True)]
        same = all(torch.allclose(p, q, rtol=0, atol=1e-12) for p, q in pairs)
    return error, same, device.num_replays, waits


CASES = [
    ("gpipe", {}),
    ("1f1b", {"split": "whole"}),
    ("interleaved-1f1b", {}),
    ("zb-h1", {}),
    ("zb-h2", {"split": "graph"}),
    ("zb-v", {}),
]


@pytest.mark.parametrize(("name", "options"), every(5, CASES), ids=str)
def test_replayed_steps_have_the_numbers_of_one_device(world: Ranks, name: str, options: dict[str, Any]) -> None:
    for error, same, replays, waits in world.run(trained, name, options, ranks=2):
        assert error <= 1e-12
        assert same
        assert replays == STEPS - 2
        assert waits <= 1, "it reads the losses"


def kept(group: Any, num_microbatches: int, scale: str) -> list[str]:
    """Names of the results of steps, and of what follows them, that changed during later steps."""
    options: dict[str, Any] = {"transport": "gloo", "cuda_graphs": "step", "scale": scale}
    with checked_device() as device, zb.Pipeline(Routed, "zb-v", num_microbatches, loss_fn, group=group, **options) as pipe:
        found: dict[str, tuple[Any, Any]] = {}
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        for step in range(STEPS):
            inputs, targets = batch(num_microbatches, seed=step)
            results = {"loss": pipe.step(inputs, targets), "losses": pipe.losses, "added losses": pipe.added_losses}
            results |= {"norm": pipe.clip_grad_norm_(1.0), "state": pipe.step_state()}
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            results |= {"evaluation": pipe.eval_step(inputs, targets), "outputs": pipe.eval_step(inputs)}
            if step == 3:
                results |= {"costs": pipe.profile(inputs, targets, steps=1), "report": pipe.describe(inputs, targets)}
                results["forecast"] = pipe.memory_forecast(results["costs"])
            assert results["added losses"]["router"].item() > 0
            found |= {f"{name} of step {step}": (result, deepcopy(result)) for name, result in results.items()}
        assert device.num_replays == STEPS - 2
        return [name for name, (result, copy) in found.items() if not equal(result, copy)]


def equal(result: Any, copy: Any) -> bool:
    (mine, spec), (theirs, other) = map(tree_flatten, (result, copy))
    return bool(spec == other) and all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize(("num_microbatches", "scale"), every(4, [(1, "none"), (4, "none"), (1, "loss"), (4, "loss")]))
def test_later_steps_leave_results_as_they_are(world: Ranks, num_microbatches: int, scale: str) -> None:
    for changed in world.run(kept, num_microbatches, scale, ranks=2):
        assert changed == []


class Normalized(nn.Module):
    """Keeps running statistics, and takes a named argument."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width, dtype=torch.float64)
        self.linear = nn.Linear(width, width, dtype=torch.float64)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return self.linear(self.norm(x)) + shift


def square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def with_buffers(group: Any, graphs: str | bool) -> list[Tensor]:
    def built(stage: int, num_stages: int) -> nn.Module:
        torch.manual_seed(stage)
        return Normalized()

    options: dict[str, Any] = {"main_grad": torch.float32, "cuda_graphs": graphs}
    with checked_device(), zb.Pipeline(built, "zb-v", 4, square, group=group, transport="gloo", **options) as pipe:
        losses = []
        for step in range(5):
            torch.manual_seed(step)
            given = torch.randn(8, 6, dtype=torch.float64)
            losses.append(pipe.step(given, given.cos(), kwargs={"shift": given.sin()}))
        return [
            *losses,
            *(b.clone() for module in pipe.modules.values() for b in module.buffers()),
            *(p.main_grad for p in pipe.parameters()),
        ]


def test_a_replay_updates_buffers_and_reads_named_arguments(world: Ranks) -> None:
    for replayed, plain in zip(world.run(with_buffers, "step", ranks=2), world.run(with_buffers, False, ranks=2), strict=True):
        assert all(map(torch.equal, replayed, plain))


def refused_steps(group: Any) -> list[str]:
    """The errors of steps that the graph cannot repeat, each on all ranks; the pipeline stays open."""
    found = []

    def refused(call: Callable[[], object]) -> None:
        with pytest.raises(zb.InputError) as caught:
            call()
        found.append(str(caught.value))

    with checked_device(), captured(group) as pipe:
        for step in range(4):
            pipe.step(*batch(4, seed=step))
        longer, whole = batch(4, length=7), batch(4)
        refused(lambda: pipe.step(*longer))
        refused(lambda: pipe.step(whole[0].to(torch.int32), whole[1]))
        refused(lambda: pipe.step(*batch(8), num_microbatches=8))
        refused(lambda: pipe.step(*whole, scaler=torch.amp.GradScaler("cpu")))
        refused(pipe.timeline)
        refused(lambda: pipe.attach(zb.hooks.StepHook()))
        pipe.step(*whole)
    return found


def test_a_step_that_differs_from_the_captured_one_is_refused(world: Ranks) -> None:
    found = world.run(refused_steps, ranks=2)
    assert found[0] == found[1]
    stated = [["(2, 7)", "(2, 5)"], ["int32", "int64"], ["8", "4"], ["scaler"], ["times"], ["hook"]]
    for message, parts in zip(found[0], stated, strict=True):
        states(message, "captured", *parts)


def drawing(stage: int, num_stages: int) -> nn.Module:
    return nn.Sequential(build(stage, num_stages), nn.Dropout(0.5)) if stage == num_stages - 1 else build(stage, num_stages)


class Reading(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.detach().sum().item()


def reading(stage: int, num_stages: int) -> nn.Module:
    return nn.Sequential(build(stage, num_stages), Reading()) if stage == 0 else build(stage, num_stages)


def failure(group: Any, case: str) -> str:
    built = {"drawing": drawing, "reading": reading}.get(case, build)
    with checked_device(continues=True), captured(group, built=built, timeout=60.0) as pipe:
        try:
            for step in range(4):
                pipe.step(*batch(4, seed=step))
            if group.rank() == 1 and case == "mode":
                for module in pipe.modules.values():
                    module.eval()
            elif group.rank() == 1:
                for parameter in pipe.parameters():
                    parameter.data = parameter.data.clone()
            pipe.step(*batch(4))
        except zb.PipelineError as error:
            return str(error)
    return ""


ENDING = {"drawing": ["random", "stage 1"], "reading": ["host", "waits"], "replaced": ["parameters"], "mode": ["eval()"]}


@pytest.mark.parametrize("case", ENDING)
def test_what_a_graph_cannot_repeat_ends_the_pipeline_on_every_rank(world: Ranks, case: str) -> None:
    for message in world.run(failure, case, ranks=2):
        states(message, "cuda_graphs='step'", *ENDING[case])


def refused(group: Any, options: dict[str, Any]) -> str:
    name = options.pop("schedule", "zb-h1")
    if name == "recompute":
        name = zb.schedules.with_recompute(zb.make("1f1b", group.size(), 4))
    with checked_device(), pytest.raises(zb.InputError) as caught:
        zb.Pipeline(build, name, 4, loss_fn, group=group, cuda_graphs="step", **{"transport": "gloo", **options})
    return str(caught.value)


REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "functions": (
        {"hooks": [zb.hooks.StepHook()], "on_loss": print, "loss_weight": len, "scale": "gradients"},
        ["hooks", "on_loss", "loss_weight", "scale"],
    ),
    "order": ({"order_by": "tokens"}, ["order_by"]),
    "planner": ({"schedule": "auto"}, ["auto"]),
    "recompute": ({"schedule": "recompute"}, ["recompute"]),
    "tied": ({"tied": [[(0, "0.weight"), (1, "1.weight")]]}, ["tied"]),
    "copies": ({"schedule": "dualpipe"}, ["copied"]),
    "transport": ({"transport": "staged"}, ["staged"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_graph_cannot_contain_is_refused_when_the_pipeline_is_made(world: Ranks, case: str) -> None:
    options, stated = REFUSED[case]
    found = world.run(refused, options, ranks=2)
    assert len(set(found)) == 1
    states(found[0], "cuda_graphs='step'", *stated)
