"""Forwards that branch on values of inputs and buffers, such as masks: each microbatch takes the branches of one device.

A trace runs only for inputs with the numbers that it branched on.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from tests.refusals import states
from zerobubble.runtime.stage.stage import Stage, make_stage

pytestmark = pytest.mark.in_process

WIDTH = 4


class Way(nn.Module):
    """A Linear, a buffer, and a custom forward of the module, the Linear's output and a mask."""

    def __init__(self, way: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("limit", torch.tensor(2))
        self.register_buffer("num_calls", torch.tensor(0))
        self.way = way

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.way(self, self.linear(x), mask)


def masked_if_needed(module: Any, y: Tensor, mask: Tensor) -> Tensor:
    return y if mask.all() else y.masked_fill(~mask[:, None], 0.5)


def two_questions(module: Any, y: Tensor, mask: Tensor) -> Tensor:
    if mask.all():
        return y
    return y.tanh() if mask[0] else y.exp()


def as_many_as(module: Any, y: Tensor, mask: Tensor) -> Tensor:
    return y[: int(mask.sum())].sum(0)


def by_a_float(module: Any, y: Tensor, mask: Tensor) -> Tensor:
    return y * mask.double().mean().item()


def as_a_bound(module: Any, y: Tensor, mask: Tensor) -> Tensor:
    """The number is asked for by an operation, not by the code itself."""
    return y + torch.arange(mask.sum())[-1]


def by_a_buffer(module: Any, y: Tensor, mask: Tensor) -> Tensor:
    return y.tanh() if mask.sum() > module.limit else y.exp()


def compared_whole(module: Any, y: Tensor, mask: Tensor) -> Tensor:
    return y.tanh() if torch.equal(mask, torch.ones_like(mask)) else y.exp()


def written_in_place(module: Any, y: Tensor, mask: Tensor) -> Tensor:
    """The number comes of a tensor that is changed in place, through a view."""
    seen = torch.zeros(3, dtype=torch.int64)
    seen[:2] += mask[:2]
    seen[0].add_(1)
    return y.tanh() if seen.max() == 2 else y.exp()


def by_a_constant(module: Any, y: Tensor, mask: Tensor) -> Tensor:
    positions = torch.arange(3) + torch.tensor(1)
    return y.tanh() if (positions[1:] - positions[:-1] == 1).all() else y


def mask(*shown: int) -> Tensor:
    return torch.tensor(shown, dtype=torch.bool)


BRANCHES: dict[str, tuple[Callable[[Any, Tensor, Tensor], Tensor], int]] = {
    "whether all are shown": (masked_if_needed, 2),
    "a question after a question": (two_questions, 3),
    "how many": (as_many_as, 3),
    "a float": (by_a_float, 3),
    "a bound of an operation": (as_a_bound, 3),
    "a buffer": (by_a_buffer, 2),
    "torch.equal": (compared_whole, 2),
    "a tensor written in place": (written_in_place, 2),
    "a constant": (by_a_constant, 1),
}
"""What a forward branches on, and how many branches the masks below take."""
MASKS = (mask(1, 1, 1), mask(0, 1, 1), mask(1, 0, 1), mask(0, 1, 0), mask(1, 1, 1))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def equal_to_autograd(stage: Stage, oracle: nn.Module, mask: Tensor) -> None:
    """F, B and W of one microbatch leave the bits of autograd."""
    stage.begin(None)
    stage.module.zero_grad()
    oracle.zero_grad()
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    (y,) = stage.forward(0, (mine, mask))
    expected = oracle(theirs, mask)
    assert torch.equal(y, expected)
    dy = torch.randn_like(expected)
    stage.backward(0, (dy,))
    stage.weight(0)
    expected.backward(dy)
    assert mine.grad is not None
    assert theirs.grad is not None
    assert torch.equal(mine.grad, theirs.grad)
    for p, q in zip(stage.module.parameters(), oracle.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert torch.equal(p.grad, q.grad)


@pytest.mark.sweep
@pytest.mark.parametrize("name", BRANCHES)
def test_each_microbatch_takes_the_branch_of_its_own_numbers(name: str) -> None:
    way, num_branches = BRANCHES[name]
    module = Way(way).double()
    oracle, stage = deepcopy(module), make_stage("graph", module, 1)
    for mask in MASKS:
        equal_to_autograd(stage, oracle, mask)
    assert len(stage.splitter.traces) == num_branches


def test_a_buffer_that_changes_is_asked_again() -> None:
    module = Way(by_a_buffer).double()
    oracle, stage = deepcopy(module), make_stage("graph", module, 1)
    for limit in (2, 3, 2):
        module.limit.fill_(limit)
        oracle.limit.fill_(limit)
        equal_to_autograd(stage, oracle, mask(1, 1, 1))
    assert len(stage.splitter.traces) == 2


def test_evaluating_guards_changes_no_tensor() -> None:
    """The questions before a forward may write to nothing of the user's."""

    def way(module: Any, y: Tensor, mask: Tensor) -> Tensor:
        counts = mask.to(torch.int64, copy=True)
        counts += 1
        return y.tanh() if counts.sum() > 5 else y.exp()

    module = Way(way).double()
    oracle, stage = deepcopy(module), make_stage("graph", module, 1)
    given = mask(1, 1, 1)
    for _ in range(3):
        equal_to_autograd(stage, oracle, given)
    assert given.all()


def of_activations(module: Any, y: Tensor, mask: Tensor) -> Tensor:
    return y if y.sum() > 0 else -y


def of_weights(module: Any, y: Tensor, mask: Tensor) -> Tensor:
    return y if module.linear.weight.sum() > 0 else -y


def of_random_numbers(module: Any, y: Tensor, mask: Tensor) -> Tensor:
    return y if torch.rand(()) > 0.5 else -y


def of_a_mask_with_activations(module: Any, y: Tensor, mask: Tensor) -> Tensor:
    """Something unknown is written to memory that was known."""
    sums = torch.zeros(3, dtype=y.dtype)
    whole = sums[:]
    whole[0] = y.detach().sum()
    return y if sums.sum() > 0 else -y


def of_an_input_it_changes(module: Any, y: Tensor, mask: Tensor) -> Tensor:
    module.num_calls.add_(1)
    return y if module.num_calls > 2 else -y


REFUSED = {
    "activations": of_activations,
    "weights": of_weights,
    "random numbers": of_random_numbers,
    "activations in a tensor of constants": of_a_mask_with_activations,
    "a buffer that it has changed": of_an_input_it_changes,
}


@pytest.mark.parametrize("name", REFUSED)
def test_numbers_that_cannot_be_asked_for_before_a_forward_are_refused(name: str) -> None:
    module = nn.Sequential(Way(REFUSED[name])).double()
    module.forward = lambda x, mask: module[0](x, mask)  # type: ignore[assignment]
    calls = module[0].num_calls.clone()
    with pytest.raises(zb.InputError) as caught:
        make_stage("graph", module, 1).forward(0, (torch.ones(3, WIDTH, dtype=torch.float64, requires_grad=True), mask(1, 1, 1)))
    states(str(caught.value), "stage 1", 0, 'split={1: "deferred"}')
    assert torch.equal(module[0].num_calls, calls)


def test_numbers_that_are_ever_new_are_warned_of_and_hold_few_traces() -> None:
    module = Way(by_a_float).double()
    oracle, stage = deepcopy(module), make_stage("graph", module, 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(11):
            equal_to_autograd(stage, oracle, torch.arange(3) + i)
    message = [str(warning.message) for warning in caught if "9th" in str(warning.message)]
    assert len(message) == 1
    states(message[0], "stage 1")
    assert len(stage.splitter.traces) == 8
