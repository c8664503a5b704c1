"""Inputs, targets and named arguments that require gradients, such as soft prompts, get the gradients of one device."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from tests.procs.models import Block, batch, build, loss_fn
from tests.procs.ranks import Ranks
from tests.refusals import states
from tests.thinned import every

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


WAYS = [("1f1b", "deferred"), ("zb-h1", "deferred"), ("zb-v", "deferred"), ("zb-h1", "graph")]


@pytest.mark.sweep
@pytest.mark.parametrize(("case", "name", "split"), every(3, ((case, *way) for case in CASES for way in WAYS)))
def test_inputs_that_require_gradients_get_them(world: Ranks, case: str, name: str, split: str) -> None:
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
    with zb.Pipeline(Shifted, "dualpipe", M, mse, group=group) as pipe, pytest.raises(zb.ZeroBubbleError) as caught:
        pipe.step(given.inputs, given.targets, kwargs=given.kwargs)
    return str(caught.value)


@pytest.mark.parametrize(("case", "what"), [("inputs", "inputs"), ("targets", "targets"), ("whole kwargs", "kwargs")])
def test_a_bidirectional_schedule_refuses_inputs_that_require_gradients(world: Ranks, case: str, what: str) -> None:
    for text in world.run(refused, case, ranks=2):
        assert f"{what} require a gradient" in text
        states(text, "schedule", "route")


def mismatched(group: Any, name: str) -> str:
    inputs, targets = batch(M)
    with zb.Pipeline(build, name, M, loss_fn, group=group) as pipe, pytest.raises(zb.ZeroBubbleError) as caught:
        pipe.step(inputs, targets[:M])
    return str(caught.value)


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe"])
def test_fewer_targets_than_inputs_are_refused(world: Ranks, name: str) -> None:
    for text in world.run(mismatched, name, ranks=2):
        states(text, 8, 4, "targets", "inputs")
        states(text, "batch", "size")


def nested(x: Tensor, layout: torch.layout) -> Tensor:
    return torch.nested.nested_tensor([x[0], x[1, :3]], layout=layout)


ODD: dict[str, Any] = {
    "nested": lambda x: nested(x, torch.strided),
    "jagged": lambda x: nested(x, torch.jagged),
    "sparse": lambda x: x.to_sparse(),
    "sparse rows": lambda x: x[0].to_sparse_csr(),
    "quantized": lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.quint8),
    "masked": lambda x: torch.masked.masked_tensor(x, x > 0),
    "conjugate": lambda x: torch.complex(x, x.sin()).conj(),
}


class Reading(Shifted):
    """The first stage converts its input to a plain tensor."""

    def forward(self, x: Any, shift: Tensor | None = None, table: Tensor | None = None) -> Tensor:
        if x.is_nested:
            x = torch.nested.to_padded_tensor(x, 0.0)
        elif type(x) is not Tensor:
            x = x.to_tensor(0.0)
        elif x.is_quantized:
            x = x.dequantize().double()
        elif x.layout is not torch.strided:
            x = x.to_dense()
        elif x.is_complex():
            x = x.real + 2 * x.imag
        return super().forward(x, shift, table)


def odd(group: Any, kind: str, requires: bool) -> float | str:
    """The error of the losses of two steps and an evaluation of microbatches of a kind, and of the gradient of the first; or why not."""
    mine, theirs = ([ODD[kind](x.clone()).requires_grad_(requires) for x in drawn(1, SAMPLES, 5, 6).split(2)] for _ in range(2))
    targets = [torch.zeros(1, dtype=torch.float64)] * M
    try:
        with zb.Pipeline(Reading, "zb-h1", M, mse, group=group) as pipe:
            stages = [Reading(stage, 2) for stage in range(2)]
            losses = [pipe.step(mine, targets), pipe.step(mine, targets), pipe.eval_step(mine, targets)[0]]
            total = torch.zeros((), dtype=torch.float64)
            for x in theirs:
                total = total + mse(stages[1](stages[0](x)), 0.0) / M
            worst = max(abs(loss - total).item() for loss in losses if loss is not None)
            if requires and group.rank() == 0:
                (2 * total).backward()
                first, expected = mine[0].grad, theirs[0].grad
                assert first is not None
                assert expected is not None
                worst = max(worst, (first.to_dense() - expected.to_dense()).abs().max().item())
            return worst
    except zb.InputError as error:
        return str(error)


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ODD)
def test_a_list_may_hold_microbatches_of_any_kind(world: Ranks, kind: str) -> None:
    for worst in world.run(odd, kind, False, ranks=2):
        assert worst <= 1e-12


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", [kind for kind in ODD if kind != "quantized"])
def test_a_special_input_gets_its_gradient_or_is_refused(world: Ranks, kind: str) -> None:
    for result in world.run(odd, kind, True, ranks=2):
        if kind in ("nested", "jagged", "masked"):
            name = "MaskedTensor" if kind == "masked" else "nested tensor"
            states(result, "gradient", foreign=name)
        else:
            assert result <= 1e-12


def uncut(group: Any, kind: str) -> str:
    with zb.Pipeline(Reading, "1f1b", M, mse, group=group) as pipe, pytest.raises(zb.InputError) as caught:
        pipe.step(ODD[kind](drawn(1, SAMPLES, 5, 6)), drawn(2, SAMPLES, 5, 6))
    return str(caught.value)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("kind", "words"), [("nested", "nested"), ("jagged", "nested"), ("sparse", "sparse (torch.sparse_coo)")])
def test_what_cannot_be_cut_is_asked_for_as_a_list(world: Ranks, kind: str, words: str) -> None:
    for text in world.run(uncut, kind, ranks=2):
        states(text, words, 4, "tensor", "microbatches")


def outside(group: Any, what: str) -> list[list[str]]:
    """The warnings of three steps with a parameter outside of the model, which the optimizer holds and which it does not."""
    texts = []
    for is_held in (True, False):
        torch.manual_seed(0)
        free = nn.Parameter(torch.ones(4, dtype=torch.float64))
        model = nn.Sequential(*(nn.Linear(4, 4, dtype=torch.float64) for _ in range(2)))
        x = torch.linspace(-1, 1, 32, dtype=torch.float64).reshape(8, 4)
        with (
            warnings.catch_warnings(record=True) as caught,
            zb.Pipeline(zb.split(model, example=x), "1f1b", 2, nn.functional.mse_loss, group=group) as pipe,
        ):
            warnings.simplefilter("always")
            optimizer = torch.optim.SGD([*pipe.parameters(), *([free] if is_held else [])], lr=0.1)
            for _ in range(3):
                pipe.step(*((x * free, x) if what == "inputs" else (x, x * free)))
                optimizer.step()
                optimizer.zero_grad()
        texts.append([str(each.message) for each in caught if "gradients are there" in str(each.message)])
    return texts


@pytest.mark.parametrize(("what", "rank"), [("inputs", 1), ("targets", 0)])
def test_parameters_that_another_rank_trains_are_warned_of_once(world: Ranks, what: str, rank: int) -> None:
    found = world.run(outside, what, ranks=2)
    assert [[len(texts) for texts in of_rank] for of_rank in found] == [[int(number == rank), 0] for number in range(2)]
