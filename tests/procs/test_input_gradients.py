"""Inputs, targets and named arguments that require gradients, such as soft prompts, get those of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from tests.procs.models import Block, batch, build, loss_fn
from tests.procs.ranks import Ranks

SAMPLES, M = 8, 4


class Shifted(nn.Module):
    """A block that adds `shift`, and on the first stage multiplies with a `table`, where it is given them."""

    def __init__(self, stage: int, num_stages: int) -> None:
        super().__init__()
        torch.manual_seed(stage)
        self.stage = stage
        self.block = Block(6).double()

    def forward(self, x: Tensor, shift: Tensor | None = None, table: Tensor | None = None) -> Tensor:
        x = x if table is None else x @ table
        return self.block(x) if shift is None else self.block(x + shift) * shift.mean()


def mse(output: Tensor, target: Any) -> Tensor:
    return ((output - target) ** 2).mean()


def drawn(seed: int, *size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Given:
    """What the user has and what a step is given: `leaves` may have gradients, the rest is made of them."""

    def __init__(self, case: str) -> None:
        self.prompt = drawn(1, SAMPLES, 5, 6).requires_grad_("inputs" in case)
        self.aims = drawn(2, SAMPLES, 5, 6).requires_grad_("targets" in case)
        self.shift = drawn(3, SAMPLES, 5, 6).requires_grad_("cut kwargs" in case)
        self.table = drawn(4, 6, 6).requires_grad_("whole kwargs" in case)
        self.leaves = [self.prompt, self.aims, self.shift, self.table]
        through = torch.tanh if "not leaves" in case else (lambda x: x)
        made = [through(leaf) for leaf in self.leaves]
        self.inputs, self.targets, self.kwargs = made[0], made[1], {"shift": made[2], "table": made[3]}
        sizes = [SAMPLES // M] * M
        self.each = [
            (x, y, {"shift": s, "table": made[3]})
            for x, y, s in zip(made[0].split(sizes), made[1].split(sizes), made[2].split(sizes), strict=True)
        ]


CASES = [
    "inputs",
    "inputs, not leaves",
    "targets",
    "cut kwargs",
    "whole kwargs",
    "whole kwargs, not leaves",
    "inputs and targets and cut kwargs and whole kwargs, not leaves",
    "inputs and targets and cut kwargs and whole kwargs, not leaves, as lists",
    "nothing",
]


def gradients(group: Any, name: str, case: str, split: str) -> float:
    """The largest error of the gradients of what the user gave over two steps, by those of one device; None must meet None."""
    mine, theirs = Given(case), Given(case)
    with zb.Pipeline(Shifted, name, M, mse, group=group, split=split) as pipe:
        count = pipe.schedule.num_stages
        stages = [Shifted(stage, count) for stage in range(count)]
        first = group.rank() == pipe.schedule.placement.routes[0][0]
        last = group.rank() == pipe.schedule.placement.routes[0][-1]
        for _ in range(2):
            mine, theirs = Given(case), Given(case)
            if "as lists" in case:
                inputs, targets, kwargs = ([part[i] for part in mine.each] for i in range(3))
                pipe.step(inputs, targets, kwargs=kwargs if first else None)
            else:
                pipe.step(mine.inputs, mine.targets, kwargs=mine.kwargs if first else None)
        total = torch.zeros((), dtype=torch.float64)
        for x, y, named in theirs.each:
            for stage, module in enumerate(stages):
                takes = pipe.schedule.placement.routes[0][stage] == pipe.schedule.placement.routes[0][0]
                x = module(x, named["shift"] if takes else None, named["table"] if takes else None)
            total = total + mse(x, y) / M
        total.backward()
        held = [first, last, first, first]
        worst = 0.0
        for was_given, own, one in zip(held, mine.leaves, theirs.leaves, strict=True):
            assert (own.grad is None) == (one.grad is None or not was_given)
            if own.grad is not None and one.grad is not None:
                worst = max(worst, ((own.grad - one.grad).abs().max() / one.grad.abs().max()).item())
        return worst


@pytest.mark.parametrize(("name", "split"), [("1f1b", "deferred"), ("zb-h1", "deferred"), ("zb-v", "deferred"), ("zb-h1", "graph")])
@pytest.mark.parametrize("case", CASES)
def test_what_requires_a_gradient_gets_it(world: Ranks, case: str, name: str, split: str) -> None:
    for worst in world.run(gradients, name, case, split, ranks=2):
        assert worst <= 1e-12


def added(group: Any) -> tuple[float, float, bool]:
    """A leaf's gradient after two steps by that after one, what a profile and an evaluation add to it, and whether an output needs one."""
    with zb.Pipeline(Shifted, "zb-h1", M, mse, group=group) as pipe:
        given = Given("inputs and targets")
        leaf = given.prompt if group.rank() == 0 else given.aims
        pipe.step(given.inputs, given.targets)
        assert leaf.grad is not None
        once = leaf.grad.clone()
        pipe.step(given.inputs, given.targets)
        twice = (leaf.grad - 2 * once).abs().max().item()
        before = leaf.grad.clone()
        pipe.profile(given.inputs, given.targets, steps=1)
        _, outputs = pipe.eval_step(given.inputs, given.targets)
        return twice, (leaf.grad - before).abs().max().item(), outputs is not None and outputs.requires_grad


def test_gradients_of_inputs_add_up_over_steps_and_only_over_steps(world: Ranks) -> None:
    for twice, untouched, needs in world.run(added, ranks=2):
        assert twice <= 1e-12
        assert untouched == 0
        assert not needs


def refused(group: Any, case: str) -> str:
    given = Given(case)
    with zb.Pipeline(Shifted, "dualpipe", M, mse, group=group) as pipe, pytest.raises(zb.PipelineError) as caught:
        pipe.step(given.inputs, given.targets, kwargs=given.kwargs)
    return str(caught.value)


@pytest.mark.parametrize(("case", "what"), [("inputs", "inputs"), ("targets", "targets"), ("whole kwargs", "kwargs")])
def test_a_bidirectional_schedule_refuses_them(world: Ranks, case: str, what: str) -> None:
    for text in world.run(refused, case, ranks=2):
        assert f"{what} require a gradient" in text
        assert "give them .detach()ed, or choose a schedule with one route" in text


def mismatched(group: Any, name: str) -> str:
    inputs, targets = batch(M)
    with zb.Pipeline(build, name, M, loss_fn, group=group) as pipe, pytest.raises(zb.PipelineError) as caught:
        pipe.step(inputs, targets[:M])
    return str(caught.value)


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe"])
def test_fewer_targets_than_inputs_are_refused(world: Ranks, name: str) -> None:
    for text in world.run(mismatched, name, ranks=2):
        assert "inputs have batch size 8 and targets 4" in text
        assert "give both as long, or as lists of the microbatches" in text
