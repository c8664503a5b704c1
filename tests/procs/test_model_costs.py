"""Cost estimates of a model's units: their operations, counted by hand, and the split chosen from them."""

from __future__ import annotations

from collections.abc import Callable
from time import thread_time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import zerobubble as zb
from zerobubble.cost_model.machine import COUNTING, Machine
from zerobubble.models.cutting.costs import estimated_layers
from zerobubble.models.observation.observed_model import ObservedModel
from zerobubble.models.observation.units import find_units
from zerobubble.partition import Layer
from zerobubble.runtime.stage.stage import make_stage

ROWS, WIDTH = 6, 16
PRODUCT = 2 * ROWS * WIDTH * WIDTH


def estimated(model: nn.Module, example: Tensor | None = None) -> tuple[Layer, ...]:
    split: Any = zb.split(model, example=torch.zeros(ROWS, WIDTH) if example is None else example)
    layers: tuple[Layer, ...] = split.layers(COUNTING)
    return layers


def test_a_linear_takes_a_product_for_each_pass_that_it_needs() -> None:
    frozen = [nn.Linear(WIDTH, WIDTH).requires_grad_(False) for _ in range(2)]
    model = nn.Sequential(frozen[0], nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), frozen[1])
    times = [(layer.forward, layer.backward, layer.weight) for layer in estimated(model)]
    assert times == [(PRODUCT, 0, 0), (PRODUCT, 0, PRODUCT), (PRODUCT, PRODUCT, PRODUCT), (PRODUCT, PRODUCT, 0)]


def test_bytes_are_those_that_are_held() -> None:
    first, second = estimated(nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))))
    activation = 4 * ROWS * WIDTH
    assert (second.held_after_f, second.held_after_b, second.output_comm) == (activation, 2 * activation, activation)
    assert first.parameters_bytes == WIDTH * WIDTH * (4 + 4 + 8)
    half = estimated(nn.Sequential(nn.Linear(WIDTH, WIDTH).bfloat16(), nn.ReLU()), torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16))[0]
    assert half.parameters_bytes == (WIDTH * WIDTH + WIDTH) * (2 + 2 + 8 + 4)
    of_config = zb.cost_model.transformer("llama3-70b", gpu="H100", pp=8, dp=2, gradients="bf16", shard_optimizer=False)
    per_parameter = half.parameters_bytes // (WIDTH * WIDTH + WIDTH)
    assert of_config.state_bytes == tuple(per_parameter * count for count in of_config.parameters)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.mix(x).unflatten(-1, (3, 2, -1)).movedim(-3, 0).transpose(-2, -3)
        return nn.functional.scaled_dot_product_attention(query, key, value).transpose(-2, -3).flatten(-2)


class Freeing(torch.autograd.Function):
    """An exponential whose backward frees its state, which is an attribute or in a container, as reversible blocks do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: type) -> Tensor:
        y = x.exp()
        ctx.state = {Tensor: y, list: [y], dict: {0: y}}[kind]
        return y.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        state = ctx.state if isinstance(ctx.state, Tensor) else ctx.state.pop(0)
        if isinstance(ctx.state, Tensor):
            del ctx.state
        return gradient * state, None


class Exponential(nn.Linear):
    def __init__(self, kind: type) -> None:
        super().__init__(WIDTH, WIDTH)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        return Freeing.apply(super().forward(x), self.kind)  # type: ignore[no-untyped-call, no-any-return]


@pytest.mark.parametrize("kind", [Tensor, list, dict])
def test_a_backward_that_frees_its_state_is_counted_and_cut(kind: type) -> None:
    model = nn.Sequential(*(Exponential(kind) for _ in range(4)))
    split: Any = zb.split(model, example=torch.zeros(ROWS, WIDTH))
    times = [(layer.forward, layer.backward, layer.weight) for layer in split.layers(COUNTING)]
    assert times == [(PRODUCT, 0, PRODUCT), *((PRODUCT, PRODUCT, PRODUCT) for _ in range(3))]
    assert [sum(parameter.requires_grad for parameter in split(stage, 2).parameters()) for stage in range(2)] == [4, 4]


def test_attention_is_counted_as_gpus_run_it() -> None:
    length = 512
    _, layer = estimated(nn.Sequential(Attention(), Attention()), torch.zeros(1, length, WIDTH))
    scores = 2 * 2 * length * length * WIDTH
    assert layer.forward == 2 * length * WIDTH * 3 * WIDTH + scores
    assert layer.backward > 2 * length * WIDTH * 3 * WIDTH + 2 * scores
    assert layer.held_after_f < 4 * 2 * length * length, "no matrix of scores is kept"


def test_a_frozen_beginning_is_cut_by_what_it_costs() -> None:
    blocks = [nn.Linear(WIDTH, WIDTH) for _ in range(11)]
    for block in blocks[:8]:
        block.requires_grad_(False)
    split: Any = zb.split(nn.Sequential(*blocks), example=torch.zeros(ROWS, WIDTH))
    assert [len(stage.units) for stage in split.stages(2)] == [8, 3]


class LowRank(nn.Module):
    """A frozen block with a trained change of low rank, as LoRA has it."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.last = (nn.Linear(WIDTH, WIDTH).requires_grad_(False) for _ in range(2))
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(torch.tanh(self.base(x) + self.up(self.down(x))))
        return result


def counted(run: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops())


@pytest.mark.parametrize("frozen", ["first", "base", "none"])
def test_passes_of_a_stage_run_the_operations_that_are_estimated(frozen: str) -> None:
    """Of adapters behind frozen weights, the price of W is theirs alone, in the first block, too."""
    model = nn.Sequential(*(LowRank() for _ in range(3)))
    if frozen != "base":
        model[0].requires_grad_(frozen == "none")
    layers, stage, x = estimated(model), make_stage("deferred", model, 0), torch.ones(ROWS, WIDTH)
    stage.begin(None)
    with stage.stepping():
        assert counted(lambda: stage.forward(0, (x,))) == sum(layer.forward for layer in layers)
        assert counted(lambda: stage.backward(0, (torch.ones(ROWS, WIDTH),))) == sum(layer.backward for layer in layers)
        assert counted(lambda: stage.weight(0)) == sum(layer.weight for layer in layers)
    low = 2 * ROWS * WIDTH * 2
    assert layers[1].weight == 2 * low
    assert (layers[0].backward, layers[0].weight) == {
        "first": (0, 0),
        "base": (PRODUCT + low, 2 * low),
        "none": (PRODUCT + low, 2 * PRODUCT + 2 * low),
    }[frozen]


@pytest.mark.long
def test_a_hundred_layers_without_weights_are_cut_in_seconds() -> None:
    with torch.device("meta"):
        blocks = [nn.TransformerEncoderLayer(2048, 16, 8192, batch_first=True) for _ in range(100)]
        model = nn.Sequential(*blocks, nn.Linear(2048, 64))
    began = thread_time()
    units = find_units(model)
    flow = ObservedModel(model, units).flow((torch.zeros(1, 128, 2048, device="meta"),), {}, training=True)
    layers = estimated_layers(units, flow, Machine())
    cut = zb.partition.cut_layers(layers, zb.Placement.vee(8))
    assert thread_time() - began < 60, "seconds of this thread, most often about 3"
    assert len(layers) == 101
    assert cut.slowest == cut.bound
