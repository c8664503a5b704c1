"""`order_by` plays microbatches by cost; results match one device and come in the order of the data."""

from __future__ import annotations

import math
import re
import threading
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from tests.device import DEVICE
from tests.procs.meshes import init_device_mesh
from tests.procs.models import build, loss_fn
from tests.procs.programs import programs_of, run_forked
from tests.procs.ranks import Ranks
from tests.procs.test_mesh import divided, undivided, whole
from tests.refusals import Stated, raises, states
from zerobubble.planning.unequal.order import with_numbers
from zerobubble.runtime.step.ordering import THREAD, MicrobatchOrdering
from zerobubble.schedules import with_recompute
from zerobubble.simulation import peak_memory

LENGTHS = [3, 12, 2, 9, 5, 12, 1, 7]
SHARES = tuple(float(length) for length in LENGTHS)


@pytest.fixture(scope="module", autouse=True)
def _compiled_search() -> None:
    """Compiles the search for orders once, here, rather than on a rank for which others wait."""
    MicrobatchOrdering("tokens", zb.make("1f1b", 2, 4), None, None)


def packed(lengths: list[int], seed: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    """A microbatch of two sequences for each of `lengths`: its tokens, and its next tokens."""
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(0, 11, (2, length + 1), generator=generator) for length in lengths]
    return [each[:, :-1] for each in tokens], [each[:, 1:] for each in tokens]


def tokens_in(target: Tensor) -> int:
    return target.numel()


def oracle(stages: list[nn.Module], inputs: list[Tensor], targets: list[Tensor]) -> tuple[Tensor, Tensor]:
    """One device: the loss weighted by tokens, whose gradients are left, and the loss of each microbatch."""
    losses = [loss_fn(nn.Sequential(*stages)(x), y) for x, y in zip(inputs, targets, strict=True)]
    weights = torch.tensor([float(y.numel()) for y in targets], dtype=torch.float64)
    loss = (torch.stack(losses) * weights / weights.sum()).sum()
    loss.backward()
    return loss.detach(), torch.stack(losses).detach()


def worst_gradient(pipe: zb.Pipeline, stages: list[nn.Module]) -> float:
    pairs = [pair for s, module in pipe.modules.items() for pair in zip(module.parameters(), stages[s].parameters(), strict=True)]
    found = 0.0
    for mine, theirs in pairs:
        assert mine.grad is not None
        assert theirs.grad is not None
        found = max(found, (mine.grad - theirs.grad).abs().max().item())
    return found


def order_of(schedule: zb.Schedule) -> list[int]:
    return [op.microbatch for op in schedule.rows[0] if op.kind is zb.Kind.F and op.stage == 0]


