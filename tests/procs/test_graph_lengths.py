"""A graph stage with inputs of many sizes: one trace serves them all and matches autograd.

A symbolic trace runs only if its guards hold, and only if it gives the graph that was traced with numbers.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import TypeAlias

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.split.run import Block
from tests.device import DEVICE
from tests.procs.test_compiled_sizes import WIDTH, compare, language_model, tokens
from tests.procs.versions import needs_checkpoints_in_graphs, needs_symbolic_lengths
from zerobubble.runtime.split.graph import GraphSplitter
from zerobubble.runtime.stage.stage import Stage, make_stage

pytestmark = pytest.mark.in_process

LENGTHS = (6, 12, 31, 7, 6)


def traced(stage: Stage) -> int:
    """How many traces a stage has made and kept."""
    assert isinstance(stage.splitter, GraphSplitter)
    return len(stage.splitter.traces)


def activations(*shape: int) -> tuple[Tensor]:
    """An input with a gradient."""
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).requires_grad_(),)


def trained(module: nn.Module, shapes: Iterable[tuple[int, ...]]) -> Stage:
    """A stage that was compared with one device for activations of these shapes."""
    module = module.double()
    oracle, stage = deepcopy(module), make_stage("graph", module, 1)
    for shape in shapes:
        compare(stage, oracle, activations(*shape))
    return stage


def notes(stage: Stage) -> tuple[str, ...]:
    report = stage.splitter.report()
    assert report is not None
    return report.notes


def test_one_trace_serves_the_first_length_and_one_all_others() -> None:
    module = language_model()
    oracle, stage = deepcopy(module), make_stage("graph", module, 0)
    for length in LENGTHS:
        compare(stage, oracle, tokens(2, length))
    assert traced(stage) == 2
    assert notes(stage) == ()


@pytest.mark.long
def test_lengths_of_activations_take_two_traces() -> None:
    stage = trained(nn.Sequential(Block(WIDTH)), [(2, length, WIDTH) for length in LENGTHS])
    assert traced(stage) == 2


@pytest.mark.long
def test_batches_and_lengths_that_change_apart_take_one_trace_more() -> None:
    shapes = [(2, 6), (2, 12), (3, 12), (5, 7), (2, 31), (4, 12), (7, 7), (9, 64)]
    stage = trained(nn.Sequential(Block(WIDTH)), [(*shape, WIDTH) for shape in shapes])
    assert traced(stage) == 3


@pytest.mark.long
def test_a_length_of_one_has_a_trace_of_its_own() -> None:
    stage = trained(nn.Sequential(Block(WIDTH)), [(2, length, WIDTH) for length in (1, 6, 12, 20, 1, 7)])
    assert traced(stage) == 3


@pytest.mark.long
def test_a_trace_serves_inputs_at_any_storage_offset() -> None:
    """Received tensors are contiguous in one buffer, so their offsets change with their lengths."""
    module = nn.Sequential(Block(WIDTH)).double()
    oracle, stage = deepcopy(module), make_stage("graph", module, 1)
    for length in LENGTHS:
        message = torch.randn(2 * length * (1 + WIDTH), dtype=torch.float64)
        compare(stage, oracle, (message[2 * length :].view(2, length, WIDTH).requires_grad_(),))
    assert traced(stage) == 2


@pytest.mark.long
def test_microbatches_of_many_lengths_in_flight() -> None:
    module = nn.Sequential(Block(WIDTH), Block(WIDTH)).double()
    oracle, stage = deepcopy(module), make_stage("graph", module, 1)
    for _ in range(2):
        stage.begin(None)
        stage.module.zero_grad()
        oracle.zero_grad()
        outputs = [stage.forward(i, activations(2, length, WIDTH))[0] for i, length in enumerate(LENGTHS)]
        gradients = [torch.cos(output.detach()) for output in outputs]
        for i, gradient in enumerate(gradients):
            stage.backward(i, (gradient,))
        for i in range(len(gradients)):
            stage.weight(i)
        for length, output, gradient in zip(LENGTHS, outputs, gradients, strict=True):
            expected = oracle(*activations(2, length, WIDTH))
            assert torch.equal(expected, output)
            expected.backward(gradient)
        for p, q in zip(stage.module.parameters(), oracle.parameters(), strict=True):
            assert p.grad is not None
            assert q.grad is not None
            assert torch.equal(p.grad, q.grad)
        del outputs, output
    assert traced(stage) == 2


class Lengthwise(nn.Module):
    """A Linear followed by `follow`.

    No forward here asserts anything: pytest rewrites assertions, and a stage would watch what of pytest they then reach.
    """

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.linspace(0, 1, 400).view(100, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.follow(self.linear(x))

    def follow(self, y: Tensor) -> Tensor:
        raise NotImplementedError


class ByFraction(Lengthwise):
    def follow(self, y: Tensor) -> Tensor:
        return y * (1 / y.shape[1]) * 0.1 * 0.7 + y.shape[1] ** -0.5


class ByPosition(Lengthwise):
    def follow(self, y: Tensor) -> Tensor:
        length = y.shape[1]
        return y * torch.arange(length)[:, None] + self.table[:length]


class ByMask(Lengthwise):
    def follow(self, y: Tensor) -> Tensor:
        length = y.shape[1]
        mask = torch.full((length, length), float("-inf")).triu(1)
        weights = (y @ y.transpose(1, 2) / 2 + mask).softmax(-1)
        return (weights @ y).masked_fill(torch.ones(length, 1, dtype=torch.bool).tril(-3), 0.5)


class ByHalves(Lengthwise):
    def follow(self, y: Tensor) -> Tensor:
        batch, length, width = y.shape
        pairs = y[:, : length // 2 * 2].reshape(batch, length // 2, 2 * width)
        return torch.cat([pairs.flatten(), y[:, length // 2 :].cumsum(1).flatten(), y.roll(length // 3, 1).flatten()])


class ByPadding(Lengthwise):
    def follow(self, y: Tensor) -> Tensor:
        length = y.shape[1]
        padded = nn.functional.pad(y, (0, 0, 0, -length % 8))
        return padded.unflatten(1, (-1, 8)).mean(2)


class ByMean(Lengthwise):
    def follow(self, y: Tensor) -> Tensor:
        chunks = y.chunk(2, 1)
        return torch.cat([chunks[0].mean(1), chunks[1].std(1), y.mean(dim=(0, 1))[None], y.expand(3, *y.shape).mean((0, 2))])


@pytest.mark.sweep
@pytest.mark.parametrize("kind", [ByPosition, ByMask, pytest.param(ByPadding, marks=needs_symbolic_lengths), ByMean])
def test_numbers_that_follow_from_the_length(kind: type[Lengthwise]) -> None:
    stage = trained(kind(), [(2, length, 4) for length in (8, 16, 9, 6, 25, 64)])
    assert traced(stage) == 2, notes(stage)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", [ByFraction, pytest.param(ByHalves, marks=needs_symbolic_lengths)])
def test_graphs_that_torch_writes_in_another_way_with_symbols_are_traced_for_each_length(kind: type[Lengthwise]) -> None:
    """A number that is no size becomes a tensor, and a slice of all that there is stays a slice."""
    stage = trained(kind(), [(2, length, 4) for length in (8, 16, 9, 25)])
    assert traced(stage) == 4
    assert notes(stage) == ("traced again for inputs of each size: its graph with symbolic sizes differs from the one with constant sizes",)


Follow: TypeAlias = Callable[[Tensor], Tensor]
OPERATIONS: dict[str, Follow] = {
    "unflatten": lambda y: y.unflatten(1, (-1, 2)).cumsum(2).mean(1),
    "view": lambda y: y.contiguous().view(-1, 2, 4).cumsum(1),
    "reshape": lambda y: y.transpose(0, 1).reshape(y.shape[0], -1).roll(1, 1),
    "chunk": lambda y: torch.cat([part * i for i, part in enumerate(y.chunk(3, 1), 1)], 1),
    "split": lambda y: torch.cat([part.cumsum(1) for part in y.split(4, 1)], 1),
    "a slice beyond the end": lambda y: y + y[:, 1:9].mean(1, keepdim=True),
    "a size of one": lambda y: y * y[:, : max(1, y.shape[1] - 6)].sum(1, keepdim=True).tanh(),
    "padding": lambda y: nn.functional.pad(y, (0, 0, 0, -y.shape[1] % 3)).unflatten(1, (-1, 3)).cumsum(1),
    "the smaller of two sizes": lambda y: y * y[:, : min(y.shape[1], 2 * y.shape[0])].sum(),
    "a condition on sizes": lambda y: y.sin() if y.shape[1] % 4 == 0 or y.shape[1] > 9 or y.shape[0] == 3 else y.cos(),
    "equal sizes": lambda y: (y.transpose(0, 1) if y.shape[0] == y.shape[1] else y).cumsum(0),
    "a stride": lambda y: y * (2 if y.stride(0) > 20 else 3),
}  # fmt: skip


class ByOperation(Lengthwise):
    def __init__(self, follow: Follow) -> None:
        super().__init__()
        self.operation = follow

    def follow(self, y: Tensor) -> Tensor:
        return self.operation(y)


@pytest.mark.sweep
@pytest.mark.parametrize("name", OPERATIONS)
def test_batches_and_lengths_in_any_order(name: str) -> None:
    """Their guards have conditions with `or`, remainders and quotients: no trace is used for sizes that contradict one of them."""
    shapes = [(2, 4), (2, 8), (3, 8), (2, 6), (3, 2), (4, 4), (2, 12), (3, 6), (1, 8), (2, 2)]
    random.Random(name).shuffle(later := shapes[3:])
    trained(ByOperation(OPERATIONS[name]), [(*shape, 4) for shape in (*shapes[:3], *later)])


class ByBranch(Lengthwise):
    def follow(self, y: Tensor) -> Tensor:
        return y.sin() if y.shape[1] > 10 else y.cos()


def test_each_branch_on_the_length_has_a_trace() -> None:
    stage = trained(ByBranch(), [(2, length, 4) for length in (6, 7, 20, 8, 11, 10, 64, 9)])
    assert traced(stage) == 3


class ByNumber(Lengthwise):
    def follow(self, y: Tensor) -> Tensor:
        return y / math.sqrt(y.shape[1])


def test_a_forward_that_makes_a_number_of_the_length_is_traced_for_each() -> None:
    stage = trained(ByNumber(), [(2, length, 4) for length in LENGTHS])
    assert traced(stage) == len(set(LENGTHS))
    assert notes(stage) == ("traced again for each size of dimension 1 of input 0: its forward converts it to a number",)


@pytest.mark.long
def test_what_makes_a_number_of_one_size_leaves_others_symbols() -> None:
    stage = trained(ByNumber(), [(2, 6, 4), (3, 6, 4), (4, 6, 4), (2, 7, 4), (3, 7, 4), (5, 7, 4), (9, 7, 4)])
    assert traced(stage) < 7


class ByType(Lengthwise):
    def follow(self, y: Tensor) -> Tensor:
        return y.sin() if isinstance(y.shape[1], int) else y.cos()


@pytest.mark.long
def test_a_graph_that_differs_with_symbols_is_not_taken() -> None:
    stage = trained(ByType(), [(2, length, 4) for length in LENGTHS])
    assert traced(stage) == len(set(LENGTHS))
    assert notes(stage) == ("traced again for inputs of each size: its graph with symbolic sizes differs from the one with constant sizes",)


class Masked(nn.Module):
    """Branches on the numbers of a mask, as long as the input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.linear(x)
        return y if mask[:, : x.shape[1]].all() else y * mask[..., None]


