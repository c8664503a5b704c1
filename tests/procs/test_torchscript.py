"""TorchScript stages and parts of stages: weight gradients stay in B, and all results match one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from tests.procs.ranks import Ranks
from tests.refusals import raises
from zerobubble.runtime.split.ways import TRACED, make_splitter
from zerobubble.runtime.values.gradients import Gradients
from zerobubble.schedules import with_recompute

pytestmark = pytest.mark.filterwarnings("ignore")  # torch calls TorchScript deprecated


class Normed(nn.Module):
    """A part with a weight and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(torch.tanh(self.linear(x)))


class Around(nn.Module):
    """A stage of which a part is in TorchScript, and a layer is not."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part, self.last = part, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.part(x))


def build(stage: int, num_stages: int) -> nn.Module:
    torch.manual_seed(stage)
    if stage == 0:
        return torch.jit.script(Normed().double())
    traced = torch.jit.trace(Normed().double(), torch.ones(2, 4, dtype=torch.float64))
    return Around(traced if stage % 2 else torch.jit.script(Normed().double())).double()


def mse(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def scripted(group: Any, name: str, recompute: bool) -> tuple[float, list[set[str]]]:
    """How far gradients and running statistics are from one device's after two steps and a profile; what B does, by stage."""
    schedule = zb.make(name, group.size(), 3)
    schedule = with_recompute(schedule) if recompute else schedule
    with zb.Pipeline(build, schedule, 3, mse, group=group) as pipe:
        stages = nn.Sequential(*(build(stage, schedule.num_stages) for stage in range(schedule.num_stages)))
        x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        reports = pipe.describe(x, x)
        pipe.profile(x, x, steps=1)
        for _ in range(2):
            pipe.step(x, x)
            for part in x.chunk(3):
                (mse(stages(part), part) / 3).backward()
        mine = [tensor for module in pipe.modules.values() for tensor in left(module)]
        theirs = [tensor for stage in pipe.modules for tensor in left(stages[stage])]
        worst = max((a - b).abs().max().item() for a, b in zip(mine, theirs, strict=True))
        return worst, [{each.parameter for each in report.in_b} for report in reports]


def left(module: nn.Module) -> list[Tensor]:
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    assert len(gradients) == len(list(module.parameters()))
    return [*gradients, *module.buffers()]


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "recompute"), [("zb-h1", False), ("zb-v", True)])
def test_stages_and_parts_in_torchscript_train_with_one_devices_numbers(world: Ranks, name: str, recompute: bool) -> None:
    for worst, in_b in world.run(scripted, name, recompute, ranks=2):
        assert worst <= 1e-14
        for stage, names in enumerate(in_b):
            assert ("linear.weight" if stage == 0 else "part.linear.weight") in names
            assert "last.weight" not in names


@pytest.mark.parametrize("way", TRACED)
@pytest.mark.parametrize("make", [lambda: torch.jit.script(Normed()), lambda: Around(torch.jit.script(Normed()))])
def test_a_graph_of_torchscript_is_refused_by_name(way: str, make: Callable[[], nn.Module]) -> None:
    with raises(zb.InputError, "TorchScript", 'split={0: "deferred"}'):
        make_splitter(way, make(), 0, True, Gradients())