def steps(group: Any, name: Any, order_by: Any, split: str = "deferred") -> list[int]:
    """Two steps of other lengths, and an evaluation: all that is handed back is as on one device; the order of the first step."""
    heard: dict[int, float] = {}
    with zb.Pipeline(
        build,
        name,
        8,
        loss_fn,
        group=group,
        loss_weight=tokens_in,
        order_by=order_by,
        split=split,
        on_loss=lambda j, loss: heard.update({j: loss.item()}),
    ) as pipe:
        assert pipe.played is None
        orders = []
        stages = [build(s, pipe.schedule.num_stages) for s in range(pipe.schedule.num_stages)]
        for seed, lengths in enumerate((LENGTHS, LENGTHS[::-1])):
            inputs, targets = packed(lengths, seed)
            loss = pipe.step(inputs, targets)
            expected, each = oracle(stages, inputs, targets)
            assert pipe.losses is not None
            assert abs(loss - expected).item() <= 1e-12
            assert (pipe.losses - each).abs().max().item() <= 1e-12
            assert all(abs(value - each[j].item()) <= 1e-12 for j, value in heard.items())
            assert worst_gradient(pipe, stages) <= 1e-12
            assert pipe.played is not None
            orders.append(order_of(pipe.played))
            timeline = pipe.timeline()
            assert [[span.op for span in row] for row in timeline.rows] == [list(row) for row in pipe.played.rows]
        evaluated, outputs = pipe.eval_step(inputs, targets)
        assert evaluated is not None
        if outputs is not None:
            assert [tuple(output.shape[:2]) for output in outputs] == [(2, length) for length in LENGTHS[::-1]]
        assert orders[0] != orders[1]
        assert sorted(orders[0]) == list(range(8))
        return orders[0]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("schedule", "split"),
    [
        (zb.make("1f1b", 2, 8), "deferred"),
        (zb.make("zb-h1", 4, 8), "deferred"),
        (zb.make("zb-v", 2, 8), "graph"),
        (zb.make("interleaved-1f1b", 4, 8), "whole"),
        (with_recompute(zb.make("zb-h1", 2, 8)), "deferred"),
        (with_recompute(zb.make("1f1b", 2, 8), stages=[0], microbatches=[1, 2, 4, 7]), "deferred"),
    ],
    ids=lambda given: given.name if isinstance(given, zb.Schedule) else given,
)
def test_ordered_steps_have_the_numbers_of_one_device(world: Ranks, schedule: zb.Schedule, split: str) -> None:
    orders = world.run(steps, schedule, "tokens", split, ranks=schedule.num_ranks)
    assert all(order == orders[0] for order in orders)
    costs = replace(zb.Costs.uniform(schedule.num_stages).with_recompute(zb.costs.FULL), shares=SHARES)
    played = with_numbers(schedule, orders[0])
    assert zb.simulate(played, costs).span < zb.simulate(schedule, costs).span


