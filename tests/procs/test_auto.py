"""`schedule="auto"`: every step trains, the plan comes while it does, and comes anew when passes take another time."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from tests.procs.ranks import Ranks
from tests.procs.test_profile import Doze
from zerobubble.runtime.hooks import auto

M = 6


def dozing(stage: int, num_stages: int) -> nn.Module:
    torch.manual_seed(stage)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), Doze(2.0 if stage == 1 else 0.5)).double()


def data(step: int) -> Tensor:
    return torch.randn(2 * M, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def reference(num_stages: int, steps: int) -> list[tuple[float, list[Tensor]]]:
    """Loss and first-stage gradients of one device, step by step."""
    modules = [nn.Sequential(*[part for part in dozing(s, num_stages).children() if not isinstance(part, Doze)]) for s in range(num_stages)]  # type: ignore[arg-type]
    model, found = nn.Sequential(*modules), []
    for step in range(steps):
        total = 0.0
        for x in data(step).chunk(M):
            loss = nn.functional.mse_loss(model(x), x) / M
            loss.backward()
            total += loss.item()
        found.append((total, [p.grad.clone() for p in model.parameters() if p.grad is not None]))
        model.zero_grad()
    return found


def train(group: Any, placement: str, limit: int | None) -> tuple[list[str], int, Any]:
    """Step until the plan is there, then slow one stage down until there is another; compares every step with one device."""
    auto.SECONDS, auto.REVIEW = 1.0, 2
    names: list[str] = []
    plans: list[dict[str, Any]] = []
    with zb.Pipeline(dozing, zb.Auto(placement, limit), M, nn.functional.mse_loss, group=group) as pipe:
        names.append(pipe.schedule.name)
        wanted = reference(pipe.schedule.num_stages, 1)[0]
        end = time.monotonic() + 200
        while len(plans) < 3 and time.monotonic() < end:
            loss = pipe.step(data(0), data(0))
            assert abs(loss.item() - wanted[0]) < 1e-12
            mine = {id(p): k for k, p in enumerate(p for s in range(pipe.schedule.num_stages) for p in _of(pipe, s))}
            for parameter in pipe.parameters():
                assert parameter.grad is not None
                assert torch.allclose(parameter.grad, wanted[1][mine[id(parameter)]], rtol=1e-12, atol=1e-14)
                parameter.grad = None
            if pipe.schedule.name != names[-1]:
                names.append(pipe.schedule.name)
            if pipe.plan is not None and (not plans or pipe.plan.to_dict() != plans[-1]):
                plans.append(pipe.plan.to_dict())
                if len(plans) == 2:
                    for module in pipe.modules.values():
                        module[2].units *= 3  # type: ignore[index,union-attr,operator]
        assert len(plans) == 3, f"{len(plans)} plans in 200 s"
        assert pipe.plan is not None
        held = zb.simulation.peak_memory(pipe.schedule, pipe.plan.problem.costs)
        assert limit is None or max(held) <= limit
        return names, len(plans), [plan["costs"] for plan in plans]


def _of(pipe: zb.Pipeline, stage: int) -> list[Any]:
    """The parameters of a stage, placeholders for those of other ranks."""
    return list(pipe.modules[stage].parameters()) if stage in pipe.modules else [object(), object()]


@pytest.mark.parametrize(("placement", "limit"), [("linear", None), pytest.param("vee", 20_000, marks=pytest.mark.long)])
def test_it_trains_plans_and_plans_anew_when_stages_slow_down(world: Ranks, placement: str, limit: int | None) -> None:
    first, *others = world.run(train, placement, limit, ranks=4, seconds=280)
    assert all(other == first for other in others), "all ranks follow the same plans"
    names, _, costs = first
    assert names[0] == "one by one"
    assert costs[0] == costs[1], "the published schedule and the plan are for the same costs"
    slower = [now / was for was, now in zip(costs[1]["forward"], costs[2]["forward"], strict=True)]
    assert all(2 < ratio < 4.5 for ratio in slower), slower
    assert costs[1]["held_after_f"] == costs[2]["held_after_f"]


def refused(group: Any, options: zb.Auto) -> str:
    pipe = None
    try:
        pipe = zb.Pipeline(dozing, options, M, nn.functional.mse_loss, group=group)
        for _ in range(4):
            pipe.step(data(0), data(0))
    except zb.ZeroBubbleError as error:
        return str(error)
    finally:
        if pipe is not None:
            pipe.close()
    return ""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (zb.Auto(memory_limit=10), "no schedule fits into the memory limit"),
        (zb.Auto(memory_limit=[1000, 1000]), "the bytes of each of 4 ranks"),
        (zb.Auto("lineer"), "did you mean 'linear'"),
        (zb.Auto(zb.make("chimera", 4, 4).placement), "give its schedule by name"),
    ],
)
def test_what_cannot_be_planned_is_refused_on_every_rank(world: Ranks, options: zb.Auto, words: str) -> None:
    for said in world.run(refused, options, ranks=4):
        assert words in said


def test_costs_are_corrected_by_what_was_measured() -> None:
    planned = zb.Costs.from_ms([1, 1], [2, 2], [1, 1], 0.5, [7, 7], [3, 3])
    fused = zb.simulate(zb.make("1f1b", 2, 4), zb.Costs.from_ms([2, 1], [3, 2], [1.5, 1]))
    now = auto.corrected(planned, fused)
    assert now == zb.Costs.from_ms([2, 1], [3, 2], [1.5, 1], 0.5, [7, 7], [3, 3]), "a fused stage is scaled as a whole"
    assert auto.how_far(planned, now) == 1.0
    apart = zb.simulate(zb.make("zb-h1", 2, 4), zb.Costs.from_ms([1, 1], [2, 1], [1, 2]))
    assert auto.corrected(planned, apart).weight == (1_000_000, 2_000_000)
    assert auto.how_far(planned, auto.corrected(planned, apart)) == 0.0, "B and W together take what they took"