@pytest.mark.long
def test_each_branch_on_the_numbers_of_a_mask_has_a_trace() -> None:
    module = Masked().double()
    oracle, stage = deepcopy(module), make_stage("graph", module, 1)
    for length in LENGTHS:
        for hidden in (0, 1, 2):
            mask = torch.ones(2, length, dtype=torch.bool)
            mask[0, :hidden] = False
            compare(stage, oracle, (*activations(2, length, 4), mask))
    assert traced(stage) <= 4


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(Block(WIDTH), nn.Dropout(0.5)) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


@pytest.mark.long
@needs_checkpoints_in_graphs
def test_checkpoints_and_dropout_in_many_lengths() -> None:
    module = Checkpointed().double()
    oracle, stage = deepcopy(module), make_stage("graph", module, 1)
    for length in LENGTHS:
        inputs = activations(2, length, WIDTH)
        stage.begin(None)
        stage.module.zero_grad()
        oracle.zero_grad()
        torch.manual_seed(length)
        (y,) = stage.forward(0, inputs)
        stage.backward(0, (torch.ones(2, length, WIDTH, dtype=torch.float64),))
        stage.weight(0)
        torch.manual_seed(length)
        expected = oracle(*inputs)
        expected.sum().backward()
        assert torch.equal(y, expected)
        del y
        for p, q in zip(stage.module.parameters(), oracle.parameters(), strict=True):
            assert p.grad is not None
            assert q.grad is not None
            assert torch.equal(p.grad, q.grad)
    assert traced(stage) == 2


