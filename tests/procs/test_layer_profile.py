"""Layers measured one by one on the ranks of a pipeline: their times and bytes, and the better cut that follows from them.

The measured time of a layer includes no other layer.
"""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from tests.procs.measured import assert_least_within
from tests.procs.ranks import Ranks
from tests.procs.test_profile import UNIT_S, Doze
from tests.refusals import states
from zerobubble.runtime.stage.parts import Calls, Part, measure, recording_calls

WIDTH, ROWS = 16, 8
NAPS = (0, 0, 0, 0, 1, 5, 1, 3)
"""How many units of time each layer sleeps in F, and half of what it sleeps in B. No count of operations shows this."""


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), Doze(nap)) for nap in NAPS)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def slow_loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(Doze(2)(output), target)


def profile_and_cut_anew(group: Any) -> tuple[tuple[zb.partition.Layer, ...], list[list[int]]]:
    """The measured layers, and the ns of each stage in which the model is cut by operations, and by what was measured."""
    x = torch.ones(2 * ROWS, WIDTH)
    split = zb.split(Layers(), example=x)
    with zb.Pipeline(split, "1f1b", 2, slow_loss, group=group) as pipe:
        layers = pipe.profile_layers(x, x, steps=2)
        before = pipe.profile(x, x)
        assert all(parameter.grad is None for parameter in pipe.parameters())
    plan = zb.plan(layers, 2, placements=zb.Placement.linear(2), evaluations=20)
    with zb.Pipeline(split, plan, 2, slow_loss, group=group) as pipe:
        after = pipe.profile(x, x)
        pipe.step(x, x)
    return layers, [list(map(sum, zip(each.forward, each.backward, each.weight, strict=True))) for each in (before, after)]


@pytest.mark.long
def test_layers_are_measured_where_they_run_and_cut_better_by_that(world: Ranks) -> None:
    def measure() -> list[float]:
        (layers, (before, after)), *others = world.run(profile_and_cut_anew, ranks=2)
        assert all(other[0] == layers for other in others)
        assert [layer.full_name for layer in layers] == [f"layers.{number}" for number in range(len(NAPS))]
        for layer in layers:
            assert layer is layers[0] or layer.held_after_f >= 4 * ROWS * WIDTH, "the input of the Linear"
            assert layer.parameters_bytes == (WIDTH * WIDTH + WIDTH) * 16
        # Of what is to be reached, the largest of all measurements counts, and of all other times the least.
        to_reach = [layers[-1].forward, layers[-1].backward]
        return [
            max(before),
            max(after),
            *(-time for time in to_reach),
            *(time for layer in layers for time in (layer.forward, layer.backward, layer.weight)),
        ]

    unit = UNIT_S * 1e9
    naps = 3 * (sum(NAPS) + 2) * unit
    # The loss is the last layer's, and is what the stage takes beyond its layers: where those are measured too long, it is too short.
    losses = [0] * (len(NAPS) - 1) + [2]
    of_layers = [
        bounds
        for nap, loss in zip(NAPS, losses, strict=True)
        for bounds in ((nap * unit, (nap + loss + 1) * unit), (2 * nap * unit, 2 * (nap + loss + 1) * unit), (1.0, unit))
    ]
    # Cut by operations, one stage has all naps.
    with_loss = [(-inf, -times * (NAPS[-1] + 1) * unit) for times in (1, 2)]
    assert_least_within(measure, [(0.95 * naps, inf), (0.0, 0.8 * naps), *with_loss, *of_layers])


def refuse_own_stages(group: Any) -> str:
    x = torch.ones(ROWS, WIDTH)
    with zb.Pipeline(lambda stage, stages: nn.Linear(WIDTH, WIDTH), "1f1b", 2, slow_loss, group=group) as pipe:
        with pytest.raises(zb.InputError) as caught:
            pipe.profile_layers(x, x)
        pipe.step(x, x)
    return str(caught.value)


def test_layers_of_stages_by_hand_are_not_known(world: Ranks) -> None:
    for message in world.run(refuse_own_stages, ranks=2):
        states(message, "zb.split", "model")


def profile_frozen(group: Any) -> tuple[zb.partition.Layer, ...]:
    model = Layers()
    for layer in model.layers[:3]:
        layer.requires_grad_(False)
    x = torch.ones(2 * ROWS, WIDTH)
    with zb.Pipeline(zb.split(model, example=x), "zb-h1", 2, slow_loss, group=group) as pipe:
        return pipe.profile_layers(x, x, steps=1)


@pytest.mark.long
def test_frozen_layers_below_all_that_trains_have_forwards_alone(world: Ranks) -> None:
    layers = world.run(profile_frozen, ranks=2)[0]
    for number, layer in enumerate(layers):
        assert (layer.backward > 0, layer.weight > 0) == ((number >= 3,) * 2)
        assert layer.parameters_bytes == (WIDTH * WIDTH + WIDTH) * (16 if number >= 3 else 4)


def test_a_part_with_one_frozen_parameter_takes_time_in_w() -> None:
    module = nn.Linear(WIDTH, WIDTH)
    module.bias.requires_grad_(False)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    cost = measure(Part("linear", "", module, module), [((x,), {})], torch.device("cpu"), 2)
    assert cost.weight > 0


def test_a_frozen_part_takes_time_in_b_if_one_of_its_arguments_requires_a_gradient() -> None:
    class Sum(nn.Linear):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x + y)

    module = Sum(WIDTH, WIDTH).requires_grad_(False)
    x, y = torch.randn(ROWS, WIDTH, requires_grad=True), torch.randn(ROWS, WIDTH)
    cost = measure(Part("sum", "", module, module), [((x, y), {})], torch.device("cpu"), 2)
    assert cost.backward > 0
    assert cost.weight == 0


def test_calls_of_the_first_forward_are_recorded_in_their_order() -> None:
    stage = Layers()
    first, second = stage.layers[1], stage.layers[0]
    parts = [Part("first", "", first, first), Part("second", "", second, second)]
    calls: Calls = {}
    x = torch.ones(ROWS, WIDTH)
    with recording_calls(stage, parts, calls):
        stage(x)
        stage(2 * x)
    stage(x)
    assert list(calls) == ["second", "first"]
    ((args, kwargs),) = calls["second"]
    assert torch.equal(args[0], x)
    assert kwargs == {}
    assert len(calls["first"]) == 1


def test_costs_of_a_part_are_those_of_all_its_calls() -> None:
    """Bytes are counted once per call: the input that W needs, and the output of tanh that B needs."""
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    part, size = Part("part", "", module, module), ROWS * WIDTH * 4
    once = measure(part, [((x,), {})], torch.device("cpu"), 2)
    twice = measure(part, [((x,), {}), ((x,), {})], torch.device("cpu"), 2)
    assert once.held_after_f == 2 * size
    assert once.held_after_b == 2 * size
    assert (twice.held_after_f, twice.held_after_b) == (2 * once.held_after_f, 2 * once.held_after_b)
    assert min(once.forward, once.backward, once.weight) > 0


def test_a_part_without_gradients_takes_time_in_f_alone() -> None:
    module = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    cost = measure(Part("linear", "", module, module), [((torch.randn(ROWS, WIDTH),), {})], torch.device("cpu"), 2)
    assert cost.forward > 0
    assert (cost.backward, cost.weight, cost.held_after_f, cost.held_after_b) == (0, 0, 0, 0)
