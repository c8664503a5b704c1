"""F, B and W of one stage, compared with autograd on the whole stage, for every kind of module, in one process.

Gradients of inputs and parameters, buffers, random numbers and arguments of hooks must match autograd, although other microbatches
run between F, B and W of each.

W per parameter leaves the same bits, and reports when each gradient is complete.
"""

from __future__ import annotations

import gc
from collections.abc import Collection

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

from benchmarks.split_matrix.kinds import KINDS
from benchmarks.split_matrix.ways import SHAPE, Ours, Plain, difference, train
from tests.device import DEVICE
from tests.refusals import raises
from tests.thinned import every
from zerobubble import InputError
from zerobubble.runtime.split.layers.stand_ins import shadowing
from zerobubble.runtime.split.layers.weight_work import CAN_SEE_HOOKS
from zerobubble.runtime.stage.stage import make_stage

pytestmark = pytest.mark.in_process

ROUNDED = {
    "weight used outside its linear",
    "embedding tied to its head",
    "gradient within the forward",
    "gradient within the forward, input without",
    "weights given by a call",
    "gradient within a checkpoint",
    "gradient within a reentrant checkpoint",
    "gradient of weights within a checkpoint",
    "matrix of the module, first",
    "matrix whole and in part",
}
"""Kinds in which a weight is used by its Linear and elsewhere too: what waits is added last. All others keep every bit."""
ONLY_OWN_MATRICES = {
    "raw parameters",
    "matrix of the module, linear",
    "matrix of the module, first",
    "matrix of the module, in a list",
    "matrix of the module, frozen",
    "matrix of the module before a compiled block",
    "checkpoint of a module with a matrix",
    "experts, batched",
    "experts, batched with bias",
    "experts, broadcast",
    "experts by einsum",
    "experts by einsum in parts",
    "experts gathered",
    "addmm",
    "addmm under autocast",
    "matrix turned",
    "matrix turned and linear",
    "matrix whole and in part",
    "halves of a matrix",
}
"""Kinds whose weights are only used by their module. Before 2.8, torch does not show who saves tensors, so their gradients stay in B."""
TOLERANCES = dict.fromkeys(ROUNDED, 1e-12) | {"autocast, gradient within the forward": 2**-7}
"""Under autocast that sum is one of bfloat16 numbers on one device."""
UNORDERED = 0 if DEVICE.type == "cpu" else 1e-14
"""The kernels of accelerators add in no fixed order."""


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # looked at while compiling a block behind a Linear
@pytest.mark.parametrize("name", every(3, KINDS))
def test_the_split_leaves_what_autograd_leaves(name: str) -> None:
    kind = KINDS[name]
    mine, oracle = train(kind.build, kind.takes, Ours), train(kind.build, kind.takes, Plain)
    assert difference(mine, oracle) <= TOLERANCES.get(name, UNORDERED)
    waits = kind.waits or (name == "autocast, convolution" and DEVICE.type != "cpu")
    assert bool(mine.waited) == (waits and (CAN_SEE_HOOKS or name not in ONLY_OWN_MATRICES))


ONE_OF_EACH = {
    *("gpt block", "conv2d and batch norm", "conv1d, grouped, strided and dilated", "embedding tied to its head", "embedding with padding"),
    *("autocast, three linears of one input", "experts grouped", "experts gathered", "halves of a matrix", "matrix whole and in part"),
    *("sparse embedding", "all frozen", "unused parts", "first and third tied"),
}
"""Kinds in which every way to leave weight gradients to W is met."""


class ByParameter(Ours):
    """The last two W's parameter by parameter. `first_grads` has the gradients at the time they were reported as complete."""

    def __init__(self, module: nn.Module, inputs: list[tuple[Tensor, ...]]) -> None:
        super().__init__(module, inputs)
        self.first_grads: dict[nn.Parameter, Tensor | None] = {}

    def note(self, parameters: Collection[nn.Parameter]) -> None:
        for parameter in parameters:
            assert parameter not in self.first_grads
            self.first_grads[parameter] = None if parameter.grad is None else parameter.grad.detach().clone()

    def weight(self, j: int) -> None:
        if j == 2:
            self.stage.begin_tail((2, 3), self.note)
        super().weight(j)
        if j == 3:
            assert set(self.first_grads) == {parameter for parameter in self.stage.parameters if parameter.requires_grad}
            for parameter, then in self.first_grads.items():
                assert (parameter.grad is None) == (then is None)
                assert then is None or torch.allclose(parameter.grad.to_dense(), then.to_dense(), rtol=UNORDERED, atol=UNORDERED)
            assert not self.stage.splitter.held()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("name", [name if name in ONE_OF_EACH else pytest.param(name, marks=pytest.mark.long) for name in KINDS])