@pytest.mark.long
def test_lengths_under_autocast() -> None:
    module = nn.Sequential(Block(WIDTH))
    oracle, stage = deepcopy(module), make_stage("graph", module, 1)
    for length in LENGTHS:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            compare(stage, oracle, (activations(2, length, WIDTH)[0].detach().float().requires_grad_(),), tolerance=2**-8)
    assert traced(stage) == 2


class Averaging(nn.Module):
    """Changes a buffer and returns two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(4))
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.average.mul_(0.5).add_(x.detach().mean((0, 1)))
        return self.first(x), self.second(x).flatten(0, 1)


def test_changed_buffers_and_ignored_outputs_in_many_lengths() -> None:
    module = Averaging().double()
    oracle, stage = deepcopy(module), make_stage("graph", module, 1)
    for i, length in enumerate(LENGTHS):
        stage.begin(None)
        stage.module.zero_grad()
        oracle.zero_grad()
        inputs = activations(2, length, 4)
        outputs = stage.forward(0, inputs)
        dy = torch.cos(torch.arange(outputs[i % 2].numel(), dtype=torch.float64)).view(outputs[i % 2].shape)
        expected = oracle(*inputs)
        assert all(map(torch.equal, outputs, expected))
        del outputs
        stage.backward(0, (dy, None) if i % 2 == 0 else (None, dy))
        stage.weight(0)
        expected[i % 2].backward(dy)
        for p, q in zip(stage.module.parameters(), oracle.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            assert p.grad is None or q.grad is None or torch.equal(p.grad, q.grad)
        assert all(map(torch.equal, stage.module.buffers(), oracle.buffers()))
    assert traced(stage) == 2


def test_lengths_where_nothing_has_a_gradient() -> None:
    module = ByPosition().double().requires_grad_(False)
    stage = make_stage("graph", module, 0)
    for length in LENGTHS:
        inputs = (activations(2, length, 4)[0].detach(),)
        stage.begin(None)
        assert torch.equal(stage.forward(0, inputs)[0], module(*inputs))
    assert traced(stage) == 2
