"""Ranks of unequal speed: cuts against every other cut of small models, bounds, and plans with them."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import pytest

from zerobubble import InputError, Limits, Placement
from zerobubble.partition import Cuts, Layer, cut_layers

EXACT = [Placement.linear(2), Placement.linear(3), Placement.custom((2, 0, 1)), Placement.vee(2), Placement.vee(3), Placement.looped(2, 2)]
FEW_CUTS = [Placement.wave(2, 3), Placement.custom((0, 1, 0)), Placement.looped(2, 3)]
SPEEDS = (0.5, 1.0, 0.3, 2.0, 1.7)


def random_layers(dice: random.Random, count: int, most: int = 20) -> list[Layer]:
    """Layers whose times are rounded at most speeds."""
    return [Layer(*(dice.randint(0, most) for _ in range(3)), dice.randint(1, 6), 1, dice.randint(0, 9)) for _ in range(count)]


def random_problem(dice: random.Random, placement: Placement) -> tuple[list[Layer], tuple[float, ...]]:
    layers = random_layers(dice, placement.num_stages + dice.randint(0, max(0, 8 - placement.num_stages)))
    return layers, tuple(dice.choice(SPEEDS) for _ in range(placement.num_ranks))


def slowest(layers: list[Layer], placement: Placement, speeds: tuple[float, ...], cuts: Cuts) -> int:
    """What the slowest rank takes, pass by pass and layer by layer."""
    busy = [0] * placement.num_ranks
    for rank, (begin, end) in zip(placement.routes[0], pairwise((0, *cuts, len(layers))), strict=True):
        for layer in layers[begin:end]:
            busy[rank] += sum(round(time / speeds[rank]) for time in (layer.forward, layer.backward, layer.weight))
    return max(busy)


def every_cut(layers: list[Layer], placement: Placement) -> list[Cuts]:
    return list(combinations(range(1, len(layers)), placement.num_stages - 1))


def held(layers: list[Layer], placement: Placement, cuts: Cuts) -> list[int]:
    """The bytes that each rank holds with one microbatch in each stage."""
    found = [0] * placement.num_ranks
    for rank, (begin, end) in zip(placement.routes[0], pairwise((0, *cuts, len(layers))), strict=True):
        found[rank] += sum(layer.parameters_bytes + layer.held_after_f for layer in layers[begin:end])
    return found


@pytest.mark.parametrize("placement", [*EXACT, *FEW_CUTS], ids=lambda placement: f"{placement.name}-{placement.num_ranks}")
def test_no_cut_has_a_faster_slowest_rank(placement: Placement) -> None:
    dice = random.Random(placement.num_stages)
    for _ in range(60):
        layers, speeds = random_problem(dice, placement)
        cut = cut_layers(layers, placement, speeds=speeds)
        best = min(slowest(layers, placement, speeds, cuts) for cuts in every_cut(layers, placement))
        assert cut.slowest == slowest(layers, placement, speeds, cut.cuts) == best
        assert cut.bound == best


@pytest.mark.parametrize("placement", EXACT, ids=lambda placement: f"{placement.name}-{placement.num_ranks}")
def test_no_cut_within_the_memory_has_a_faster_slowest_rank(placement: Placement) -> None:
    dice = random.Random(placement.num_stages)
    refused = 0
    for _ in range(60):
        layers, speeds = random_problem(dice, placement)
        limits = Limits(tuple(dice.randint(15, 60) for _ in range(placement.num_ranks)))
        fitting = [cuts for cuts in every_cut(layers, placement) if all(map(int.__le__, held(layers, placement, cuts), limits.memory))]
        if not fitting:
            refused += 1
            with pytest.raises(InputError, match="no cuts fit"):
                cut_layers(layers, placement, limits, speeds=speeds)
            continue
        best = min(slowest(layers, placement, speeds, cuts) for cuts in fitting)
        assert cut_layers(layers, placement, limits, speeds=speeds).slowest == best
    assert refused < 55


@pytest.mark.parametrize("placement", [Placement.wave(3, 3), Placement.looped(4, 3)], ids=lambda placement: placement.name)
def test_the_search_is_near_its_bound(placement: Placement) -> None:
    dice = random.Random(3)
    for _ in range(2):
        layers = random_layers(dice, 40, 2000)
        speeds = tuple(dice.choice((0.5, 1.0)) for _ in range(placement.num_ranks))
        cut = cut_layers(layers, placement, speeds=speeds)
        assert cut.bound <= cut.slowest <= 1.1 * cut.bound