class Scaled(nn.Module):
    """A stage that is given a factor for each microbatch, and draws random numbers."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.inner(self.dropout(x) * scale) if x.is_floating_point() else self.inner(x)


def scaled(stage: int, num_stages: int) -> nn.Module:
    return Scaled(build(stage, num_stages))


def named_and_random(group: Any) -> bool:
    """Named arguments and random numbers go with their microbatches, whatever the order in which these are played."""
    inputs, targets = packed(LENGTHS)
    kwargs = [{"scale": 1.0 + j / 8} for j in range(8)] if group.rank() == 1 else None
    found = []
    for order_by in (None, "tokens"):
        torch.manual_seed(7)
        with zb.Pipeline(scaled, "zb-h1", 8, loss_fn, group=group, loss_weight=tokens_in, order_by=order_by) as pipe:
            pipe.step(inputs, targets, kwargs=kwargs)
            assert pipe.losses is not None
            assert pipe.played is not None
            found.append((pipe.losses, [p.grad for p in pipe.parameters()], order_of(pipe.played)))
    (losses, gradients, order), (ordered_losses, ordered_gradients, other_order) = found
    pairs = zip(gradients, ordered_gradients, strict=True)
    return order != other_order and torch.equal(losses, ordered_losses) and all(torch.allclose(*pair, rtol=1e-12) for pair in pairs)


def test_named_arguments_and_random_numbers_go_with_their_microbatch(world: Ranks) -> None:
    assert all(world.run(named_and_random, ranks=2))


def by_function(group: Any) -> list[list[int]]:
    """The orders of steps whose costs a function returns, as numbers and as tensors, for lists of microbatches and for a batch."""
    inputs, targets = packed(LENGTHS)
    seen: list[Any] = []

    def squared(microbatch: tuple[Tensor]) -> Tensor:
        seen.append(microbatch)
        return torch.tensor(microbatch[0].shape[1] ** 2)

    orders = []
    with zb.Pipeline(build, "1f1b", 8, loss_fn, group=group, order_by=squared) as pipe:
        for given in ([(x,) for x in inputs], (torch.cat([x[:, :1] for x in inputs]),)):
            aims = targets if isinstance(given, list) else torch.cat([y[:, :1] for y in targets])
            pipe.step(given, aims)
            assert pipe.played is not None
            orders.append(order_of(pipe.played))
    assert len(seen) == (16 if group.rank() == 0 else 0)
    assert all(torch.equal(mine, x) for (mine,), x in zip(seen, inputs, strict=False))
    return orders


def test_a_function_shows_costs_and_equal_ones_keep_the_order_of_the_data(world: Ranks) -> None:
    for ordered, alike in world.run(by_function, ranks=2):
        assert ordered != list(range(8))
        assert sorted(ordered) == list(range(8))
        assert alike == list(range(8))


def refused_ahead(group: Any) -> None:
    """What `order_ahead` refuses; a search that nobody waited for ends with the pipeline."""
    inputs, _ = packed(LENGTHS)
    with zb.Pipeline(build, "zb-h1", 8, loss_fn, group=group, order_by="tokens") as pipe:
        for wrong, stated in ((inputs[1:], (7, 8, "microbatches")), (torch.ones(8, 2), ("order_ahead", "Tensor"))):
            if group.rank() == 0:
                with raises(zb.InputError, *stated):
                    pipe.order_ahead(wrong)  # type: ignore[arg-type]
        pipe.order_ahead(packed([9, 1, 1, 1, 1, 1, 1, 1])[0])
    assert all(thread.name != THREAD for thread in threading.enumerate())
    with zb.Pipeline(build, "zb-h1", 8, loss_fn, group=group) as pipe, raises(zb.InputError, "order_by", "Pipeline"):
        pipe.order_ahead(inputs)


def test_what_cannot_be_ordered_ahead_is_refused(world: Ranks) -> None:
    world.run(refused_ahead, ranks=2)


def refused_costs(group: Any, costs: list[Any]) -> str:
    found = iter(costs)
    pipe = zb.Pipeline(build, "1f1b", 4, loss_fn, group=group, order_by=lambda _: next(found))
    with pytest.raises(zb.InputError) as caught:
        pipe.step(*packed([1, 2, 3, 4]))
    return str(caught.value)


@pytest.mark.parametrize(
    ("costs", "stated"),
    [
        ([1.0, -2.0, 3.0, math.nan], (-2.0, "microbatch 1", "nan", "microbatch 3")),
        ([0, 1, math.inf, 1], ("microbatch 0", "inf", "microbatch 2")),
        ([1, 2, [1, 2], "4"], ("[1, 2]", "microbatch 2", "'4'", "microbatch 3")),
    ],
)
def test_costs_that_are_no_numbers_above_0_are_reported_on_all_ranks(world: Ranks, costs: list[Any], stated: Stated) -> None:
    for text in world.run(refused_costs, costs, ranks=2):
        states(text, "order_by", *stated)


REFUSED: list[tuple[dict[str, Any], Stated]] = [
    ({"order_by": "lengths"}, ("order_by", "'tokens'", "None", "'lengths'")),
    ({"schedule": "chimera"}, ("chimera", "2 routes", "microbatches")),
    ({"schedule": "dualpipe-v"}, ("dualpipe-v", "overlapped", "microbatches")),
    ({"schedule": "auto"}, ("auto", "order_by", "zb.plan")),
]


def refused_options(group: Any) -> list[str]:
    found = []
    for changed, _ in REFUSED:
        options = {"build_or_modules": build, "schedule": "1f1b", "num_microbatches": 4, "loss_fn": loss_fn, "order_by": "tokens"} | changed
        with pytest.raises(zb.InputError) as caught:
            zb.Pipeline(**options, group=group)
        found.append(str(caught.value))
    with pytest.raises(zb.InputError) as caught:
        zb.Pipeline(build, "1f1b", 4, loss_fn, group=group, order_by="tokens" if group.rank() else None)
    return [*found, str(caught.value)]


def test_what_cannot_be_ordered_is_refused(world: Ranks) -> None:
    for *found, differing in world.run(refused_options, ranks=2):
        for text, (_, stated) in zip(found, REFUSED, strict=True):
            states(text, *stated)
        states(differing, "order_by", "rank 0", "None", "rank 1")


@pytest.mark.long
def test_the_program_of_the_page_runs_as_it_is_pasted(tmp_path: Path) -> None:
    (program,) = [program for program in programs_of("docs/unequal.md") if "zb.Pipeline" in program]
    found = run_forked(program, tmp_path, 2).splitlines()
    assert len(found) == 3
    for step, line in enumerate(found):
        printed = re.fullmatch(rf"step {step}: loss [0-9.]+, played in the order \[(.*)\]", line)
        assert printed is not None, line
        assert sorted(map(int, printed[1].split(", "))) == list(range(8))


def without_a_barrier(group: Any) -> float:
    """How far parameters are from one device's after steps that are validated when the next has begun, and that are clipped."""
    with zb.Pipeline(build, "zb-h1", 8, loss_fn, group=group, loss_weight=tokens_in, order_by="tokens") as pipe:
        stages = [build(s, 2) for s in range(2)]
        one_device = torch.optim.SGD(nn.ModuleList(stages).parameters(), lr=0.1)
        optimizer = zb.PostValidation(torch.optim.SGD(pipe.parameters(), lr=0.1), pipe, max_norm=0.1)
        for seed, lengths in enumerate((LENGTHS, LENGTHS[::-1], LENGTHS[3:] + LENGTHS[:3])):
            inputs, targets = packed(lengths, seed)
            oracle(stages, inputs, targets)
            nn.utils.clip_grad_norm_(nn.ModuleList(stages).parameters(), 0.1)
            one_device.step()
            one_device.zero_grad()
            pipe.step(inputs, targets)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.settle()
        pairs = [pair for s, module in pipe.modules.items() for pair in zip(module.parameters(), stages[s].parameters(), strict=True)]
        return max((mine - theirs).abs().max().item() for mine, theirs in pairs)