def test_the_last_ws_leave_the_same_bits_parameter_by_parameter_and_say_when_they_are_complete(name: str) -> None:
    kind = KINDS[name]
    assert difference(train(kind.build, kind.takes, ByParameter), train(kind.build, kind.takes, Ours)) <= UNORDERED


class Collects(Ours):
    """Collects garbage before each W, when nothing outside the stage holds the graph of the forward."""

    def weight(self, j: int) -> None:
        gc.collect()
        super().weight(j)


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["hand-made function", "matrix of a view that scales its gradient", "output viewed", "first and third tied"]
)
def test_w_needs_no_graph_that_others_hold(name: str) -> None:
    """PyTorch tests the same: custom functions, views and shared weights, with the graph dropped between B and W."""
    kind = KINDS[name]
    assert difference(train(kind.build, kind.takes, Collects), train(kind.build, kind.takes, Plain)) <= TOLERANCES.get(name, UNORDERED)


class ChangesLater(nn.Module):
    """Remembers in a buffer, which a Linear reads and the next microbatch changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("memory", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.memory.add_(x.detach())
        y: Tensor = x * self.linear(self.memory)
        return y


def test_what_waits_may_not_change_before_w() -> None:
    module = ChangesLater()
    stage = make_stage("deferred", module, 0)
    with stage.stepping():
        stage.forward(0, (torch.ones(3, requires_grad=True),))
        stage.backward(0, (torch.ones(3),))
        stage.forward(1, (torch.ones(3, requires_grad=True),))
        with raises(InputError, "(1, 3)", "B", "W"):
            stage.weight(0)


class Checkpointed(nn.Module):
    """Running statistics within a checkpoint, which updates them in forward and in backward."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.use_reentrant = use_reentrant
        self.body = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.body, x, use_reentrant=self.use_reentrant)
        return y


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("split", ["deferred", "whole"])
def test_running_statistics_within_a_checkpoint_are_those_of_one_device_or_refused(split: str, use_reentrant: bool) -> None:
    inputs = [torch.rand(4, 3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    whole, stage = (Checkpointed(use_reentrant=use_reentrant) for _ in range(2))
    for x in inputs:
        whole(x).sum().backward()
    ours = make_stage(split, stage, 0)
    with ours.stepping():
        for microbatch, x in enumerate(inputs):
            ours.forward(microbatch, (x.detach().requires_grad_(),))
            ours.backward(microbatch, (torch.ones(4, 3, dtype=torch.float64),))
    assert all(torch.equal(one, other) for one, other in zip(stage.buffers(), whole.buffers(), strict=True))
    with ours.stepping():
        for microbatch, x in enumerate(inputs):
            ours.forward(microbatch, (x.detach().requires_grad_(),))
        with raises(InputError, "body.1", "leave"):
            ours.backward(0, (torch.ones(4, 3, dtype=torch.float64),))


def test_a_compiled_block_is_compiled_once_to_train_and_once_to_evaluate() -> None:
    compiles = CompileCounter()
    module = torch.compile(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), backend=compiles)
    for _ in range(5):
        with shadowing(module):
            module(torch.ones(2, 3, requires_grad=True))
        module(torch.ones(2, 3, requires_grad=True))
    assert compiles.frame_count == 2


def test_the_gradient_of_an_input_stays_when_a_parameter_reshaped_like_it_gets_more() -> None:
    kind = KINDS["parameter and input reshaped alike"]
    stage = make_stage("whole", kind.build(), 0)
    stage.forward(0, (torch.randn(SHAPE, requires_grad=True),))
    (sent,) = stage.backward(0, (torch.ones(SHAPE),))
    before = sent.clone()
    stage.forward(1, (torch.randn(SHAPE, requires_grad=True),))
    stage.backward(1, (torch.ones(SHAPE),))
    assert torch.equal(sent, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padding_idx", [None, 1])
@pytest.mark.parametrize("num_tokens", [2, 12, 20])
def test_what_waits_of_an_embedding_is_added_with_all_its_bits(num_tokens: int, padding_idx: int | None, dtype: torch.dtype) -> None:
    """Whether there are fewer tokens than rows, so that W looks at the rows of these alone, or not."""
    torch.manual_seed(0)
    layer = nn.Embedding(16, 4, padding_idx=padding_idx, dtype=dtype)
    tokens, dy = torch.randint(0, 6, (3, 2, num_tokens // 2)), torch.randn(3, 2, num_tokens // 2, 4, dtype=dtype)
    gradients = []
    for way in ("whole", "deferred"):
        layer.zero_grad()
        stage = make_stage(way, layer, 0)
        with stage.stepping():
            for microbatch in range(3):
                stage.forward(microbatch, (tokens[microbatch],))
                stage.backward(microbatch, (dy[microbatch],))
                stage.weight(microbatch)
        assert layer.weight.grad is not None
        gradients.append(layer.weight.grad)
    assert torch.equal(*gradients)