def test_steps_that_start_over_keep_their_order(world: Ranks) -> None:
    assert max(world.run(without_a_barrier, ranks=2)) <= 1e-12


def in_lockstep(group: Any) -> tuple[list[int], float]:
    """The order of a step if tensor parallelism divides stages and the ranks report different costs, and the worst gradient error."""
    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("pp", "tp"))
    weight = 1 + mesh.get_local_rank("tp")
    with zb.Pipeline(divided(mesh), "1f1b", 8, loss_fn, mesh=mesh, loss_weight=tokens_in, order_by=lambda x: x.shape[1] ** weight) as pipe:
        stages = [undivided(s, 2) for s in range(2)]
        inputs, targets = packed(LENGTHS)
        pipe.step(inputs, targets)
        oracle(stages, inputs, targets)
        worst = max(
            (whole(mine.grad) - theirs.grad).abs().max().item()
            for s, module in pipe.modules.items()
            for mine, theirs in zip(module.parameters(), stages[s].parameters(), strict=True)
        )
        assert pipe.played is not None
        return order_of(pipe.played), worst


@pytest.mark.long
def test_pipelines_whose_stages_talk_to_each_other_take_one_order(world: Ranks) -> None:
    (first, _), *_ = found = world.run(in_lockstep, ranks=4)
    assert first != list(range(8))
    for order, worst in found:
        assert order == first
        assert worst <= 1e-12


def within_the_plan(group: Any, plan: zb.planning.Plan) -> list[int]:
    with zb.Pipeline(build, plan, 8, loss_fn, group=group, order_by="tokens") as pipe:
        pipe.step(*packed(LENGTHS))
        assert pipe.played is not None
        return order_of(pipe.played)


def test_a_plan_prices_the_stages_and_bounds_their_memory(world: Ranks) -> None:
    """With room for as much as the data's order holds, no rank holds more; with room for all, the long ones meet."""
    costs, shares = zb.Costs.uniform(2, (10, 20, 5), 0.5), tuple(share / fmean(SHARES) for share in SHARES)
    priced = replace(costs, shares=shares)
    for microbatches in (2, 8):
        limits = zb.Limits((microbatches * costs.held_after_f[0],) * 2)
        plan = zb.plan(replace(costs, placement=zb.Placement.linear(2)), 8, limits, placements="linear", evaluations=50)
        room = map(max, plan.problem.limits.memory, peak_memory(plan.schedule, priced))
        orders = world.run(within_the_plan, plan, ranks=2)
        assert orders[0] == orders[1]
        played = with_numbers(plan.schedule, orders[0])
        assert all(held <= most for held, most in zip(peak_memory(played, priced), room, strict=True))
        assert zb.simulate(played, priced).span < zb.simulate(plan.schedule, priced).span
